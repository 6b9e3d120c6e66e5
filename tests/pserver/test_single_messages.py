"""The quicker way for shards whose values fit one message: the same answers, the same errors."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from pserver import wire
from pserver.client import Push, ShardClient
from psrpc.batch import BatchId
from psrpc.channel import open_channel
from psrpc.errors import InvalidArgument, StaleGeneration
from psrpc.status import error_from_rpc
from psrpc.v1 import parameter_server_pb2 as pb
from tests.pserver.shards import counting, engine_of, plan_of, served, whole

PLAN = plan_of(state=False)
NAME = "float32.trainable"


@pytest.fixture
def client() -> Iterator[ShardClient]:
    with served(engine_of(PLAN)) as client:
        client.initialize(client.fence(1, 1), counting(PLAN))
        yield client


def push(first: int, value: float) -> Push:
    return Push("worker-1", BatchId(0, first, 10), 1, 0, whole(PLAN, value))


def test_pushes_and_pulls(client: ShardClient) -> None:
    fence, into = client.fence(1, 1), whole(PLAN)
    assert client.push(fence, push(0, 1.0)).outcome == "applied"
    result, info = client.push_pull(fence, push(10, 2.0), into)
    assert (result.outcome, result.staleness, info.version) == ("applied", 1, 2)
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - 3)
    assert client.push(fence, push(0, 1.0)).outcome == "already_applied"
    skipped = Push("worker-1", BatchId(0, 20, 10), 1, 2, None)
    assert client.push_pull(fence, skipped, into)[0].outcome == "skipped"
    pulled = whole(PLAN)
    assert client.pull(fence, "worker-1", None, pulled).version == 2
    np.testing.assert_array_equal(pulled[NAME], into[NAME])


def test_errors_are_the_same_classes(client: ShardClient) -> None:
    stale = client.fence(2, 1)
    with pytest.raises(StaleGeneration, match="generation 2"):
        client.push(stale, push(0, 1.0))
    with pytest.raises(StaleGeneration, match="generation 2"):
        client.push_pull(stale, push(0, 1.0), whole(PLAN))
    with pytest.raises(StaleGeneration, match="generation 2"):
        client.pull(stale, "worker-1", None, whole(PLAN))


def test_the_way_of_the_contract_gives_the_same(client: ShardClient) -> None:
    with open_channel(client.peer.rpartition(" ")[2]) as channel:
        pull = channel.unary_stream(
            f"/{wire.SERVICE}/Pull",
            pb.PullRequest.SerializeToString,
            pb.PullResponse.FromString,
        )
        answers = list(pull(pb.PullRequest(fence=client.fence(1, 1), newest=True), timeout=30))
    assert len(answers) == 1
    assert answers[0].chunk.data == counting(PLAN)[NAME].tobytes()


def test_an_answer_of_several_messages_cannot_go_that_way() -> None:
    plan = plan_of()
    with served(engine_of(plan)) as client:
        client.initialize(client.fence(1, 1), counting(plan))
        with open_channel(client.peer.rpartition(" ")[2]) as channel:
            pull = channel.unary_unary(
                f"/{wire.SERVICE}/Pull",
                pb.PullRequest.SerializeToString,
                pb.PullResponse.FromString,
            )
            request = pb.PullRequest(fence=client.fence(1, 1), newest=True)
            with pytest.raises(grpc.RpcError) as caught:
                pull(request, timeout=30, metadata=(wire.SINGLE,))
    error = error_from_rpc(caught.value, "the shard")
    assert isinstance(error, InvalidArgument)
    assert "takes several messages" in str(error)
