"""The coordinator over the wire: a real server on a free port, a real client."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import client as client_module
from coordinator import engine as engine_module
from coordinator.client import CoordinatorClient
from psrpc.channel import open_channel
from psrpc.clock import ManualClock
from psrpc.errors import (
    AlreadyExists,
    CoordinatorUnreachable,
    InvalidArgument,
    JobMismatch,
    NotReady,
    StaleGeneration,
)
from psrpc.manifest import read_manifest
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.parts import ShardDouble, WorkerDouble, make_run, report, serving


def start_training(
    client: CoordinatorClient, shards: int = 1, workers: int = 1
) -> tuple[list[ShardDouble], list[Any], list[WorkerDouble]]:
    """Takes a cluster of doubles through initialization and the step-0 checkpoint."""
    shard_doubles = [ShardDouble(client, k) for k in range(shards)]
    streams = []
    for shard in shard_doubles:
        shard.register()
        streams.append(iter(shard.watch()))
    for shard, stream in zip(shard_doubles, streams, strict=True):
        assert shard.begin(stream).fresh
    worker_doubles = [WorkerDouble(client, 1000 + n) for n in range(workers)]
    for worker in worker_doubles:
        worker.register()
    first = worker_doubles[0]
    assert first.lease().WhichOneof("work") == "initialize"
    first.report_work(initialized=pb.InitializeDone())
    for shard, stream in zip(shard_doubles, streams, strict=True):
        order = next(stream).snapshot
        assert (order.name, order.write, order.keep) == ("step-00000000", True, False)
        shard.take(order)
    return shard_doubles, streams, worker_doubles


def await_free(shard: ShardDouble) -> None:
    """Registers; the end of the holder's stream is on its way."""
    for _ in range(1000):
        try:
            shard.register()
        except AlreadyExists:
            continue
        return
    raise AssertionError("the place is not free")


def test_async_job_from_registration_to_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path, shards=2, eval_records=8, epochs=1, checkpoint_every=2)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        shards, streams, [worker] = start_training(client, shards=2)
        assert len(worker.cluster().shards) == 2

        lease = worker.lease()
        done: list[pb.BatchReport] = []
        seen = []
        while lease.WhichOneof("work") == "train":
            seen += [a.batch.first for a in lease.train.batches]
            done = [report(a, loss=0.5) for a in lease.train.batches]
            if len(seen) == 3:
                break
            lease = worker.lease(done)
            if len(seen) == 2:
                for shard, stream in zip(shards, streams, strict=True):
                    order = next(stream).snapshot
                    assert order.name == "step-00000002"
                    shard.take(order)
        assert seen == [0, 4, 8]

        waiting = threading.Thread(target=lambda: leases.append(worker.lease(done)))
        leases: list[pb.Lease] = []
        waiting.start()
        for shard, stream in zip(shards, streams, strict=True):
            final = next(stream).snapshot
            assert (final.name, final.write, final.keep) == ("step-00000003", True, True)
            shard.take(final)
        waiting.join(10)
        task = leases[0].evaluate
        assert (task.snapshot, task.start, task.stop) == ("step-00000003", 0, 8)
        states = pb.MetricStates(variables=[pb.MetricVariable(shape=[], values=[4.0])])
        worker.report_work(
            evaluated=pb.EvaluateDone(
                evaluation=task.evaluation, task=task.task, records=8, states=states
            )
        )
        merge = worker.lease().merge
        assert merge.states == states
        worker.report_work(merged=pb.MergeDone(evaluation="final", results={"loss": 0.25}))

        finished = worker.lease()
        assert finished.WhichOneof("work") == "finished"
        assert not finished.finished.failed
        for stream in streams:
            assert next(stream).release_snapshot == "step-00000003"
            assert not next(stream).shutdown.failed
            assert list(stream) == []
        worker.leave()
        status = client.get_job_status()
        assert status.phase == "done"
        assert (status.global_step, status.batches, status.examples) == (3, 3, 10)
        assert status.newest_checkpoint == "checkpoints/step-00000003"
        assert dict(status.evaluations[0].results) == {"loss": 0.25}
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000003")
    assert [f.shard for f in manifest.files] == [0, 1]
    assert (manifest.global_step, manifest.batch_size, manifest.seed) == (3, 4, 0)
    assert list((tmp_path / "tensorboard").iterdir())
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_sync_commits_park_until_the_round_is_decided(tmp_path: Path) -> None:
    run = make_run(tmp_path, mode="sync", replicas=2, epochs=1, total_updates=2, train_records=16)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        _, [stream], [one, two] = start_training(client, workers=2)
        first, second = one.lease().round, two.lease().round
        assert [first.attempt.batch.first, second.attempt.batch.first] == [0, 4]
        assert not first.HasField("decision")

        next_leases: list[pb.Lease] = []
        parked = threading.Thread(target=lambda: next_leases.append(one.commit(first)))
        parked.start()
        after = two.commit(second)
        parked.join(10)
        decision = next(stream).decision
        assert [a.attempt for a in decision.attempts] == [
            first.attempt.attempt,
            second.attempt.attempt,
        ]
        for lease in (after, *next_leases):
            assert lease.round.round == 1
            assert lease.round.decision == decision
        assert {lease.round.attempt.batch.first for lease in (after, *next_leases)} == {8, 12}


def test_a_parked_call_is_released_by_news(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        worker = WorkerDouble(client, 7)
        worker.register()
        answers: list[pb.GetClusterResponse] = []
        parked = threading.Thread(target=lambda: answers.append(worker.cluster()))
        parked.start()
        shard = ShardDouble(client, 0)
        shard.register()
        shard.begin(iter(shard.watch()))
        parked.join(4)  # POLL_S is 5: only the news can have released it
        assert [s.address for s in answers[0].shards] == ["127.0.0.1:6000"]


def test_a_worker_hears_that_its_generation_is_over_before_there_is_another(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        [_], [_], [worker] = start_training(client)
        assert worker.heartbeat().generation == 1
        served.do(lambda: served.course.shard_replaced(0))
        assert worker.heartbeat().generation == 2


def test_cluster_not_ready_names_the_missing_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "POLL_S", 0.01)
    with (
        serving(make_run(tmp_path, shards=3)) as served,
        CoordinatorClient(served.address) as client,
    ):
        worker = WorkerDouble(client, 7)
        worker.register()
        ShardDouble(client, 1).register()
        with pytest.raises(NotReady, match=r"shards 0, 2 to register; shard 1 at .* to start"):
            worker.cluster()
        assert "shards 0, 2" in client.get_job_status().waiting_for


def test_a_shard_is_told_how_tensors_travel(tmp_path: Path) -> None:
    run = make_run(tmp_path, wire_dtype="bfloat16")
    with serving(run) as served, CoordinatorClient(served.address) as client:
        assert ShardDouble(client, 0).register().wire_dtype == "bfloat16"


def test_registration_refuses_what_does_not_belong(tmp_path: Path) -> None:
    with (
        serving(make_run(tmp_path, shards=2)) as served,
        CoordinatorClient(served.address) as client,
    ):
        ShardDouble(client, 1, incarnation=5).register()
        ShardDouble(client, 1, incarnation=5).register()
        with pytest.raises(AlreadyExists, match=r"shard 1 is held by .* 127.0.0.1:6001 .*pid 1"):
            ShardDouble(client, 1, incarnation=6).register()
        with pytest.raises(InvalidArgument, match=r"shard index 2 is out of range.*0 to 1"):
            ShardDouble(client, 2).register()
        with pytest.raises(JobMismatch, match=r"(?s)" + "cd" * 32 + ".*" + "ab" * 32):
            WorkerDouble(client, 7).register(sha="cd" * 32)
        with pytest.raises(JobMismatch, match=r"0\.0\.9"):
            WorkerDouble(client, 7).register(software="0.0.9")
        stranger = WorkerDouble(client, 9)
        stranger.name = "worker-5"
        with pytest.raises(StaleGeneration, match="worker-5 is not registered"):
            stranger.lease()
        assert stranger.heartbeat().unknown
        old = WorkerDouble(client, 10, generation=7)
        old.register()
        with pytest.raises(StaleGeneration, match="generation 7; it is 0"):
            old.lease()


@pytest.mark.parametrize("changed", [{}, {"mode": "sync", "replicas": 2}])
def test_a_worker_that_has_loaded_other_settings_is_refused(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """The run was resumed, and the worker is of before that."""
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        loaded = client.get_job().settings_sha256
        WorkerDouble(client, 7).register(settings=loaded)
    resumed = make_run(tmp_path, **changed)
    if not changed:
        resumed = replace(resumed, overrides=(*resumed.overrides, "optimizer.learning_rate=0.1"))
    with serving(resumed) as served, CoordinatorClient(served.address) as client:
        with pytest.raises(
            JobMismatch, match=r"pid 7 on here .* \(epochs=2.*start the worker again"
        ):
            WorkerDouble(client, 7).register(settings=loaded)
        WorkerDouble(client, 7).register(settings=client.get_job().settings_sha256)


def test_a_lapsed_worker_loses_its_batches_to_another(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        serving(make_run(tmp_path), clock) as served,
        CoordinatorClient(served.address) as client,
        CoordinatorClient(served.address) as other_client,
    ):
        [shard], [stream], [slow] = start_training(client)
        held = slow.lease().train.batches[0]
        quick = WorkerDouble(other_client, 2)
        quick.register()
        for _ in range(4):
            clock.advance(4)
            quick.heartbeat()
            shard.heartbeat()
            served.do(served.course.tick)
        assert "shard 0 to refuse worker-0" in client.get_job_status().waiting_for
        assert quick.lease().train.batches[0].batch.first > held.batch.first
        assert shard.refuse(stream).worker == "worker-0"
        again = quick.lease().train.batches[0]
        assert again.batch == held.batch
        assert again.attempt > held.attempt
        status = client.get_job_status()
        assert [w.state for w in status.workers] == ["silent", "active"]
        assert status.failed == 1
        # It comes back: nothing it says counts, and it gets another name.
        assert slow.heartbeat().unknown
        with pytest.raises(StaleGeneration, match="worker-0 was silent for too long"):
            slow.lease([report(held)])
        assert client.get_job_status().batches == 0
        assert slow.register() == "worker-2"
        quick.lease([report(again)])
        assert client.get_job_status().batches == 1


def test_a_worker_that_leaves_gives_its_batches_back(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        [shard], [stream], [first] = start_training(client)
        held = first.lease().train.batches[0]
        first.leave("told to stop")
        second = WorkerDouble(client, 2)
        second.register()
        shard.refuse(stream)
        assert second.lease().train.batches[0].batch == held.batch
        assert client.get_job_status().failed == 0


def test_lost_lease_is_given_again_and_a_new_one_can_be_asked_ahead(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        _, _, [worker] = start_training(client)
        first = worker.lease().train.batches[0]
        ahead = worker.lease().train.batches[0]
        assert ahead.batch.first > first.batch.first
        lost = client.lease_work(
            pb.LeaseWorkRequest(
                worker=worker.name,
                incarnation=worker.incarnation,
                generation=1,
                policy=1,
                received=first.attempt,
            )
        ).lease
        assert list(lost.train.batches) == [ahead]


def test_a_fatal_worker_fails_the_job_for_everyone(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        _, [stream], [worker] = start_training(client)
        other = WorkerDouble(client, 3)
        other.register()
        worker.leave("ValueError: labels are strings", fatal=True)
        assert next(stream).shutdown.reason == "ValueError: labels are strings"
        assert other.lease().finished.failed
        assert other.heartbeat().shutdown.reason == "ValueError: labels are strings"
        assert client.get_job_status().phase == "failed"
        late = ShardDouble(client, 0)
        late.register()
        assert [command.shutdown.failed for command in late.watch()] == [True]


def test_a_shard_that_cannot_go_on_fails_the_job_for_everyone(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        [shard], [stream], [worker] = start_training(client)
        client.heartbeat_shard(
            pb.HeartbeatShardRequest(
                shard=0, incarnation=shard.incarnation, generation=1, failure="out of memory"
            )
        )
        reason = "shard 0 at 127.0.0.1:6000 cannot go on: out of memory"
        assert worker.lease().finished.reason == reason
        assert next(stream).shutdown.reason == reason


def test_a_shard_that_stays_away_is_waited_for_and_named(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        serving(make_run(tmp_path, shards=2), clock) as served,
        CoordinatorClient(served.address) as client,
    ):
        shards, _, [worker] = start_training(client, shards=2)
        worker.lease()
        for _ in range(100):
            clock.advance(4)
            worker.heartbeat()
            shards[0].heartbeat()
            served.do(served.course.tick)
        status = client.get_job_status()
        assert status.phase == "training"
        assert status.waiting_for.startswith("shard 1 at 127.0.0.1:6001 has been silent for 400 s")
        assert not status.warnings  # of what may pass


def test_watch_repeats_what_a_shard_missed(tmp_path: Path) -> None:
    run = make_run(tmp_path, mode="sync", replicas=1, epochs=1, total_updates=3)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        [shard], [stream], [worker] = start_training(client)
        worker.commit(worker.lease().round)
        decision = next(stream).decision
        again = iter(shard.watch())
        assert next(again).decision == decision
        assert list(stream) == []  # the newer stream ended the older one


def test_a_lost_shard_is_replaced_and_what_it_lacks_is_done_again(tmp_path: Path) -> None:
    with (
        serving(make_run(tmp_path, shards=2, epochs=1)) as served,
        CoordinatorClient(served.address) as client,
        CoordinatorClient(served.address) as other_client,
    ):
        [lost, kept], streams, [worker] = start_training(client, shards=2)
        first = worker.lease().train.batches[0]
        worker.lease([report(first)])
        assert client.get_job_status().global_step == 1
        streams[0].close()
        held = worker.lease()
        new = ShardDouble(other_client, 0, incarnation=7)
        await_free(new)
        # Nothing of the generation counts any more, and it has not gone back for who looks on.
        with pytest.raises(StaleGeneration, match="generation 1 is over"):
            worker.lease([report(a) for a in held.train.batches])
        status = client.get_job_status()
        assert (status.phase, status.generation, status.global_step) == ("recovering", 1, 1)
        with pytest.raises(StaleGeneration, match="taken over by another process"):
            lost.register()

        stream = iter(new.watch())
        begin = next(stream).begin
        assert (begin.generation, begin.restore) == (2, "checkpoints/step-00000000")
        new.generation = 2
        new.holds(0)
        new.ready()
        kept.holds(2, {0: [(0, 8)]})
        assert kept.begin(streams[1]).keep
        worker.generation = worker.cluster().generation
        status = client.get_job_status()
        assert (status.phase, status.generation, status.global_step) == ("training", 2, 0)
        assert list(status.warnings) == [
            "generation 2: back to step 0 (checkpoints/step-00000000): 1 step is done again"
        ]
        again = worker.lease().train.batches[0]
        assert again.batch == first.batch
        assert again.attempt > 1 << 40


def test_heartbeats_tell_who_has_to_register_again(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        shard = ShardDouble(client, 0)
        assert shard.heartbeat().unknown
        shard.register()
        assert not shard.heartbeat().unknown
        with pytest.raises(StaleGeneration, match="held by another process"):
            ShardDouble(client, 0, incarnation=5).heartbeat()
        worker = WorkerDouble(client, 1)
        worker.register()
        shard.begin(iter(shard.watch()))
        assert worker.heartbeat().generation == 1


def test_a_shard_that_leaves_is_let_go_once_its_state_is_saved(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        shard = ShardDouble(client, 0)
        shard.register()
        assert shard.heartbeat(leaving=True).saved  # there is nothing to save yet
        [shard], [stream], [worker] = start_training(client)
        batch = worker.lease().train.batches[0]
        worker.lease([report(batch)])
        assert not shard.heartbeat(leaving=True).saved
        order = next(stream).snapshot
        assert (order.name, order.write) == ("step-00000001", True)
        assert not shard.heartbeat(leaving=True).saved
        shard.take(order)
        served.wait_until(lambda: shard.heartbeat(leaving=True).saved)
        assert client.get_job_status().newest_checkpoint == "checkpoints/step-00000001"


def test_nan_in_a_row_stops_the_job(tmp_path: Path) -> None:
    with (
        serving(make_run(tmp_path, train_records=100)) as served,
        CoordinatorClient(served.address) as client,
    ):
        _, _, [worker] = start_training(client)
        lease = worker.lease()
        for _ in range(100):
            if lease.WhichOneof("work") != "train":
                break
            lease = worker.lease([report(a, skipped=True) for a in lease.train.batches])
        assert "10 batches in a row" in lease.finished.reason
        assert client.get_job_status().skipped == 10


def test_a_shard_that_cannot_write_the_first_checkpoint_fails_the_job(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        shard = ShardDouble(client, 0)
        shard.register()
        stream = iter(shard.watch())
        shard.begin(stream)
        worker = WorkerDouble(client, 1)
        worker.register()
        worker.lease()
        worker.report_work(initialized=pb.InitializeDone())
        shard.take(next(stream).snapshot, error="no space left on device")
        assert "no space left" in worker.lease().finished.reason


def test_health_and_an_address_where_nobody_is(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served:
        channel = open_channel(served.address)
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        channel.close()
        address = served.address
    stopped = threading.Event()
    stopped.set()
    with (
        CoordinatorClient(address) as client,
        pytest.raises(CoordinatorUnreachable, match=rf"{address}.*start `coordinator serve`"),
    ):
        client.persist(client.get_job, 60, lambda _line: None, stopped)


def test_persisting_answers_and_unknown_methods_are_typed(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        job = client.persist(client.get_job, 5, lambda _line: None)
        assert (job.job_path, job.overrides[:], job.mode) == ("jobs/tiny.py", ["epochs=2"], "async")
        worker = WorkerDouble(client, 1)
        worker.register()
        with pytest.raises(InvalidArgument, match="no kind"):
            worker.report_work()


def test_a_command_stream_is_cancelled_from_another_thread(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        shard = ShardDouble(client, 0)
        shard.register()
        stream = shard.watch()
        commands: list[pb.WatchResponse] = []
        reader = threading.Thread(target=lambda: commands.extend(stream))
        reader.start()
        stream.cancel()
        reader.join(5)
        assert not reader.is_alive()
        assert [command.WhichOneof("command") for command in commands] in ([], ["begin"])
        stranger = ShardDouble(client, 0, incarnation=99)
        with pytest.raises(StaleGeneration, match="held by another process"):
            next(iter(stranger.watch()))


def test_waiting_for_the_coordinator_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ANNOUNCE_S", 0.0)
    monkeypatch.setattr(client_module, "RETRY_S", 0.0)
    stopped = threading.Event()
    said: list[str] = []

    def announce(line: str) -> None:
        said.append(line)
        stopped.set()

    with (
        CoordinatorClient("127.0.0.1:1") as client,
        pytest.raises(CoordinatorUnreachable, match=r"127\.0\.0\.1:1"),
    ):
        client.persist(client.get_job, 60, announce, stopped)
    (line,) = said
    first = (
        "waiting for the coordinator at 127.0.0.1:1 (0 of 60 s): PS204: nothing listens at 127.0"
    )
    assert line.startswith(first)


def test_rpc_status_of_a_refusal_is_grpcs_own(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served:
        channel = open_channel(served.address)
        call = channel.unary_unary(
            "/psrpc.v1.Coordinator/RegisterShard",
            request_serializer=pb.RegisterShardRequest.SerializeToString,
            response_deserializer=pb.RegisterShardResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(pb.RegisterShardRequest(shard=0, software="other"), timeout=5)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        channel.close()
