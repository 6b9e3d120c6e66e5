"""A Slurm of two nodes on this machine, without systemd; needs root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.cluster import until, wait_until_gone

_CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
SchedulerParameters=sched_min_interval=0
KillWait=90
MessageTimeout=90
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=4000 Gres=gpu:2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Runs Slurm with its files in ``folder``; yields the environment of its commands."""
    # munged refuses a socket that others cannot reach, and a key that they can.
    folder.chmod(0o755)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    conf, key = folder / "slurm.conf", folder / "munge.key"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(_CONF.format(folder=folder, host=host, ports=_free_ports(3)))
    # To Slurm, any two devices are GPUs.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in _MUNGE.items()]
    try:
        for command in (
            ["munged", *munge, "--force"],
            ["slurmctld", "-f", str(conf)],
            *(["slurmd", "-f", str(conf), "-N", node] for node in ("n1", "n2")),
        ):
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=environment)

        def idle() -> bool:
            said = subprocess.run(
                ["sinfo", "-hN", "-o", "%T"], capture_output=True, text=True, env=environment
            )
            return said.stdout.split() == ["idle"] * 2

        until(idle, "two idle nodes")
        yield environment
    finally:
        ends = [int(path.read_text()) for path in folder.glob("*.pid")]
        for pid in ends:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until_gone(ends)


_MUNGE = {
    "key-file": "key",
    "socket": "sock",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
