"""The parts of ``launch.spark`` that need no Spark; tests/launchers has the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.launchers import spark, spark_job
from coordinator.launchers.launch import plan_from
from coordinator.launchers.plan import LaunchPlan
from coordinator.launchers.spark_data import frames_of, place
from coordinator.launchers.spark_job import MARK, REFUSED, MemberTask, reason_of
from coordinator.launchers.task_process import MemberEnded
from pserver import launch
from psrpc.core.errors import LaunchFailed, PsError
from tests.e2e.cluster import EXAMPLES

JOB = EXAMPLES / "mnist_dnn.py"


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return plan_from(JOB, tmp_path, {"shards": 2, "workers": 2, "insecure": True})


class Context:
    """As much of a SparkContext as tells settings and slots."""

    def __init__(self, slots: Sequence[int] = (), **settings: str) -> None:
        self._slots = iter(slots)
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}

    def getConf(self) -> Context:  # noqa: N802
        return self

    def get(self, name: str, default: str) -> str:
        return self._settings.get(name, default)

    @property
    def _jsc(self) -> Context:
        return self

    def sc(self) -> Context:
        return self

    def resourceProfileManager(self) -> Context:  # noqa: N802
        return self

    def defaultResourceProfile(self) -> None:  # noqa: N802
        return None

    def maxNumConcurrentTasks(self, profile: None) -> int:  # noqa: N802
        return next(self._slots)


def test_executors_may_register_late(plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "TICK_S", 0)
    context = Context([0, 1, 1, 3, 4, 99])
    spark.await_slots(context, plan)
    assert context.maxNumConcurrentTasks(None) == 99


def test_too_few_slots_are_refused(plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "TICK_S", 0)
    monkeypatch.setattr(spark, "SETTLE_S", 0)
    says = r"2 shards and 2 workers, .* Spark has 3 slots \(1 of spark.task.cpus each\); ask for "
    with pytest.raises(LaunchFailed, match=says):
        spark.await_slots(Context([3] * 9), plan)
    most = {
        "spark_dynamicAllocation_enabled": "true",
        "spark_dynamicAllocation_maxExecutors": "3",
        "spark_executor_cores": "5",
        "spark_task_cpus": "4",
    }
    with pytest.raises(LaunchFailed, match=r"Spark has 3 slots \(4 of spark.task.cpus each\)"):
        spark.await_slots(Context([], **most), plan)
    spark.await_slots(Context([], **most | {"spark_task_cpus": "2"}), plan)


def run_task(plan: LaunchPlan, index: int, launch: str = "a") -> None:
    (plan.options.run_dir / MARK).write_text("a")
    assert not list(MemberTask(plan, launch, "head:7", "/nowhere")(index, ()))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collects the command lines, and runs SCRIPT in their place."""
    found: list[list[str]] = []

    def command(*words: str) -> list[str]:
        found.append([*words])
        return ["sh", "-c", SCRIPT[0]]

    monkeypatch.setattr(spark_job, "module_command", command)
    return found


SCRIPT = ["exit 0"]


def test_the_first_tasks_are_shards_and_the_others_workers(
    plan: LaunchPlan, commands: list[list[str]]
) -> None:
    SCRIPT[0] = "exit 0"
    for index in range(4):
        run_task(plan, index)
    ends = ["--coordinator", "head:7", "--die-with-parent"]
    assert [each[0] for each in commands] == ["pserver.cli"] * 2 + ["worker.cli"] * 2
    assert [each[-5:-3] for each in commands[:2]] == [["--shard", "0"], ["--shard", "1"]]
    assert all(each[-3:] == ends for each in commands)


def test_a_refused_command_is_noted_and_not_repeated(
    plan: LaunchPlan, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    SCRIPT[0] = "echo hello; echo error PS501: no GPU 7 >&2; exit 2"
    run_task(plan, 3)
    assert (plan.options.run_dir / REFUSED).read_text() == "PS501: no GPU 7"
    assert capsys.readouterr().err == "hello\nerror PS501: no GPU 7\n"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("exit 75", "worker 1 on .* ended with status 75"),
        ("kill -9 $$", "worker 1 on .* ended with status -9"),
        ("echo error PS204: gone; exit 1", "PS204: gone"),
    ],
)
def test_another_end_fails_the_task_which_spark_repeats(
    plan: LaunchPlan, commands: list[list[str]], code: str, why: str
) -> None:
    SCRIPT[0] = code
    with pytest.raises(MemberEnded, match=f"^{why}$"):
        run_task(plan, 3)


def test_an_executor_that_does_not_see_the_run_directory_says_so(plan: LaunchPlan) -> None:
    with pytest.raises(MemberEnded, match=r"^PS141: the executor on .* does not see .*; the run"):
        run_task(plan, 0, "another launch")


ABORTED = (
    "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 2 in stage 0.0 "
    "failed 4 times, most recent failure: Lost task 2.3 in stage 0.0 (TID 9) (host executor 1): {}"
)
RAISED = (
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "x.py", line 1\ncoordinator.launchers.spark_job.MemberEnded: {}\n\n\tat java...'
)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (
            ABORTED.format(RAISED.format("worker 1 on h ended with status -9")),
            "PS140",
            "Spark gave the job up: task 2 failed 4 times, at last with: worker 1 on h ended with "
            "status -9",
        ),
        (
            ABORTED.format(RAISED.format("PS204: gone")),
            "PS204",
            "Spark gave the job up: task 2 failed 4 times, at last with: gone",
        ),
        (ABORTED.format(RAISED.format("PS141: h sees no x")), "PS141", "h sees no x"),
        (
            ABORTED.format("ExecutorLostFailure (executor 1 exited) Reason: gone\nDriver"),
            "PS140",
            "Spark gave the job up: task 2 failed 4 times, at last with: Lost task 2.3 in stage "
            "0.0 (TID 9) (host executor 1): ExecutorLostFailure (executor 1 exited) Reason: gone",
        ),
        (
            ABORTED.format("ModuleNotFoundError: No module named 'coordinator'"),
            "PS140",
            "the Python of Spark's executors has no tf-pserver; install it there, or name another "
            "in PYSPARK_PYTHON",
        ),
        (
            ": org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 3 cancelled as part",
            "PS140",
            "the Spark job was cancelled; the same call goes on with the run",
        ),
        (
            "SparkContext was shut down",
            "PS140",
            "Spark gave the job up: SparkContext was shut down",
        ),
    ],
)
def test_sparks_words_become_one_line(words: str, code: str, reason: str) -> None:
    error = LaunchFailed(reason_of(words))
    assert (error.code, str(error)) == (code, reason)


def test_data_has_a_place_for_each_setting(tmp_path: Path) -> None:
    frame = object()
    assert frames_of(None) == {}
    assert frames_of(frame) == {"data": frame}
    assert frames_of({"train_data": frame, "eval_data": "s3://b/c/"})["train_data"] is frame
    assert place(tmp_path, "train_data", frame) == f"{tmp_path}/spark-data/train_data"
    assert place(tmp_path, "eval_data", "s3://b/c/") == "s3://b/c/"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 3}, "PS110: a cluster has no option 'worker'; did you mean 'workers'?"),
        ({"insecure": True, "data": "x"}, "PS104: --set data=x: "),
        ({"insecure": True}, "PS135: launch.spark needs pyspark, which is not installed in "),
    ],
)
def test_a_wrong_call_is_refused_before_spark_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    (tmp_path / "job.py").write_text("from pserver import Job\njob = Job()\n")
    with pytest.raises(PsError) as refused:
        launch.spark(Context(), tmp_path / "job.py", run_dir=tmp_path / "run", **options)
    assert refused.value.coded.startswith(message)
    assert not (tmp_path / "run").exists()
