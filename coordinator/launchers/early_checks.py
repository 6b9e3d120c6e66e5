"""Checks a launch for what the coordinator would refuse only on the cluster. Needs NumPy, which the
options in :mod:`coordinator.launchers.plan` do without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coordinator.core.description import DENSE, DenseLayout, check_for_shards, no_shard_belongs
from coordinator.launchers.plan import ClusterOptions, LaunchPlan, plan_of
from psrpc.core.errors import InvalidArgument, InvalidJob, PsError
from psrpc.core.policy import MODES, check_dense
from psrpc.core.tables import TableSpec
from psrpc.options.job_source import (
    look_at_settings,
    may_have_tables,
    said_of_job,
    setting_pair,
)

_A_TABLE = TableSpec("a table", 1, None, {}, {})
"""Stands for those that a model may have."""


def plan_to_launch(job: Path, options: ClusterOptions, *, elsewhere: bool = False) -> LaunchPlan:
    """Returns :func:`plan_of`, and checks what the coordinator would refuse on the cluster, as far
    as the options and the source of the job show it.

    Raises:
        InvalidJob: there are too few shards, or too few workers for the slices.
        InvalidSetting: the mode is not for ``dense="allreduce"``.
        InvalidArgument: the cluster has shards, and workers host all parameters; or see
            :func:`plan_of`.
    """
    plan = plan_of(job, options, elsewhere=elsewhere)
    tree, modules = (None, None) if elsewhere else look_at_settings(job, options.overrides)
    said = None if tree is None else said_of_job(tree)
    _check_layout(options, said, may_have_tables(modules))
    return plan


def _check_layout(
    options: ClusterOptions, of_job: Mapping[str, object] | None, may_have_tables: bool
) -> None:
    """Refuses what the coordinator would refuse, whatever the source leaves open. ``of_job`` has
    the arguments that it gives the job; None if it does not show them."""
    said = {**(of_job or {}), **dict(map(setting_pair, options.overrides))}
    dense = said.get("dense", "shards" if of_job is not None else ...)
    mode = options.mode or said.get("mode", "async" if of_job is not None else ...)
    slices = str(said.get("slices"))
    way = next((way for way in DENSE if way == dense), None)
    if way is None:
        return
    if (known := next((known for known in MODES if known == mode), None)) is not None:
        check_dense(way, known)
    refused: list[PsError] = []
    for tables in ((), (_A_TABLE,))[: 1 + may_have_tables]:
        number = int(slices) if slices.isdecimal() else None
        layout = DenseLayout(dense=way, slices=number, tables=tables)
        try:
            if layout.hosted and options.shards and not tables:
                raise no_shard_belongs()
            check_for_shards(layout, options.shards, options.workers)
        except (InvalidJob, InvalidArgument) as error:
            refused.append(error)
        else:
            return
    raise refused[0]
