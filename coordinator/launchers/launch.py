"""Launchers for Python: ``from pserver import launch; launch.slurm("job.py", run_dir=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from coordinator.launchers.plan import ClusterOptions, LaunchPlan, plan_of
from psrpc.core.errors import InvalidArgument
from psrpc.options.declaration import NotThis, options_of


def slurm(
    job: str | Path,
    *,
    run_dir: str | Path,
    sbatch: Mapping[str, str] | None = None,
    **options: object,
) -> int:
    """Submits a cluster to Slurm, as ``coordinator launch slurm`` does.

    Args:
        job: the job file, which all nodes see.
        run_dir: a directory that all nodes see; the same call again goes on with its run.
        sbatch: options of ``sbatch`` by name without dashes, such as ``{"time": "1:00:00"}``.
        options: fields of `ClusterOptions`, such as ``shards=2, workers=4, certs="certs"``.

    Returns:
        The number of the batch job.

    Raises:
        PsError: an option is wrong, or Slurm refuses the job; has its words.
    """
    from coordinator.launchers import slurm

    plan = plan_from(job, run_dir, options)
    batch = slurm.BatchOptions(dict(sbatch or {}))
    slurm.check_slots(plan, batch)
    return slurm.submit(slurm.write_script(plan, batch, Path.cwd()))


def plan_from(job: str | Path, run_dir: str | Path, options: Mapping[str, object]) -> LaunchPlan:
    """Checks options as they are given in Python: paths as text, too, and lists.

    Raises:
        InvalidJob: there is no such job file.
        InvalidArgument: there is no such option, named with the nearest one, or it takes no such
            value, or the cluster would be open to others and the user has not said so.
    """
    declared = {each.name: each for each in options_of(ClusterOptions) if each.name != "run_dir"}
    said: dict[str, Any] = {}
    for name, value in options.items():
        if name not in declared:
            near = get_close_matches(name, declared, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(declared)}"
            raise InvalidArgument(f"a cluster has no option {name!r}; {advice}")
        if value is None:
            continue
        plain = list(value) if isinstance(value, tuple) else value
        try:
            said[name] = declared[name].from_toml(str(value) if isinstance(value, Path) else plain)
        except NotThis as expected:
            raise InvalidArgument(f"{name} is {value!r}; expected {expected}") from None
    return plan_of(Path(job), ClusterOptions(run_dir=Path(run_dir).absolute(), **said))
