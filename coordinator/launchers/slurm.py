"""A cluster as one batch script, which Slurm and ``mpirun`` run alike."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from coordinator.launchers.plan import LaunchPlan
from psrpc.core.errors import InvalidArgument, LaunchFailed
from psrpc.core.text import counted
from psrpc.ops.process import module_command

SCRIPT = "launch.sbatch"
"""Name of the script. It is in the run directory, since each node has to read it."""

SUBMIT_S = 60.0
"""How long ``sbatch`` and ``sinfo`` may take."""

REQUEUES = 5
"""How often a batch job that has failed begins again by itself."""

_TEMPLATE = Template("""\
#!/bin/bash
# Made by `coordinator launch slurm`, which submits it as  sbatch $script
# Without Slurm:  mpirun -n $tasks [--hostfile FILE -x LAUNCH_HEAD=HOST] bash $script
# HOST is the first one of the file, as the others reach it.
#SBATCH --job-name=$name
#SBATCH --ntasks=$tasks
#SBATCH --output=$log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
$directives
set -u
script=$script

if [ -n "$${LAUNCH_TASK:-}" ]; then
  rank=$$SLURM_PROCID
elif [ -n "$${OMPI_COMM_WORLD_RANK:-}" ]; then
  rank=$$OMPI_COMM_WORLD_RANK
  if [ -z "$${LAUNCH_HEAD:-}" ]; then
    if [ "$$OMPI_COMM_WORLD_SIZE" != "$$OMPI_COMM_WORLD_LOCAL_SIZE" ]; then
      echo "error PS140: several hosts, and LAUNCH_HEAD is not set; name the host of rank 0:" \\
        "mpirun -x LAUNCH_HEAD=HOST" >&2
      exit 2
    fi
    LAUNCH_HEAD=127.0.0.1
  fi
elif [ -n "$${SLURM_JOB_ID:-}" ]; then
  # The batch job itself, on the first node: starts the tasks, and sees to what has ended them.
  first=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
  LAUNCH_HEAD=$$(scontrol show node "$$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
  export LAUNCH_HEAD LAUNCH_TASK=1
  rm -f "$$script.refused"
  # A lost task ends all: what holds no more is drained and saved, and the whole begins again.
  srun --kill-on-bad-exit=1 bash -c '[ -r "$$1" ] || {
    echo "error $unseen: node $$(hostname) does not see $$1; the run directory has to lie on a" \\
      "file system that all nodes share" >&2
    exit 2
  }
  exec bash "$$1"' task "$$script"
  status=$$?
  # Of the tasks' statuses srun returns the highest.
  [ ! -e "$$script.refused" ] || exit 2
  case $$status in 0 | 2 | 130) exit $$status ;; esac
  if [ "$${SLURM_RESTART_COUNT:-0}" -lt $requeues ]; then
    echo "ended with status $$status: begins again" >&2
    scontrol requeue "$$SLURM_JOB_ID" && sleep infinity
  fi
  exit $$status
else
  echo "error PS140: neither Slurm nor mpirun runs this; submit it: sbatch $$script" >&2
  exit 2
fi

for path in $needed; do
  [ -e "$$path" ] || {
    echo "error $unseen: node $$(hostname) does not see $$path; it has to lie on a" \\
      "file system that all nodes share" >&2
    [ -z "$${LAUNCH_TASK:-}" ] || touch "$$script.refused"
    exit 2
  }
done
cd $directory || exit 2
# All processes of a task get its signals; this one waits for what the others make of them.
trap : TERM
case $$rank in
  0)
    $coordinator --bind "$$LAUNCH_HEAD:$port" ;;
  $shard_ranks)
    $shard --shard $$((rank - 1)) --coordinator "$$LAUNCH_HEAD:$port" ;;
  *)
    $worker --coordinator "$$LAUNCH_HEAD:$port" ;;
esac
status=$$?
[ $$status != 2 ] || [ -z "$${LAUNCH_TASK:-}" ] || touch "$$script.refused"
exit $$status
""")


_GPUS = re.compile(r"\bgpu:(?:[^:(,]+:)?(\d+)")
"""A number of GPUs among the resources of a node, such as ``gpu:a100:4(S:0-1),tmpfs:1``."""

_OWN = ("job-name", "ntasks", "output", "open-mode", "requeue", "no-requeue", "signal")
"""Options of ``sbatch`` that the script sets itself."""


@dataclass(frozen=True)
class BatchOptions:
    """Options of ``sbatch``, by name without dashes, such as ``{"time": "1:00:00"}``."""

    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an option that the script sets itself."""
        for name in self.given:
            if name in _OWN:
                raise InvalidArgument(
                    f"--sbatch has {name}, which the script sets itself; leave it out"
                )

    @property
    def cores(self) -> int:
        """How many cores a task has."""
        said = self.given.get("cpus-per-task", "1")
        return max(int(said), 1) if said.isdecimal() else 1

    @property
    def directives(self) -> str:
        """The lines of the script that have these options."""
        return "\n".join(
            f"#SBATCH --{name}={shlex.quote(value)}" for name, value in self.given.items()
        )


def batch_options(given: Mapping[str, object], pairs: Sequence[str]) -> BatchOptions:
    """Returns the options of ``sbatch`` that are ``given`` by name, unless they are None, and those
    of ``--sbatch NAME=VALUE``. Raises InvalidArgument for a pair of another form."""
    found = {name: str(value) for name, value in given.items() if value}
    for each in pairs:
        name, separator, value = each.partition("=")
        if not (separator and name.strip("-") and value):
            raise InvalidArgument(f"--sbatch is {each!r}; expected NAME=VALUE, as account=vision")
        found[name.strip("-")] = value
    return BatchOptions(found)


def batch_script(plan: LaunchPlan, batch: BatchOptions, directory: Path) -> str:
    """Returns the script, whose processes run in ``directory``."""
    run_dir, options = plan.options.run_dir, plan.options
    certs = [str(options.certs)] if options.certs else []
    python = {
        "coordinator": module_command("coordinator.cli", *plan.coordinator),
        "shard": module_command("pserver.cli", *plan.shard),
        "worker": module_command("worker.cli", *plan.worker),
    }
    return _TEMPLATE.substitute(
        {role: shlex.join(command) for role, command in python.items()},
        script=shlex.quote(str(run_dir / SCRIPT)),
        name=shlex.quote(run_dir.name),
        tasks=plan.tasks,
        log=shlex.quote(str(run_dir / "slurm-%j.log")),
        directives=batch.directives,
        directory=shlex.quote(str(directory)),
        port=plan.port,
        requeues=REQUEUES,
        unseen="PS141",
        needed=shlex.join([str(directory), sys.executable, str(plan.job), *certs]),
        # Without shards, a pattern that no rank matches.
        shard_ranks=" | ".join(str(rank) for rank in range(1, options.shards + 1)) or "''",
    )


def write_script(plan: LaunchPlan, batch: BatchOptions, directory: Path) -> Path:
    """Writes the script to the run directory; returns its path. Raises LaunchFailed if the script
    cannot be written."""
    path = plan.options.run_dir / SCRIPT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(batch_script(plan, batch, directory))
    except OSError as error:
        raise LaunchFailed(f"{str(path)!r} cannot be written: {error.strerror}") from None
    return path


def submit(path: Path) -> int:
    """Submits a script; returns the number of the batch job.

    Raises:
        LaunchFailed: there is no Slurm here, or it refuses the script; quotes its message.
    """
    told = run_slurm("sbatch", "--parsable", str(path))
    number = told.strip().partition(";")[0]
    if not number.isdecimal():
        raise LaunchFailed(f"sbatch answered {told.strip()!r}; expected the number of a job")
    return int(number)


def check_slots(plan: LaunchPlan, batch: BatchOptions) -> None:
    """Checks that all processes of a cluster fit into the partition at the same time, see
    :func:`check_partition`."""
    asked = f"the cluster has {plan.tasks} processes"
    fewer = "--workers or --cpus-per-task"
    check_partition(plan.tasks, asked, batch, fewer, plan.options.gpu)


def check_partition(
    needed: int, asked: str, batch: BatchOptions, fewer: str, gpu: str = "auto"
) -> None:
    """Checks that so many tasks fit into the partition at the same time, and that it has the GPUs.
    Slurm itself would let those that do not fit wait forever.

    Args:
        asked: what takes the room, the beginning of the message.
        fewer: what to ask for less of.
        gpu: the ``--gpu`` of each worker.

    Raises:
        LaunchFailed: Slurm has no such partition, or too few cores or GPUs; says what it has.
    """
    rows = [line.split() for line in run_slurm("sinfo", "-hN", "--format=%P %N %c %G").splitlines()]
    found: dict[str, list[tuple[int, str]]] = {}
    for partition, _, count, resources in rows:
        found.setdefault(partition, []).append((int(count), resources))
    default = next((name for name in found if name.endswith("*")), "")
    named = batch.given.get("partition", default.rstrip("*"))
    rows_of = found.get(named) or found.get(f"{named}*")
    if rows_of is None:
        known = ", ".join(name.rstrip("*") for name in found)
        raise LaunchFailed(f"Slurm has no partition {named!r}; it has {known}")
    _check_gpus(gpu, named, [resources for _, resources in rows_of])
    nodes = [count for count, _ in rows_of]
    room = sum(count // batch.cores for count in nodes)
    if room < needed:
        raise LaunchFailed(
            f"{asked} with {counted(batch.cores, 'core')} each, and "
            f"partition {named!r} has room for {room} ({counted(sum(nodes), 'core')} on "
            f"{counted(len(nodes), 'node')}); ask for fewer {fewer}"
        )


def _check_gpus(chosen: str, partition: str, resources: Sequence[str]) -> None:
    """Raises LaunchFailed if a worker's GPU is on no node. Nodes without any may have some that
    Slurm does not look after."""
    most = max(sum(map(int, _GPUS.findall(each))) for each in resources)
    highest = max((int(each) for each in chosen.split(",") if each.isdecimal()), default=-1)
    if 0 < most <= highest:
        raise LaunchFailed(
            f"--gpu is {chosen}, and a node of partition {partition!r} has "
            f"{counted(most, 'GPU')} at most, which count from 0; choose others, or auto"
        )


def run_slurm(*command: str) -> str:
    """Runs a command of Slurm; returns its output.

    Raises:
        LaunchFailed: there is no Slurm here, or the command fails; quotes its message.
    """
    try:
        # In a group of its own: Ctrl-C must not end it between Slurm's answer and ours.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SUBMIT_S, process_group=0
        )
    except FileNotFoundError:
        raise LaunchFailed(
            f"there is no {command[0]} here; run this on a login node of the cluster, or with "
            "--dry-run to see the script"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchFailed(
            f"{command[0]} has not answered for {SUBMIT_S:g} s; see whether slurmctld is up: "
            "scontrol ping"
        ) from None
    if done.returncode:
        words = done.stderr.strip().removeprefix(f"{command[0]}: error: ").splitlines()
        why = "; ".join(words) or f"status {done.returncode}"
        raise LaunchFailed(f"{command[0]} refuses: {why}{_advice(why)}")
    return done.stdout


def _advice(why: str) -> str:
    if "time limit" in why.lower():
        return "; give a --time that the partition allows: `scontrol show partition`"
    if "configuration source" in why or "fetch_config" in why:
        return "; this machine belongs to no Slurm: run this on a login node of the cluster"
    if "account" in why.lower():
        return (
            "; name one that you may use: --sbatch account=NAME; `sacctmgr show assoc` lists them"
        )
    if "unable to contact" in why.lower():
        return "; `scontrol ping` says whether slurmctld is up"
    return ""
