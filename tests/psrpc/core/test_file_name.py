"""Names never become paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from pserver.snapshots.writer import SnapshotFiles
from psrpc.checkpoint.checkpoint import shard_file_name
from psrpc.checkpoint.rows_file import rows_file_name
from psrpc.core.errors import CheckpointError, InvalidArgument
from psrpc.core.names import LONGEST, check_file_name, inside
from psrpc.security.identity import check_job_name
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.shard_reports import from_snapshot_report
from tests.pserver.shards import identity_of, plan_of

PATHS = ["../x", "/etc/x", "a/b", "a\\b", "..", ".", "x/", "/"]
ODD = ["a\0b", "a\nb", "\ud800", "x" * (LONGEST + 1), "é" * LONGEST, "\x1b[2J", "a\u202eb"]
HIDDEN = [".tmp-step-00000001", ".token.tmp"]


@pytest.mark.parametrize("name", [*PATHS, *ODD, *HIDDEN, ""])
def test_invalid_file_names(name: str) -> None:
    with pytest.raises(InvalidArgument, match="the named file"):
        check_file_name(name, "the named file")


@pytest.mark.parametrize("name", ["step-00000020", shard_file_name(0, 2), rows_file_name(1, 2, 3)])
def test_our_own_names_pass(name: str) -> None:
    assert check_file_name(name, "a file") == name


@pytest.mark.parametrize("name", [*PATHS, *ODD, *HIDDEN])
def test_a_shard_cannot_have_the_coordinator_open_another_file(name: str) -> None:
    if name == "\ud800":
        return  # protobuf carries no such string
    with pytest.raises(InvalidArgument, match="the file that shard 1 reports"):
        from_snapshot_report(pb.ReportSnapshotRequest(shard=1, file=name))
    with pytest.raises(InvalidArgument, match="the file that shard 1 reports"):
        from_snapshot_report(pb.ReportSnapshotRequest(shard=1, rows=[pb.RowsFile(file=name)]))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "a\0b", "x" * 5000, "a/b/c/d/e", "link/x", ""]
)
def test_a_shard_reads_and_writes_in_the_run_directory_only(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "link").symlink_to("/etc")
    with pytest.raises(CheckpointError):
        SnapshotFiles(identity_of(), plan_of(), "run-1", run_dir).read(name)
    with pytest.raises(InvalidArgument):
        inside(run_dir, name, "a directory")
    assert inside(run_dir, "checkpoints/.tmp-1", "a directory") == run_dir / "checkpoints/.tmp-1"


@pytest.mark.parametrize("name", [*PATHS, *ODD, "", "a*", "-a", "A", "x.y"])
def test_a_job_in_certificates_is_a_label(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_job_name(name)
