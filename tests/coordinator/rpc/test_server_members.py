"""Members of a job over the wire: they register, are silent, leave, are lost and come again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.client import CoordinatorClient
from psrpc import SOFTWARE
from psrpc.core.errors import (
    AlreadyExists,
    InvalidArgument,
    JobMismatch,
    StaleGeneration,
)
from psrpc.core.text import WORDS_CHARS
from psrpc.ops.clock import ManualClock
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import SHA, make_run, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report, start_training


def await_free(shard: ShardDouble) -> None:
    """Registers; the end of the holder's stream is on its way."""
    for _ in range(1000):
        try:
            shard.register()
        except AlreadyExists:
            continue
        return
    raise AssertionError("the place is not free")


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
        for session in (b"", b"another's"):
            stranger.session = session
            with pytest.raises(StaleGeneration, match="a worker without a session is not reg"):
                stranger.lease()
        assert stranger.heartbeat().unknown
        old = WorkerDouble(client, 10, generation=7)
        old.register()
        with pytest.raises(StaleGeneration, match="generation 7; it is 0"):
            old.lease()


def test_texts_of_peers_are_cut_and_harmless(tmp_path: Path) -> None:
    """Texts too long to be meant are refused before: see :mod:`psrpc.wire.bounds`."""
    hostile = "\x1b[2J" + "h" * 251
    with serving(make_run(tmp_path)) as served, CoordinatorClient(served.address) as client:
        for incarnation in range(1, 5):
            answer = client.register_worker(
                pb.RegisterWorkerRequest(
                    incarnation=incarnation,
                    host=hostile,
                    device=hostile,
                    job_sha256=SHA,
                    software=SOFTWARE,
                    secret=incarnation.to_bytes(SECRET_BYTES),
                )
            )
            beat = pb.HeartbeatWorkerRequest(session=answer.session, waiting_for=hostile * 99)
            client.heartbeat_worker(beat)
        workers = client.get_job_status().workers
        assert len(workers) == 4
        for worker in workers:
            for text in (worker.host, worker.device, worker.waiting_for):
                assert text.startswith("\N{REPLACEMENT CHARACTER}[2Jhhh")
                assert len(text) <= WORDS_CHARS
        with pytest.raises(InvalidArgument, match="a shard's address is "):
            client.register_shard(
                pb.RegisterShardRequest(incarnation=9, address=hostile, software=SOFTWARE)
            )


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
            served.do(served.job_run.tick)
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
                session=worker.session,
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
        reason = "PS601: shard 0 at 127.0.0.1:6000 cannot go on: out of memory"
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
            served.do(served.job_run.tick)
        status = client.get_job_status()
        assert status.phase == "training"
        assert status.waiting_for.startswith("a sign of life of shard 1 at 127.0.0.1:6001")
        # How long stands beside it.
        assert status.shards[1].silent_s == 400
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


def test_heartbeats_tell_workers_to_register_again(tmp_path: Path) -> None:
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
