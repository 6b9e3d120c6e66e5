"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.files import mounts

TABLE = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:30 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:31 / /home/ann/fast\\040disk rw - xfs /dev/vdb rw
32 27 0:32 / /mnt rw - ext4 /dev/vdc rw
33 32 0:33 / /mnt rw - fuse.sshfs host:/x rw
34 27 0:34 / /data rw - fuseblk /dev/vdd rw
a line of another format
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/run/job", "ext4"),
        ("/home", "nfs4"),
        ("/home/ann/runs", "nfs4"),
        ("/homeward", "ext4"),
        ("/home/ann/fast disk/runs", "xfs"),
        ("/mnt/runs", "fuse.sshfs"),
        ("/data", "fuseblk"),
    ],
)
def test_the_innermost_and_latest_mount_counts(path: str, kind: str) -> None:
    assert mounts.file_system(TABLE, path) == kind
    assert mounts.file_system("", path) == ""


def test_file_systems_of_a_network_are_named_and_local_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mountinfo")
    assert mounts.network_file_system(Path("/home/ann")) == ""
    (tmp_path / "mountinfo").write_text(TABLE)
    found = [mounts.network_file_system(Path(p)) for p in ("/home/ann", "/mnt/x", "/data", "/var")]
    assert found == ["nfs4", "fuse.sshfs", "", ""]


def test_the_kernel_says_where_this_file_is() -> None:
    assert mounts.file_system(mounts.MOUNTS.read_text(), "/proc/self/status") == "proc"
