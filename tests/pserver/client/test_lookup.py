"""Looking rows up: by program, and by the command."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.certificates.authority import certificates_of_run
from pserver.cli.__main__ import run
from pserver.client.client import ShardClient
from pserver.client.lookup import RowReader
from pserver.server.server import ShardServer
from psrpc.core.batch import BatchId
from psrpc.core.errors import CoordinatorUnreachable, InvalidArgument, NotReady, ShardUnreachable
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan
from psrpc.core.tables import IdKind, TableSpec, hashed
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.fake_coordinator import FakeCoordinator, running
from tests.pserver.rows_cases import USER, Model, gradients_of, push_of, tables_plan
from tests.pserver.shards import INCARNATION, INITIAL, counting, engine_of, fence_of


def of_kind(kind: IdKind) -> Plan:
    """The plan with tables whose layers are given ``kind``."""
    plan = tables_plan(2)
    return replace(plan, tables=tuple(replace(table, id_kind=kind) for table in plan.tables))


PLAN = of_kind("both")

BESIDE = make_plan(PLAN.variables, 3, "cut", PLAN.tables, 1)
"""With a slice after the shards."""


class Cluster(FakeCoordinator):
    """Says where two real shards are."""

    def __init__(self, run_dir: Path, plan: Plan, addresses: list[str]) -> None:
        super().__init__(run_dir, plan)
        self.plan = plan
        self.addresses = addresses
        self.asked = 0

    def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> Any:  # noqa: N802
        assert not request.session
        self._fail()
        self.asked += 1
        shards = [pb.ShardAddress(address=a, incarnation=INCARNATION) for a in self.addresses]
        return pb.GetClusterResponse(
            generation=1, policy=1, plan=self.plan.to_json(), shards=shards
        )


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> Plan:
    """Of two shards with rows."""
    return getattr(request, "param", PLAN)


@pytest.fixture
def model() -> Model:
    return Model(PLAN)


@pytest.fixture
def cluster(tmp_path: Path, model: Model, plan: Plan) -> Iterator[Cluster]:
    with ExitStack() as stack:
        addresses = []
        for shard in range(2):
            server = stack.enter_context(ShardServer(shard, "127.0.0.1:0"))
            server.open(engine_of(plan, shard))
            addresses.append(f"127.0.0.1:{server.port}")
            with ShardClient(addresses[-1], INCARNATION, plan, shard) as client:
                fence = fence_of(client)
                client.initialize(fence, counting(plan), INITIAL)
                rows = gradients_of(shard, 12, shard, 2)
                client.push(fence, push_of(plan, BatchId(0, 0, 5), rows, shard=shard))
                model.subtract(rows)
        # A slice has no rows, so it is not called.
        found = Cluster(tmp_path, plan, [*addresses, *["127.0.0.1:1"] * plan.slices])
        stack.enter_context(running(found))
        yield found


@pytest.mark.parametrize("plan", [PLAN, BESIDE], indirect=True)
def test_rows_come_in_the_order_asked_with_what_is_present(cluster: Cluster, model: Model) -> None:
    ids = np.random.default_rng(1).integers(0, 1000, 500)
    with RowReader(cluster.address) as reader:
        assert [t.name for t in reader.tables()] == ["user", "item"]
        found = reader.read("user", ids)
        again = reader.read("user", ids.tolist())
    np.testing.assert_array_equal(found.rows, model.read(USER, ids))
    np.testing.assert_array_equal(found.present, model.has(USER, ids))
    np.testing.assert_array_equal(again.rows, found.rows)
    assert 0 < found.present.sum() < 500
    assert found.versions == {0: 1, 1: 1}
    assert cluster.asked == 1


@pytest.mark.parametrize(("table", "vocabulary"), [("user", None), ("item", 1000)])
def test_strings_are_looked_up_by_their_ids(
    cluster: Cluster, table: str, vocabulary: int | None
) -> None:
    words = ["anna", "", "ben\0", "ben", "anna"]
    ids = hashed(words, vocabulary)
    assert ids[0] == (4090414226997740377 if vocabulary is None else 160)
    assert len(set(ids.tolist())) == 4
    with RowReader(cluster.address) as reader:
        expected = reader.read(table, ids).rows
        as_bytes = [word.encode() for word in words]
        for asked in (words, tuple(words), np.array(words, object), as_bytes):
            np.testing.assert_array_equal(reader.read(table, asked).rows, expected)


def test_many_ids_are_looked_up_in_pieces(
    cluster: Cluster, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.core.table_ids.LOOK_UP_BYTES", 24 * 7)
    ids = np.arange(300)
    with RowReader(cluster.address) as reader:
        np.testing.assert_array_equal(reader.read("user", ids).rows, model.read(USER, ids))


def test_a_shard_refuses_a_look_up_that_no_message_holds(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.engine.pulls.look_up_ids", lambda _width: 3)
    with (
        RowReader(cluster.address) as reader,
        pytest.raises(InvalidArgument, match="of table 'user' are looked up; expected at most 3"),
    ):
        reader.read("user", np.arange(50))


@pytest.mark.parametrize(
    ("table", "ids", "words"),
    [
        ("users", [1], "no table 'users'; the job's tables are: user, item"),
        ("item", [5, 1000], "'item'.*1000"),
        ("item", [-1], "'item'.*-1"),
        ("user", [], "expected int64"),
        ("user", [[1]], "expected int64"),
        ("user", [0.5], "expected int64"),
        ("user", "anna", "expected int64"),
        ("user", ["anna", 5], "or a list of strings"),
        ("user", np.array([2**64 - 1], np.uint64), "at most"),
    ],
)
def test_requests_that_cannot_be_looked_up(
    cluster: Cluster, table: str, ids: Any, words: str
) -> None:
    with RowReader(cluster.address) as reader, pytest.raises(InvalidArgument, match=words):
        reader.read(table, ids)


def test_a_shard_names_its_tables(cluster: Cluster) -> None:
    """A reader may know another plan."""
    others = (TableSpec("users", 4, None, PLAN.tables[0].initializer, PLAN.tables[0].optimizer),)
    cluster.plan = Plan(PLAN.variables, PLAN.arenas, 2, "cut", others)
    with (
        RowReader(cluster.address) as reader,
        pytest.raises(InvalidArgument, match="no table 'users'; the job's tables are: user, item"),
    ):
        reader.read("users", [1])


def test_a_cluster_that_is_not_ready_is_waited_for(cluster: Cluster, model: Model) -> None:
    cluster.failures.append(NotReady("shard 1 to register"))
    with RowReader(cluster.address) as reader:
        np.testing.assert_array_equal(
            reader.read("user", [3]).rows, model.read(USER, np.array([3]))
        )
    cluster.failures.append(NotReady("shard 1 to register"))
    with (
        RowReader(cluster.address, 0) as reader,
        pytest.raises(NotReady, match=r"^after \d+\.\d s: waiting for shard 1 to"),
    ):
        reader.tables()


def test_a_shard_that_has_moved_is_found_again(cluster: Cluster, model: Model) -> None:
    ids = np.arange(40)
    with RowReader(cluster.address) as reader:
        reader.read("user", ids)
        reader._channels[1].close()
        good = cluster.addresses[1]
        reader._leave()
        cluster.addresses[1] = "127.0.0.1:1"
        reader.tables()
        cluster.addresses[1] = good
        np.testing.assert_array_equal(reader.read("user", ids).rows, model.read(USER, ids))
    assert cluster.asked == 3
    cluster.addresses[1] = "127.0.0.1:1"
    with RowReader(cluster.address, 0) as reader, pytest.raises(ShardUnreachable, match="shard 1"):
        reader.read("user", ids)


def test_without_a_coordinator() -> None:
    """At once, however long a reader would wait for what is there."""
    with RowReader("127.0.0.1:1", 1e9) as reader, pytest.raises(CoordinatorUnreachable) as raised:
        reader.read("user", [1])
    assert raised.value.coded.startswith(
        "PS204: no coordinator answers: nothing listens at 127.0.0.1:1; check the port"
    )


def test_a_coordinator_that_is_silent_is_waited_for_no_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pserver.client.lookup.CALL_S", 1e9)
    monkeypatch.setattr("pserver.client.lookup.LEAST_CALL_S", 0.02)
    monkeypatch.setattr("coordinator.client.client.LOOK_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with RowReader(address, 0.02) as reader, pytest.raises(CoordinatorUnreachable) as raised:
            reader.read("user", [1])
    assert re.match(
        rf"PS213: after \d+\.\d s: coordinator at {address}: no answer in time: .* says nothing",
        raised.value.coded,
    )


def test_the_command_prints_ids_and_rows(
    cluster: Cluster, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    known = int(gradients_of(0, 12, 0, 2)[USER].ids[0])
    where = ["--coordinator", cluster.address]
    assert run(["lookup", "user", str(known), "-5", *where]) == 0
    first, second = capsys.readouterr().out.splitlines()
    expected = model.read(USER, np.array([known, -5]))
    assert first == f"{known}  " + " ".join(f"{v:.7g}" for v in expected[0].tolist())
    assert second.startswith("-5  ")
    assert second.endswith("  (initial value)")
    assert run(["lookup", "user", str(known), "7", "--json", *where]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["table"] == "user"
    assert printed["rows"][0] == {"id": known, "present": True, "row": expected[0].tolist()}
    assert run(["lookup", "user", "--strings", "17", "\udce4", *where]) == 0  # no UTF-8
    printed_strings = capsys.readouterr()
    assert [line[:3] for line in printed_strings.out.splitlines()] == ["17 ", "\ufffd  "]
    assert printed_strings.err == ""
    assert run(["lookup", "user", "17", "anna", "--strings", "--json", *where]) == 0
    rows = model.read(USER, hashed(["17", "anna"]))
    assert json.loads(capsys.readouterr().out)["rows"] == [
        {"id": one, "present": False, "row": row.tolist()}
        for one, row in zip(["17", "anna"], rows, strict=True)
    ]


def test_the_command_says_what_it_waits_for(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.client.lookup.ANNOUNCE_S", 1e-9)
    where = ["--coordinator", cluster.address]
    cluster.failures.append(NotReady("shard 1 to register"))
    assert run(["lookup", "user", "7", *where]) == 0
    assert capsys.readouterr().err == "waiting for shard 1 to register (0 of 30 s)\n"
    cluster.addresses[:] = ["127.0.0.1:1"] * 2
    assert run(["lookup", "user", "7", "--timeout", "0.2", *where]) == 1
    waiting, *_, error = capsys.readouterr().err.splitlines()
    down = r"shard [01] at 127\.0\.0\.1:1: .*"
    assert re.fullmatch(rf"waiting for {down} \(0 of 0\.2 s\)", waiting)
    assert re.match(rf"error PS202: no answer after \d+ tries in 0\.\d s: {down}", error)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["users", "1"],
            2,
            "error PS112: there is no table 'users'; the job's tables are: user, item",
        ),
        (["item", "1000"], 2, "1000"),
        (["user", str(2**63)], 2, "expected an int64"),
        (["user", "1", "anna"], 2, "id anna is to be looked up; expected an int64; say --strings"),
        (["user", "1", "--coordinator", "127.0.0.1:1"], 1, "error PS204: no coordinator answers"),
        (["user", "1", "--coordinator", "127.0.0.1:x"], 2, "port 'x'"),
    ],
)
def test_the_command_says_what_is_wrong(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert run(["lookup", "--coordinator", cluster.address, *arguments]) == code
    printed = capsys.readouterr()
    assert "initial value" not in printed.out
    assert words in printed.err


@pytest.mark.parametrize(
    ("kind", "typed", "words"),
    [
        ("numbers", ["17", "--strings"], "table 'user' has numbers for ids; '17' is a string: "),
        ("strings", ["17"], "table 'user' has strings for ids; 17 is a number: say --strings"),
    ],
)
def test_ids_of_another_kind_than_the_table_has_are_refused(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    kind: IdKind,
    typed: list[str],
    words: str,
) -> None:
    """Not answered with initial values of rows that are never trained."""
    cluster.plan = of_kind(kind)
    where = ["--coordinator", cluster.address]
    assert run(["lookup", "user", *typed, *where]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error PS110: {words}")
    with RowReader(cluster.address) as reader:
        if kind == "numbers":
            with pytest.raises(InvalidArgument, match="has numbers for ids; 'a' is a string"):
                reader.read("user", ["a"])
        else:
            # As an exported table has them.
            assert len(reader.read("user", hashed(["a"])).rows) == 1
    other = ["17"] if kind == "numbers" else ["17", "--strings"]
    assert run(["lookup", "user", *other, *where]) == 0


def test_the_command_finds_the_newest_run_and_its_certificates(
    tmp_path: Path,
    model: Model,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PSERVER_COORDINATOR", raising=False)
    run_dir = tmp_path / "runs/one"
    run_dir.mkdir(parents=True)
    certificates_of_run(run_dir / "certs", "one", datetime.now(UTC))
    (run_dir / "job.json").write_text("{}")

    def security(role: Role) -> Security:
        return Security.from_options(role, run_dir / "certs")

    with ShardServer(0, "127.0.0.1:0", security=security(Role.SHARD)) as server:
        plan = tables_plan(1)
        server.open(engine_of(plan, 0))
        address = f"127.0.0.1:{server.port}"
        worker = security(Role.WORKER)
        with ShardClient(address, INCARNATION, plan, 0, security=worker) as client:
            client.initialize(fence_of(client), counting(plan), INITIAL)
        cluster = Cluster(tmp_path, plan, [address])
        with running(cluster, security=security(Role.COORDINATOR)):
            (run_dir / "address").write_text(cluster.address + "\n")
            readers = tmp_path / "readers"
            readers.mkdir()
            for name in ("ca.crt", "reader.crt", "reader.key"):
                shutil.copy2(run_dir / "certs" / name, readers)
            for where in ([], ["--run-dir", str(run_dir)], ["--certs", str(readers)]):
                assert run(["lookup", "user", "17", *where]) == 0
                assert capsys.readouterr().out.startswith("17  ")
    assert run(["lookup", "user", "17"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error PS204: no coordinator runs on runs/one: the run has not ended")
