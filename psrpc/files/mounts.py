"""The file system that a path is on, as the kernel's table of mounts says it."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

NETWORK = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "gfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
    ]
)
"""Types of file systems that several machines may have mounted. Those of FUSE are added: most of
them are of networks, and the others lose nothing but speed."""


def network_file_system(path: Path) -> str:
    """Returns the type of the file system of ``path`` if several machines may have it mounted.
    Empty for a local one, and where the kernel does not say."""
    try:
        table = MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""
    kind = file_system(table, os.path.realpath(path))
    return kind if kind in NETWORK or kind.split(".")[0] == "fuse" else ""


def file_system(table: str, path: str) -> str:
    """Returns the type of the file system of the absolute ``path`` in ``table``, which is in the
    format of ``/proc/PID/mountinfo`` (proc(5)). Empty if no line says it."""
    found, kind = "", ""
    for line in table.splitlines():
        mount, dash, rest = line.partition(" - ")
        fields = mount.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # A later mount at the same place hides the earlier one.
        if inside and len(point) >= len(found):
            found, kind = point, rest.split(" ")[0]
    return kind
