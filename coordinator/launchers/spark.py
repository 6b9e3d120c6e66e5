"""A cluster on Spark: the coordinator beside the driver, shards and workers as tasks of one job."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.launchers.plan import LaunchPlan
from coordinator.launchers.spark_job import (
    MARK,
    REFUSED,
    MemberTask,
    SparkJob,
)
from coordinator.launchers.task_process import EchoedProcess
from psrpc.core.errors import LaunchFailed
from psrpc.core.text import counted
from psrpc.files.run_paths import read_summary
from psrpc.ops.exit_status import DONE, DRAINED, INTERRUPTED
from psrpc.ops.extras import missing
from psrpc.ops.logs import get_logger
from psrpc.ops.process import module_command
from psrpc.ops.retry import Announcer

TICK_S = 0.2
"""Longest delay before the driver notices that something has ended."""

SETTLE_S = 15.0
"""How long executors may take to register one after the other."""

LEAVE_S = 30.0
"""How long shards and workers may take to end after the coordinator has."""

DRAIN_S = 90.0
"""How long the coordinator may take to drain."""

HASTE_S = 10.0
"""How long the coordinator may drain when the Spark job is over. Shards and workers are gone then,
or Spark kills them within seconds."""

log = get_logger()


def run(context: Any, plan: LaunchPlan) -> dict[str, Any]:
    """Runs a cluster to the end of its job; returns its summary. See :func:`launch.spark`."""
    with _signals() as said, _Cluster(context, plan, said) as cluster:
        status = cluster.run()
    if said:
        # Repeat the signal now that its previous handler is back: SIGINT raises KeyboardInterrupt.
        signal.raise_signal(said[-1])
    if status not in (DONE, INTERRUPTED):
        raise cluster.failure(status)
    return read_summary(plan.options.run_dir)


def context_of(spark: Any) -> Any:
    """Returns the ``SparkContext`` of a session, or the given context itself.

    Raises:
        InvalidJob: pyspark is missing.
        LaunchFailed: the session is one of Spark Connect, or its settings do not allow a cluster.
    """
    try:
        from pyspark import SparkContext
    except ModuleNotFoundError:
        raise missing("launch.spark", "pyspark", "spark") from None
    if isinstance(spark, SparkContext):
        context = spark
    elif type(spark).__module__.startswith("pyspark.sql.connect"):
        raise LaunchFailed(
            "the session is one of Spark Connect, which starts no tasks of Python; make one with "
            "SparkSession.builder.master(...) where the driver runs"
        )
    else:
        context = spark.sparkContext
    if context.getConf().get("spark.speculation", "false") == "true":
        raise LaunchFailed(
            "spark.speculation is true: a second attempt of a slow task would be a second process "
            "in its place; set it to false for this application"
        )
    return context


def await_slots(context: Any, plan: LaunchPlan) -> None:
    """Waits until Spark has a slot for each shard and worker; see :func:`await_tasks`."""
    asked = (
        f"the cluster has {counted(plan.options.shards, 'shard')} and "
        f"{counted(plan.options.workers, 'worker')}"
    )
    await_tasks(context, plan.tasks - 1, asked, plan.options.connect_timeout_s)


def await_tasks(context: Any, needed: int, asked: str, limit_s: float) -> None:
    """Waits until Spark has ``needed`` slots, as long as executors still register.

    Args:
        asked: what takes the slots, the beginning of the message.
        limit_s: how long the first executor may take to register.

    Raises:
        LaunchFailed: there are too few slots.
    """
    most = _most_slots(context)
    found, since = 0, time.monotonic()
    begun = since
    announcer = Announcer(lambda reason, s: log.info("waiting", waiting_for=reason, s=round(s)))
    while most is None and (slots := _slots(context)) < needed:
        now = time.monotonic()
        if slots > found:
            found, since = slots, now
        if now - (since if found else begun) > (SETTLE_S if found else limit_s):
            most = slots
            break
        announcer.waiting(f"executors of Spark: {counted(slots, 'slot')} of {needed}", now)
        time.sleep(TICK_S)
    if most is not None and most < needed:
        raise LaunchFailed(
            f"{asked}, each of which takes a slot, and Spark has {counted(most, 'slot')} "
            f"({_setting(context, 'spark.task.cpus', '1')} of spark.task.cpus each); ask for "
            "fewer, or start Spark with more executors or cores"
        )


def _slots(context: Any) -> int:
    """Returns how many tasks the present executors run at a time. Spark itself uses this number
    before a barrier stage."""
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    return int(scala.maxNumConcurrentTasks(profile))


def _most_slots(context: Any) -> int | None:
    """Returns how many slots dynamic allocation may reach; None without it."""
    if _setting(context, "spark.dynamicAllocation.enabled", "false") != "true":
        return None
    cores = int(_setting(context, "spark.executor.cores", "1"))
    executors = int(_setting(context, "spark.dynamicAllocation.maxExecutors", str(2**31 - 1)))
    return executors * (cores // int(_setting(context, "spark.task.cpus", "1")))


def _setting(context: Any, name: str, default: str) -> str:
    return str(context.getConf().get(name, default))


class _Cluster:
    """The coordinator as a child of this process, and the Spark job of shards and workers."""

    def __init__(self, context: Any, plan: LaunchPlan, said: Sequence[int]) -> None:
        """``said`` grows by each stop signal to this process; the coordinator gets each, too."""
        self._plan, self._run_dir = plan, plan.options.run_dir
        self._said, self._sent = said, 0
        self._lives = int(_setting(context, "spark.task.maxFailures", "4"))
        host = _setting(context, "spark.driver.host", "127.0.0.1")
        bind = _setting(context, "spark.driver.bindAddress", host)
        here, launch = str(Path.cwd()), secrets.token_hex(8)
        arguments = [*plan.coordinator, "--bind", f"{bind}:{plan.port}", "--die-with-parent"]
        self._coordinator = EchoedProcess(module_command("coordinator.cli", *arguments), here)
        self._task = MemberTask(plan, launch, f"{host}:{plan.port}", here)
        self._job = SparkJob(context, self._task)

    def __enter__(self) -> _Cluster:
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            (self._run_dir / REFUSED).unlink(missing_ok=True)
            (self._run_dir / MARK).write_text(self._task.launch)
        except OSError as error:
            raise LaunchFailed(
                f"{str(self._run_dir)!r} cannot be written: {error.strerror}"
            ) from None
        self._coordinator.start()
        self._job.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drains what still runs, and cancels the Spark job."""
        now = time.monotonic()
        due = [
            (now, signal.SIGTERM),
            *([(now + HASTE_S, signal.SIGTERM)] * self._job.over),
            (now + DRAIN_S, signal.SIGKILL),
        ]
        while self._ended() is None:
            while due and due[0][0] <= time.monotonic():
                self._coordinator.send(due.pop(0)[1])
        self._job.cancel(LEAVE_S)

    def run(self) -> int:
        """Waits for the end of the coordinator; returns its status.

        Raises:
            LaunchFailed: a process refuses its command, Spark has given up the job, or has no slot
                for one of its tasks.
        """
        while True:
            status = self._ended()
            if status is None:
                self._check()
            elif self._said or (status >= 0 and status != DRAINED):
                break
            else:
                self._lives -= 1
                if self._lives <= 0:
                    break
                log.warning("the coordinator starts again", status=status)
                self._coordinator.start()
        if status in (DONE, INTERRUPTED):
            self._job.join(LEAVE_S)
        return status

    def failure(self, status: int) -> LaunchFailed:
        """Returns the error for a coordinator that has ended with ``status``."""
        return LaunchFailed(
            self._coordinator.reason or f"the coordinator ended with status {status}"
        )

    def _ended(self) -> int | None:
        """Passes new signals on to the coordinator and waits for a tick; returns the coordinator's
        status, or None if it still runs."""
        for number in self._said[self._sent :]:
            self._coordinator.send(number)
            self._sent += 1
        return self._coordinator.wait(TICK_S)

    def _check(self) -> None:
        if (self._run_dir / REFUSED).exists():
            raise LaunchFailed((self._run_dir / REFUSED).read_text())
        if not self._job.over:
            self._job.check_started(self._plan.options.connect_timeout_s)
        elif self._job.failed or self._coordinator.wait(LEAVE_S) is None:
            raise self._job.failure()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields a list to which stop signals of this process are added. It stays empty outside the
    main thread, where handlers cannot be set.

    The handlers replace pyspark's own, which ends all tasks at once on Ctrl-C.
    """
    said: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield said
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, _: said.append(number)) for each in numbers]
    try:
        yield said
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
