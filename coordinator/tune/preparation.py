"""Checks a study before anything starts: its job, space, metric and machine."""

from __future__ import annotations

import ast
import asyncio
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from coordinator.core.description import JobDescription, check_for_shards
from coordinator.launch.commands import cluster_environment
from coordinator.launch.warm_start import WarmStart
from coordinator.process.describing import DescribeFailed, describe_command, describe_job
from coordinator.search.points import (
    Point,
    Space,
    in_words_of_space,
    overrides_of,
    read_space,
    split_options,
)
from coordinator.search.space import KINDS
from coordinator.search.trials import (
    StudyLimits,
    StudyMetric,
    check_metric,
    likely_metric,
    read_metric,
)
from coordinator.tune.options import PRUNERS, TRIALS, Pruner, TuneArguments
from coordinator.tune.optuna_study import StudyRules
from psrpc.core.errors import InvalidArgument, InvalidSetting
from psrpc.core.text import counted
from psrpc.options.job_source import first_look, look_at_settings

CORNERS = 8
"""Most points at which the job is described before a study begins; each takes a second."""

NO_SPACE = (
    "there is nothing to search: say --space 'optimizer.learning_rate=log(1e-4, 1e-1)', or, after "
    '`from pserver import space`, give the job file a search = {"optimizer.learning_rate": '
    "space.log(1e-4, 1e-1)}"
)

EACH_EPOCH = "evaluate_every_epoch=true"
"""A setting of every trial, unless the user overrides it: the pruner needs each epoch's metric."""


@dataclass(frozen=True)
class Preparation:
    """A study that has been checked and may begin.

    Attributes:
        identity: the description of the study, which its directory stores.
    """

    rules: StudyRules
    limits: StudyLimits
    metric: StudyMetric
    name: str
    identity: Mapping[str, Any]


def prepare_study(
    args: TuneArguments, job: str, warm_start: WarmStart | None, *, elsewhere: bool = False
) -> Preparation:
    """Describes the job at the ends of its space, and checks everything.

    Args:
        elsewhere: trials run on other machines, so the GPUs of this one do not count.

    Raises:
        InvalidArgument: an option, the space or the metric cannot be used; says the fix.
        InvalidJob: the job cannot be used; says the fix.
        DescribeFailed: the job refuses an end of the space, or is unusable.
    """
    texts = split_options(args.space)
    space = read_space(texts) if texts else None
    if space is not None:
        _check_counts(args, space)
        # Finds an unknown key in milliseconds if the job file shows all of its settings.
        corner = space.corners[0]
        try:
            first_look(Path(job), (*args.overrides, *overrides_of(corner)))
        except InvalidSetting as error:
            words = in_words_of_space(str(error), corner)
            raise InvalidSetting(words, code=error.code) from None
    else:
        check_search_name(Path(job), args.overrides)
    if not elsewhere:
        check_gpus(args, gpu_count(os.environ))
    metric = read_metric(args.metric) if args.metric else None
    # Without EACH_EPOCH, which a job without evaluations refuses with another message.
    first = describe_points(job, args.overrides, args, [_first(space)], warm_start)[0]
    if space is None:
        found = first.document.get("search")
        if not isinstance(found, dict) or not found:
            raise InvalidArgument(NO_SPACE)
        space = read_space(found)
        _check_counts(args, space)
        described: list[JobDescription] = []
    else:
        described = [first]
    metric = metric or _kept_best(first)
    check_metric(metric, first.metrics, first.eval_records > 0)
    check_for_shards(first, args.shards, args.workers)
    points = space.corners[len(described) : CORNERS]
    described += describe_points(job, trial_overrides(args), args, points, warm_start)
    pruner = next((each for each in PRUNERS if each == args.pruner), _default_pruner(args))
    rules = StudyRules(
        space,
        args.sampler,
        pruner,
        metric.direction,
        args.seed,
        max(each.epochs for each in described),
    )
    identity = {
        "job": first.name,
        "job_sha256": first.job_sha256,
        "space": space.to_json(),
        "metric": str(metric),
        "sampler": args.sampler,
        "seed": args.seed,
        "shards": args.shards,
        "workers": args.workers,
        "mode": args.mode,
        "replicas": args.replicas,
        "overrides": list(args.overrides),
    }
    limits = StudyLimits(_trials(args, space), args.parallel, args.max_failures)
    return Preparation(rules, limits, metric, first.name, identity)


def check_search_name(job: Path, overrides: Sequence[str]) -> None:
    """Refuses a job file that has a space under another name than ``search``, by its text alone.

    Raises:
        InvalidArgument: it has; names the nearest one.
        InvalidJob: the file cannot be read.
        InvalidSetting: as of :func:`first_look`.
    """
    tree, _ = look_at_settings(job, overrides)
    spaces: list[str] = []
    for name, value in _assigned(tree):
        if name == "search":
            return
        if isinstance(value, ast.Dict) and value.values and all(map(_is_range, value.values)):
            spaces.append(name)
    if spaces:
        [nearest] = get_close_matches("search", spaces, 1, 0) or spaces[:1]
        raise InvalidArgument(
            f"there is nothing to search: {job} has no `search`, and its `{nearest}` looks like a "
            f"space; say search = {{...}} in place of {nearest} = {{...}}"
        )


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yields the names that a module binds at its top level, with the values of assignments."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((each.id, node.value) for each in targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name, None) for each in node.names)


def _is_range(value: ast.expr) -> bool:
    """Whether an expression calls a function of ``pserver.space``."""
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in KINDS


def _default_pruner(args: TuneArguments) -> Pruner:
    return "none" if args.sampler in ("grid", "zip") else "hyperband"


def _kept_best(description: JobDescription) -> StudyMetric:
    kept = description.keep_best
    if kept is None:
        names = description.metrics if description.eval_records else ()
        such = next((name for name in names if name != "loss"), "accuracy")
        raise InvalidArgument(
            f"--metric is missing: say what to improve, for example --metric {likely_metric(such)}"
        )
    return StudyMetric("min" if kept.lower else "max", kept.metric)


def _trials(args: TuneArguments, space: Space) -> int:
    if args.sampler in ("grid", "zip"):
        points = space.grid_size if args.sampler == "grid" else space.pairs
        return points if args.trials is None else min(args.trials, points)
    return TRIALS if args.trials is None else args.trials


def _check_counts(args: TuneArguments, space: Space) -> None:
    """Refuses a sampler that does not fit the space, and settings that are said twice."""
    _trials(args, space)
    said = {override.partition("=")[0].strip() for override in args.overrides}
    for key in space.ranges:
        if key in said:
            raise InvalidArgument(
                f"{key} is searched, and --set gives it one value; leave one of the two out"
            )


def _first(space: Space | None) -> Point:
    return space.corners[0] if space is not None else {}


def describe_points(
    job: str,
    overrides: Sequence[str],
    args: TuneArguments,
    points: Sequence[Point],
    warm_start: WarmStart | None,
) -> list[JobDescription]:
    """Describes the job at ``points``, with ``overrides`` before them. Raises DescribeFailed."""
    environment = cluster_environment(os.environ)
    client = warm_start.client if warm_start is not None else None

    async def described() -> list[JobDescription]:
        found = []
        # One after the other: as many imports at once as there are points would take longer.
        for point in points:
            said = (*overrides, *overrides_of(point))
            command = describe_command(Path(job), args.mode, args.replicas, said)
            try:
                found.append(await describe_job(command, environment, client))
            except DescribeFailed as error:
                raise DescribeFailed(in_words_of_space(str(error), point)) from None
        return found

    return asyncio.run(described())


def trial_overrides(args: TuneArguments) -> tuple[str, ...]:
    """Returns the values of ``--set`` that every trial has, before those of its own point."""
    return (EACH_EPOCH, *args.overrides)


def gpu_count(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs that TensorFlow would see, without asking it."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((at for at, name in enumerate(names) if not name or name == "-1"), len(names))
    devices = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir())


def check_gpus(args: TuneArguments, gpus: int) -> None:
    """Refuses more trials at the same time than GPUs. Raises InvalidArgument."""
    if args.gpu == "none" or not gpus or args.gpu_memory_fraction is not None:
        return
    room = gpus if args.gpu == "auto" else 1
    if args.parallel > room:
        which = f"have {counted(gpus, 'GPU')}" if args.gpu == "auto" else f"share --gpu {args.gpu}"
        raise InvalidArgument(
            f"--parallel is {args.parallel}, and the trials {which}; say --parallel {room}, "
            "--gpu none, or --gpu-memory-fraction for trials that share one"
        )


def gpu_of(args: TuneArguments, slot: int, gpus: int) -> str:
    """Returns the value of ``--gpu`` for the trial in a slot."""
    return str(slot % gpus) if args.gpu == "auto" and gpus else args.gpu
