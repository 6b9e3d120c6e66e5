"""Finds the type of the file system that a path is on, from the kernel's table of mounts."""

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
"""Types of file systems that several machines may have mounted. Types of FUSE count, too: most of
them are network file systems, and treating the others alike only costs speed."""


def network_file_system(path: Path) -> str:
    """Returns the type of the file system of ``path`` if several machines may have it mounted.
    Returns an empty string for a local file system, and if the type is unknown."""
    try:
        table = MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""
    kind = file_system(table, os.path.realpath(path))
    return kind if kind in NETWORK or kind.split(".")[0] == "fuse" else ""


def file_system(table: str, path: str) -> str:
    """Returns the type of the file system of the absolute ``path`` in ``table``, which is in the
    format of ``/proc/PID/mountinfo`` (proc(5)). Empty if no line matches."""
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
