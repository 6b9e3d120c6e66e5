"""The batch script of a cluster, and the checks before it is submitted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from coordinator.cli.__main__ import main
from coordinator.launchers.plan import ClusterOptions, plan_of
from coordinator.launchers.slurm import BatchOptions, batch_script, write_script
from psrpc.core.errors import InvalidArgument, InvalidJob, LaunchFailed
from tests.e2e.cluster import EXAMPLES

JOB = EXAMPLES / "mnist_dnn.py"


def options(run_dir: Path, **more: object) -> ClusterOptions:
    return ClusterOptions(**{"run_dir": run_dir, "shards": 2, "workers": 3, **more})  # type: ignore[arg-type]


def test_the_script_of_awkward_names_is_bash(tmp_path: Path) -> None:
    run = tmp_path / "a $run 'of' mine"
    plan = plan_of(JOB, options(run, insecure=True, overrides=("init_from=it's $HOME",)))
    path = write_script(plan, BatchOptions({"time": "1:00"}), tmp_path)
    subprocess.run(["bash", "-n", path], check=True)
    script = path.read_text()
    assert "#SBATCH --ntasks=6\n" in script
    assert "#SBATCH --time=1:00\n" in script
    assert "  1 | 2)\n" in script
    words = subprocess.run(
        ["bash", "-c", f"set -- {_line(script, 'coordinator.cli')}; printf '%s\\n' \"$@\""],
        env={"LAUNCH_HEAD": "n1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert words[words.index("--run-dir") + 1] == str(run)
    assert words[words.index("--set") + 1] == "init_from=it's $HOME"
    assert words[-2:] == ["--bind", f"n1:{plan.port}"]


def test_workers_that_host_the_parameters_need_no_shard(tmp_path: Path) -> None:
    plan = plan_of(JOB, options(tmp_path, shards=0, insecure=True, overrides=("dense=allreduce",)))
    path = write_script(plan, BatchOptions(), tmp_path)
    subprocess.run(["bash", "-n", path], check=True)
    script = path.read_text()
    assert "#SBATCH --ntasks=4\n" in script
    assert "  '')\n" in script
    words = _line(script, "coordinator.cli").split()
    assert words[words.index("--shards") + 1] == "0"


def _line(script: str, module: str) -> str:
    [line] = [line for line in script.splitlines() if f"-m {module}" in line]
    return line.removesuffix(" ;;")


def test_the_script_runs_only_where_an_engine_gives_it_a_rank(tmp_path: Path) -> None:
    path = write_script(plan_of(JOB, options(tmp_path, insecure=True)), BatchOptions(), tmp_path)
    alone = subprocess.run(["bash", path], env={}, capture_output=True, text=True)
    assert alone.returncode == 2
    assert "error PS140: neither Slurm nor mpirun runs this; submit it" in alone.stderr
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "6"}
    apart = subprocess.run(
        ["bash", path],
        env={**ranks, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
        capture_output=True,
        text=True,
    )
    assert apart.returncode == 2
    assert "name the host of rank 0: mpirun -x LAUNCH_HEAD=HOST" in apart.stderr


def test_a_node_that_does_not_see_a_file_says_so_before_it_starts(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("from pserver import Job\njob = Job()\n")
    path = write_script(plan_of(job, options(tmp_path, insecure=True)), BatchOptions(), tmp_path)
    job.unlink()
    sizes = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "6"}
    env = {"PATH": os.environ["PATH"], "OMPI_COMM_WORLD_RANK": "5", **sizes}
    done = subprocess.run(["bash", path], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error PS141: node ")
    assert done.stderr.endswith(
        f" does not see {job}; it has to lie on a file system that all nodes share\n"
    )


def test_the_port_follows_from_the_run_directory(tmp_path: Path) -> None:
    ports = [plan_of(JOB, options(tmp_path / n, insecure=True)).port for n in ("a", "a", "b")]
    assert ports[0] == ports[1] != ports[2]
    assert all(20_000 <= port < 30_000 for port in ports)
    assert plan_of(JOB, options(tmp_path, insecure=True, port=7)).port == 7


def test_a_cluster_is_checked_before_it_is_launched(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="there is no job file") as raised:
        plan_of(tmp_path / "no.py", options(tmp_path, insecure=True))
    assert raised.value.code == "PS102"
    with pytest.raises(InvalidArgument, match=r"has no ca.crt; make certificates: coordinator"):
        plan_of(JOB, options(tmp_path, certs=tmp_path / "none"))
    with pytest.raises(InvalidArgument, match=r"needs --certs DIR .* or --insecure"):
        plan_of(JOB, options(tmp_path))
    (tmp_path / "file").touch()
    plan = plan_of(JOB, options(tmp_path / "file" / "run", insecure=True))
    with pytest.raises(LaunchFailed, match="cannot be written"):
        write_script(plan, BatchOptions(), tmp_path)


def test_a_dry_run_prints_the_script_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "ca.crt").touch()
    command = ["launch", "slurm", str(JOB), "--run-dir", str(run), "--certs", str(tmp_path)]
    assert main([*command, "--sbatch", "account=vision", "--mode", "sync", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --account=vision\n" in script
    assert f"--mode sync --certs {tmp_path} --bind" in script
    assert not run.exists()
    assert batch_script(plan_of(JOB, options(run, insecure=True)), BatchOptions(), tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sbatch", "ntasks=4"], "error PS110: --sbatch has ntasks, which the script sets"),
        (["--port", "99999"], "error PS110: --port is 99999; expected 1 to 65535"),
        (["--certs", "certs"], "error PS110: --certs and --insecure exclude each other"),
        (["--sbatch", "account"], "error PS110: --sbatch is 'account'; expected NAME=VALUE"),
        ([], "error PS140: there is no sinfo here; run this on a login node"),
    ],
)
def test_errors_of_the_command_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["launch", "slurm", str(JOB), "--run-dir", str(tmp_path / "run"), "--insecure"]
    assert main([*command, *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
