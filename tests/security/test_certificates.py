"""Files of ``coordinator certs``, and messages about files that a process cannot use."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.certificates.authority import (
    certificates_of_run,
    make_certificates,
    renew_certificates,
)
from coordinator.cli.__main__ import main
from psrpc.core.errors import InvalidArgument
from psrpc.options.security_options import from_arguments
from psrpc.security.certificates import read_certificates
from psrpc.security.credentials import Security
from psrpc.security.identity import Identity, Role, job_name
from tests.security.forgery import forge, read_pair

NOW = datetime.now(UTC)


def use(directory: Path, role: Role = Role.WORKER) -> Security:
    return Security.from_options(role, directory)


def refused(directory: Path, role: Role = Role.WORKER) -> tuple[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        use(directory, role)
    return caught.value.code, str(caught.value)


def put(directory: Path, role: Role, key: bytes, certificate: bytes) -> None:
    (directory / f"{role}.key").write_bytes(key)
    (directory / f"{role}.crt").write_bytes(certificate)


@pytest.mark.parametrize("role", Role)
def test_every_role_has_a_certificate_of_its_own(certs: Path, role: Role) -> None:
    assert use(certs, role).identity == Identity("tiny", role)


def test_only_their_owner_may_read_them(certs: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()}
    assert (stat.S_IMODE(certs.stat().st_mode), modes) == (0o700, {0o600})
    # The authority's two files, the register, and two of each role.
    assert len({path.name for path in certs.iterdir()} - {"crl.pem"}) == 2 + 1 + 2 * len(Role)


def test_nothing_is_written_over(mine: Path) -> None:
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    with pytest.raises(InvalidArgument, match="nothing in it is written over"):
        make_certificates(mine, "tiny", NOW)
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "My_Job")
    assert main(["certs", "init", where]) == 0
    assert main(["certs", "renew", where, "--days", "30"]) == 0
    assert main(["certs", "show", where]) == 0
    shown = capsys.readouterr().out
    assert "certificates of job my-job" in shown
    assert "pserver://my-job/shard shard.my-job.pserver" in shown
    assert "(in 29 days)  pserver://my-job/worker worker.my-job.pserver\n" in shown
    assert main(["certs", "renew", where, "--days", "2"]) == 0
    assert main(["certs", "show", where]) == 0
    assert "(in 1 day)  pserver://my-job/worker " in capsys.readouterr().out
    assert main(["certs", "renew", where, "--days", "1"]) == 0
    assert "new certificates of job my-job, for 1 day\n" in capsys.readouterr().out
    assert main(["certs", "init", where]) == 2
    assert main(["certs", "init", str(tmp_path / "other"), "--job", "My_Job"]) == 2
    assert main(["certs", "init", str(tmp_path / "other"), "--days", "0"]) == 2
    said = capsys.readouterr().err
    assert "job name 'My_Job' cannot stand in a certificate" in said
    assert "--days is 0; expected 1 to 3650" in said
    assert not (tmp_path / "other").exists()


def test_new_ones_are_made_only_when_the_old_ones_end_soon(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (mine / "shard.crt").read_bytes()
    renew = ["certs", "renew", str(mine), "--within"]
    assert main([*renew, "30"]) == 0
    assert "certificates are valid until" in capsys.readouterr().out
    assert (mine / "shard.crt").read_bytes() == before
    # One is enough.
    put(mine, Role.WORKER, *forge(mine, "pserver://tiny/worker", before=NOW, days=29))
    assert main([*renew, "30"]) == 0
    assert "new certificates of job tiny" in capsys.readouterr().out
    assert (mine / "shard.crt").read_bytes() != before
    assert main([*renew, "0"]) == 2
    assert "--within is 0; expected 1 to 3650" in capsys.readouterr().err


def test_a_missing_file(mine: Path) -> None:
    (mine / "worker.crt").unlink()
    code, said = refused(mine)
    assert (code, f"there is no {mine / 'worker.crt'}" in said) == ("PS311", True)
    assert said.rstrip().endswith(
        "copy it from where the job's certificates were made; a new `coordinator certs init` makes "
        "another authority, which the others do not trust"
    )
    (mine / "ca.crt").unlink()
    assert "make it with `coordinator certs init DIR`, or, where the job has" in refused(mine)[1]


def test_a_key_that_others_may_read(mine: Path) -> None:
    (mine / "worker.key").chmod(0o640)
    code, said = refused(mine)
    assert (code, f"run: chmod 600 {mine / 'worker.key'}" in said) == ("PS312", True)


def test_an_expired_certificate(mine: Path) -> None:
    past = NOW - timedelta(days=9)
    put(mine, Role.WORKER, *forge(mine, "pserver://tiny/worker", before=past, days=1))
    code, said = refused(mine)
    assert (code, f"`coordinator certs renew {mine}`" in said) == ("PS313", True)
    renew_certificates(mine, NOW)
    assert use(mine).encrypted


def test_a_clock_that_is_behind(certs: Path) -> None:
    with pytest.raises(InvalidArgument, match="set this machine's clock"):
        read_certificates(certs, Role.WORKER, NOW - timedelta(days=2))


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("pserver://huge/worker", "a worker of job huge; expected one of a worker of job tiny"),
        ("pserver://tiny/shard", "a shard of job tiny; expected one of a worker of job tiny"),
        ("https://tiny/worker", "names 'https://tiny/worker'; expected pserver://JOB/ROLE"),
    ],
)
def test_certificates_of_other_identities(mine: Path, uri: str, words: str) -> None:
    put(mine, Role.WORKER, *forge(mine, uri))
    assert words in refused(mine)[1]


def test_files_that_do_not_fit(mine: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", "tiny", NOW)
    (mine / "worker.key").write_bytes((mine / "shard.key").read_bytes())
    assert "is not the key of" in refused(mine)[1]
    put(mine, Role.WORKER, *read_pair(tmp_path / "other", Role.WORKER))
    assert "was not issued by the authority in" in refused(mine)[1]
    (mine / "ca.crt").write_text("garbage")
    assert refused(mine)[0] == "PS311"


def test_a_run_renews_its_certificates_when_they_are_about_to_expire(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certificates_of_run(certs, "tiny", NOW)
    first = read_pair(certs, Role.SHARD)
    certificates_of_run(certs, "tiny", NOW + timedelta(days=300))
    assert read_pair(certs, Role.SHARD) == first
    certificates_of_run(certs, "tiny", NOW + timedelta(days=364, hours=1))
    assert read_pair(certs, Role.SHARD) != first


@pytest.mark.parametrize(
    ("text", "name"),
    [("mnist_dnn", "mnist-dnn"), ("Ä B!", "b"), ("--", "job"), ("x" * 99, "x" * 63)],
)
def test_job_names(text: str, name: str) -> None:
    assert job_name(text) == name


def test_options_go_before_the_environment(certs: Path) -> None:
    from argparse import ArgumentParser

    from psrpc.options.security_options import add_security_arguments

    parser = ArgumentParser()
    add_security_arguments(parser, listens=True)
    environment = {"PSERVER_CERTS": str(certs)}
    assert from_arguments(Role.WORKER, parser.parse_args([]), environment).directory == certs
    plain = from_arguments(Role.WORKER, parser.parse_args(["--insecure"]), environment)
    assert (plain.encrypted, plain.insecure) == (False, True)
    with pytest.raises(InvalidArgument, match=r"^--insecure and --certs x contradict each other"):
        from_arguments(Role.WORKER, parser.parse_args(["--insecure", "--certs", "x"]), {})


def test_plaintext_may_be_said_by_the_environment(certs: Path) -> None:
    """With the words, and the precedence, that the commands with a configuration have."""
    from argparse import ArgumentParser

    from psrpc.options import locate as whereabouts

    parser = ArgumentParser()
    whereabouts.add_arguments(parser)
    here = ["--coordinator", "there:1"]

    def found(said: str, *more: str, **environment: str) -> tuple[bool, Path | None]:
        args = parser.parse_args([*here, *more])
        security = whereabouts.find_security(
            args, environment={"PSERVER_INSECURE": said, **environment}
        )
        return security.insecure, security.directory

    for yes in ("1", "true", "Yes", "on"):
        assert found(yes) == (True, None)
    for no in ("", "0", "false", "No", "off"):
        assert found(no, PSERVER_CERTS=str(certs)) == (False, certs)
    assert found("1", "--certs", str(certs)) == (False, certs)
    assert found("0", "--insecure") == (True, None)
    with pytest.raises(InvalidArgument) as caught:
        found("1", PSERVER_CERTS=str(certs))
    assert str(caught.value).startswith(
        f"--insecure (PSERVER_INSECURE) and --certs (PSERVER_CERTS) {certs} contradict each other"
    )
    with pytest.raises(InvalidArgument, match=r"^--token-file \(PSERVER_TOKEN_FILE\) t needs"):
        found("", PSERVER_TOKEN_FILE="t")
    with pytest.raises(InvalidArgument, match="PSERVER_INSECURE='maybe'; expected true or false"):
        found("maybe")
