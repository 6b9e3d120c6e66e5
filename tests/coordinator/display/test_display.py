from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from coordinator.core.wording import duration, metrics, reason, state
from coordinator.display.status_page import render_page
from coordinator.display.terminal import ProgressLog, render
from coordinator.display.timeline import newest_evaluations
from coordinator.records.notes import JobWarnings, NotEvaluated
from psrpc.v1.coordinator_pb2 import (
    EvaluationResult,
    GetJobStatusResponse,
    PolicyChange,
    ShardStatus,
    WorkerStatus,
)


def training(**changes: object) -> GetJobStatusResponse:
    status = GetJobStatusResponse(
        job="mnist_dnn",
        phase="training",
        mode="sync",
        replicas=2,
        settings="sync replicas=2",
        global_step=300,
        batches=600,
        total_steps=1200,
        epoch=1,
        epochs=2,
        loss=0.25,
        steps_per_s=60.02,
        batches_per_s=120.04,
        examples_per_s=6002.0,
        shards=[
            ShardStatus(shard=0, state="ready", version=300, nbytes=1_500_000, address="h:1"),
            ShardStatus(shard=1, state="silent", version=299, silent_s=12.2, address="h:2"),
        ],
        workers=[
            WorkerStatus(
                worker="worker-1",
                host="h",
                pid=42,
                device="cpu",
                state="active",
                batches=600,
                batches_per_s=60.0,
                waiting_for="round 300",
            )
        ],
    )
    status.MergeFrom(GetJobStatusResponse(**changes))  # type: ignore[arg-type]
    return status


def text(status: GetJobStatusResponse, elapsed_s: float = 10.0, width: int = 120) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render(status, elapsed_s))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_job_in_training() -> None:
    status = training(
        evaluations=[
            EvaluationResult(
                evaluation="epoch-1", global_step=600, results={"accuracy": 0.97, "loss": 0.1}
            )
        ],
        warnings=["one", "two", "three", "worker-2 died"],
        skipped=3,
        waiting_for="a sign of life of shard 1 at h:2",
    )
    lines = text(status)
    lines[1] = lines[1].strip("━╸╺ ")
    assert lines == [
        "mnist_dnn  sync replicas=2  training  epoch 1/2  10.0 s, about 15.0 s left",
        "",
        "step 300/1200 (25 %)  loss 0.2500  120.0 micro-batches/s  6002 examples/s  3 skipped",
        "          state              steps  size, rate  where           waiting for",
        "shard 0   ready                300      1.5 MB  h:1",
        "shard 1   silent for 12.2 s    299      0.0 MB  h:2",
        "worker-1  active               600      60.0/s  h pid 42 (cpu)  round 300",
        "evaluation epoch-1 at step 600: loss 0.1000, accuracy 0.9700",
        "waiting for a sign of life of shard 1 at h:2",
        "warning: two",
        "warning: three",
        "warning: worker-2 died",
    ]


def test_the_time_left_is_that_of_global_steps() -> None:
    [headline] = text(training(total_steps=300 + 6002))[:1]
    assert headline.endswith("about 1:40 left")


def test_a_job_that_has_not_begun() -> None:
    status = GetJobStatusResponse(
        job="mnist_dnn", phase="waiting", mode="async", waiting_for="shard 0, shard 1"
    )
    lines = text(status, elapsed_s=0.0)
    assert lines[0] == "mnist_dnn  async  waiting  0.0 s"
    assert lines[-1] == "waiting for shard 0, shard 1"


def test_text_of_others_is_no_markup() -> None:
    assert text(training(waiting_for="[bold]x[/bold]"))[-1] == "waiting for [bold]x[/bold]"
    assert text(training(reason="[red]"))[-1] == "failed: [red]"


def test_why_a_run_has_stopped_early_is_no_failure() -> None:
    why = "stopped early at epoch 7: loss did not improve for 3 epochs; best epoch 4"
    assert text(training(phase="done", reason=why))[-1] == why
    assert render_page(training(phase="done", reason=why)).splitlines()[-1] == why


def test_no_loss_is_told_from_a_loss_that_is_not_a_number() -> None:
    """After a restart micro-batches may be done, and no round is decided yet."""
    status = training(loss=math.nan)
    assert status.steps_per_s > 0
    assert "loss -" in text(status)[2]
    status.steps_done = 1
    assert "loss nan" in text(status)[2]


def test_long_waits_do_not_break_the_table() -> None:
    status = training()
    status.workers[0].waiting_for = "x" * 200
    assert len(text(status)) == len(text(training()))
    assert text(status)[6].endswith("…")


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_staleness_belongs_to_modes_without_rounds(mode: str) -> None:
    status = training(mode=mode, mean_staleness=1.5, too_stale=7)
    status.replicas = 0
    assert "  120.0 batches/s  " in text(status)[2]
    assert "staleness 1.50  7 too stale" in text(status)[2]
    assert "staleness" not in text(training())[2]


def test_the_log_says_what_happens_when_it_happens() -> None:
    log = ProgressLog(every_s=5.0)
    waiting = GetJobStatusResponse(
        job="mnist_dnn",
        phase="waiting",
        shards=[ShardStatus(shard=0, state="missing"), ShardStatus(shard=1, state="missing")],
        waiting_for="shard 0, shard 1",
    )
    assert log.lines(waiting, 0.0) == ["mnist_dnn: waiting", "waiting for shard 0, shard 1"]
    assert log.lines(waiting, 60.0) == []
    assert log.lines(training(), 61.0) == [
        "mnist_dnn: training",
        "shard 0 is ready",
        "shard 1 is silent",
        "worker-1 is active",
        "training  epoch 1/2  step 300/1200 (25 %)  "
        "loss 0.2500  120.0 micro-batches/s  6002 examples/s",
    ]


def test_the_log_shows_steps_only_now_and_then() -> None:
    log = ProgressLog(every_s=5.0)
    log.lines(training(), 100.0)
    assert log.lines(training(), 104.9) == []
    (line,) = log.lines(training(), 105.0)
    assert line.startswith("training  epoch 1/2  step 300/1200")
    assert log.lines(training(), 109.9) == []


def test_a_coordinator_that_was_started_again_says_no_epoch_before_it_knows_one() -> None:
    """It knows neither step nor epoch until all shards have begun; the epoch is still the third."""
    log = ProgressLog(every_s=5.0)
    log.lines(training(epoch=3, epochs=4), 100.0)
    lost = training(phase="recovering", generation=2, newest_checkpoint="checkpoints/step-00000250")
    lost.epoch = lost.global_step = 0
    assert not [line for line in log.lines(lost, 107.0) if "epoch" in line]
    back = training(epoch=3, epochs=4, generation=2, restored="step-00000250")
    assert [line for line in log.lines(back, 108.0) if "epoch" in line] == [
        "training  epoch 3/4  step 300/1200 (25 %)  "
        "loss 0.2500  120.0 micro-batches/s  6002 examples/s"
    ]


def test_a_checkpoint_that_is_gone_is_no_new_one() -> None:
    log = ProgressLog(every_s=5.0)
    log.lines(training(newest_checkpoint="checkpoints/step-00000600"), 100.0)
    assert log.lines(training(), 100.1) == []


def test_a_growing_count_of_epochs_without_evaluation_is_told_once_for_each_reason() -> None:
    log = ProgressLog(every_s=1000.0)
    log.lines(training(), 100.0)
    warnings = JobWarnings()
    told = []
    for epoch, why in ((1, ": busy"), (2, ": busy"), (3, ": busy"), (4, ": gone")):
        warnings.add(NotEvaluated(epoch, why))
        lines = log.lines(training(warnings=warnings.kept), 100.1)
        told += [line for line in lines if "evaluated" in line]
    assert told == [
        "warning: epoch 2 is not evaluated: busy",
        "warning: epoch 5 is not evaluated: gone",
    ]


def test_an_epoch_an_evaluation_and_a_warning_do_not_wait() -> None:
    log = ProgressLog(every_s=5.0)
    log.lines(training(warnings=["old"]), 100.0)
    status = training(
        epoch=2,
        newest_checkpoint="checkpoints/step-00000600",
        evaluations=[
            EvaluationResult(evaluation="epoch-1", global_step=600, results={"loss": 0.5})
        ],
        warnings=["old", "new"],
    )
    status.global_step = 600
    assert log.lines(status, 100.1) == [
        "evaluation epoch-1 at step 600: loss 0.5000",
        "checkpoint checkpoints/step-00000600",
        "warning: new",
        "training  epoch 2/2  step 600/1200 (50 %)  "
        "loss 0.2500  120.0 micro-batches/s  6002 examples/s",
    ]
    assert log.lines(status, 100.2) == []


def test_a_generation_after_the_first_is_shown() -> None:
    assert "generation" not in text(training(generation=1))[0]
    assert "epoch 1/2  generation 3  " in text(training(generation=3))[0]
    log = ProgressLog()
    log.lines(training(generation=1), 0.0)
    recovering = training(generation=2, phase="recovering")
    assert log.lines(recovering, 0.1)[:2] == ["mnist_dnn: recovering", "generation 2"]
    assert log.lines(recovering, 0.2) == []


def test_a_run_that_goes_on_says_from_where_and_what_is_new() -> None:
    log = ProgressLog()
    earlier = EvaluationResult(evaluation="epoch-1", global_step=600, results={"loss": 0.5})
    status = training(
        phase="recovering",
        generation=2,
        evaluations=[earlier],
        newest_checkpoint="checkpoints/step-00000600",
    )
    status.global_step = 0
    assert text(status)[2].startswith("going on from step-00000600 or later  loss")
    assert "epoch" not in text(status)[0]
    assert log.lines(status, 0.0) == [
        "mnist_dnn: recovering",
        "generation 2",
        "shard 0 is ready",
        "shard 1 is silent",
        "worker-1 is active",
    ]
    status.restored = "step-00000600"
    line = "going on from checkpoint step-00000600 (step 600)"
    assert log.lines(status, 0.1) == [line]
    assert text(status)[2].startswith("restoring from step-00000600  loss")
    assert text(status)[3] == line
    status.global_step, status.phase = 600, "training"
    status.evaluations.add(evaluation="epoch-2", global_step=1200, results={"loss": 0.4})
    status.newest_checkpoint = "checkpoints/step-00001200"
    assert log.lines(status, 0.2)[:3] == [
        "mnist_dnn: training",
        "evaluation epoch-2 at step 1200: loss 0.4000",
        "checkpoint checkpoints/step-00001200",
    ]
    assert text(status)[2].startswith("step 600/1200 (50 %)")
    assert text(status)[3] == line


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0.0 s"), (59.9, "59.9 s"), (65.4, "1:05"), (3599.6, "1:00:00"), (7265.0, "2:01:05")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("known", "silent_s", "expected"),
    [
        ("active", 2.9, "active"),
        ("active", 3.0, "active, silent for 3.0 s"),
        ("ready", 9.5, "ready, silent for 9.5 s"),
        ("silent", 75.0, "silent for 1:15"),
        ("left", 75.0, "left"),
    ],
)
def test_a_silence_is_shown_before_the_lease_has_lapsed(
    known: str, silent_s: float, expected: str
) -> None:
    assert state(WorkerStatus(state=known, silent_s=silent_s)) == expected


def test_the_loss_comes_first() -> None:
    assert metrics({"accuracy": 1.0, "loss": 0.5}) == "loss 0.5000, accuracy 1.0000"


def test_a_worker_that_is_stuck_is_named_whenever_it_is_anew_and_when_it_is_over() -> None:
    cut = "worker-1 on b cannot reach shard 1 at c:1 (for 5.0 s), other workers can"
    status = training(stuck=[cut], global_step=1)
    assert f"stuck: {cut}" in text(status)
    log = ProgressLog()
    assert f"stuck: {cut}" in log.lines(status, 0.0)
    status.stuck[0] = cut.replace("5.0", "6.0")
    assert log.lines(status, 0.1) == []
    del status.stuck[:]
    over = "no longer stuck: worker-1 on b cannot reach shard 1 at c:1"
    assert log.lines(status, 0.2) == [over]
    assert log.lines(status, 0.25) == []
    status.stuck.append(cut)
    assert log.lines(status, 0.3) == [f"stuck: {cut}"]


def test_a_straggler_is_named_once() -> None:
    slow = "worker-1 takes 4.9 times as long per example as the median"
    status = training(stragglers=[slow], global_step=1)
    assert f"straggler: {slow}" in text(status)
    log = ProgressLog()
    assert f"straggler: {slow}" in log.lines(status, 0.0)
    status.stragglers[0] = slow.replace("4.9", "4.8")
    assert log.lines(status, 0.1) == []
    del status.stragglers[:]
    log.lines(status, 0.2)
    status.stragglers.append(slow)
    assert log.lines(status, 0.3) == []
    status.workers.add(worker="worker-2", state="active")
    status.stragglers.append("worker-2 has had epoch 1 positions 0..3 for 12.0 s")
    assert log.lines(status, 0.4) == [
        "worker-2 is active",
        "straggler: worker-2 has had epoch 1 positions 0..3 for 12.0 s",
    ]
    status.workers[1].state = "left"
    assert log.lines(status, 0.5) == ["worker-2 has left"]


def test_a_change_of_policy_is_shown() -> None:
    log = ProgressLog()
    log.lines(training(policy=1), 0.0)
    line = "under way: the change to policy 2 (ssp staleness=4): draining"
    status = training(policy=1, switching="the change to policy 2 (ssp staleness=4): draining")
    assert line in text(status)
    assert log.lines(status, 0.1) == [line]
    assert log.lines(status, 0.2) == []
    changed = training(policy=2, settings="ssp staleness=4")
    assert log.lines(changed, 0.3) == ["policy 2: ssp staleness=4"]
    assert log.lines(changed, 0.4) == []


@pytest.mark.parametrize("seen", [True, False])
def test_the_generation_of_a_policy_is_not_shown_beside_it(seen: bool) -> None:
    """Whether or not the status is taken between the two. It is shown where another one begins."""
    log = ProgressLog(every_s=100.0)
    log.lines(training(policy=1, generation=1), 0.0)
    policies = [PolicyChange(policy=1), PolicyChange(policy=2, global_step=600)]
    status = training(policy=2, settings="ssp", policies=policies, generation=1)
    said = []
    if seen:
        status.global_step, status.phase = 600, "recovering"
        said += log.lines(status, 0.1)
    status.generation, status.phase, status.global_step = 2, "training", 601
    said += log.lines(status, 0.2)
    assert said == ["policy 2: ssp"]
    # A shard was lost meanwhile: there is one generation more.
    status.generation, status.policy, status.settings = 4, 3, "async"
    status.policies.add(policy=3, global_step=650)
    assert log.lines(status, 0.3) == ["generation 4", "policy 3: async"]
    status.phase = "recovering"
    assert log.lines(status, 0.4) == ["mnist_dnn: recovering"]
    status.generation, status.phase = 5, "training"
    assert log.lines(status, 0.5) == ["mnist_dnn: training", "generation 5"]


def test_every_member_has_one_line_however_narrow_the_terminal_is() -> None:
    status = training()
    for shard in status.shards:
        shard.waiting_for = "worker-0 at some address that is long " * 5
    for width in (80, 120):
        lines = text(status, width=width)
        members = [line for line in lines if line.startswith(("shard ", "worker-"))]
        assert len(members) == len(status.shards) + len(status.workers) > 1
        assert max(map(len, lines)) <= width


def test_only_the_newest_evaluations_stay() -> None:
    status = training()
    del status.evaluations[:]
    for epoch in range(40):
        status.evaluations.add(evaluation=f"epoch-{epoch}", global_step=epoch, results={"loss": 1})
    for page in (text(status), render_page(status).splitlines()):
        shown = [line for line in page if "evaluation" in line]
        assert shown[0] == "35 earlier evaluations"
        assert [line.split()[1] for line in shown[1:]] == [f"epoch-{e}" for e in range(35, 40)]
    del status.evaluations[6:]
    assert newest_evaluations(status)[0] == "1 earlier evaluation"
    del status.evaluations[5:]
    assert newest_evaluations(status)[0] == "evaluation epoch-0 at step 0: loss 1.0000"


def test_an_insecure_job_says_so_as_long_as_it_lasts() -> None:
    assert "insecure: anyone" in "\n".join(text(training(insecure=True)))
    assert "insecure" not in "\n".join(text(training()))


def test_a_worker_that_compiles_is_said_to_while_no_step_is_made() -> None:
    log, first = ProgressLog(every_s=5.0), training(global_step=0, epoch=0)
    first.global_step = first.epoch = 0
    first.workers[0].waiting_for = "compiling 5000 variables"
    (line,) = [line for line in log.lines(first, 0.0) if line.startswith("training  ")]
    assert line.endswith("  worker-1 compiling 5000 variables")
    assert log.lines(first, 4.0) == []
    assert log.lines(first, 5.0) == [line]
    first.workers[0].waiting_for = "round 0"
    assert "compiling" not in " ".join(log.lines(first, 10.0))


def test_a_worker_that_builds_its_model_is_said_to_before_there_is_training() -> None:
    status = training(phase="initializing")
    status.workers[0].waiting_for = "building the model"
    lines = ProgressLog().lines(status, 0.0)
    assert any(line.endswith("  worker-1 building the model") for line in lines)


def test_the_end_of_processes_that_start_again_is_no_failure() -> None:
    why = "stopped for dense=allreduce"
    assert reason(GetJobStatusResponse(phase="restarting", reason=why)) == why
    assert reason(GetJobStatusResponse(phase="failed", reason=why)) == f"failed: {why}"
