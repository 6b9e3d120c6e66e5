"""The coordinator over the wire: a real server on a free port, a real client."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.client.client import CoordinatorClient
from coordinator.client.patience import Patience
from coordinator.job import engine as engine_module
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.errors import (
    CoordinatorUnreachable,
    InvalidArgument,
    NotReady,
    StaleGeneration,
)
from psrpc.net.channel import open_channel
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.coordinator.builders import make_run, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report, start_training


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
            assert types.Decision.FromString(lease.round.decision.decision) == decision
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
        [shard], [_], [worker] = start_training(client)
        assert worker.heartbeat().generation == 1
        assert shard.heartbeat().waiting_for == ""
        served.do(lambda: served.engine.shards.replaced(0))
        assert worker.heartbeat().generation == 2


def test_a_caller_that_only_reads_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have less time than a worker."""
    monkeypatch.setattr(engine_module, "POLL_S", 1e9)
    with (
        serving(make_run(tmp_path)) as served,
        CoordinatorClient(served.address) as client,
        pytest.raises(NotReady, match="shard 0 to register"),
    ):
        client.get_cluster(pb.GetClusterRequest())


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
        shard = ShardDouble(client, 1)
        shard.register()
        assert "shards 0, 2 to register" in shard.heartbeat().waiting_for
        with pytest.raises(NotReady, match=r"shards 0, 2 to register; shard 1 at .* to start"):
            worker.cluster()
        assert "shards 0, 2" in client.get_job_status().waiting_for


def test_a_shard_is_told_how_tensors_travel(tmp_path: Path) -> None:
    run = make_run(tmp_path, wire_dtype="bfloat16")
    with serving(run) as served, CoordinatorClient(served.address) as client:
        assert ShardDouble(client, 0).register().wire_dtype == "bfloat16"


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


def test_health_and_an_address_without_a_server(tmp_path: Path) -> None:
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
        pytest.raises(CoordinatorUnreachable, match=rf"at {address}; .*that it was started there"),
    ):
        Patience(client, 60, lambda _line: None, stopped).persist(client.get_job)


def test_persisting_answers_and_unknown_methods_are_typed(tmp_path: Path) -> None:
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        job = Patience(client, 5, lambda _line: None).persist(client.get_job)
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
