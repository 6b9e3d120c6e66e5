from __future__ import annotations

import sys
from importlib import metadata

import pytest

import pserver
from psrpc.core.errors import InvalidJob
from psrpc.ops import extras
from psrpc.ops.extras import check_tensorflow, missing


def test_what_is_missing_is_named_with_the_command_that_brings_it() -> None:
    error = missing("--trace", "OpenTelemetry", "otel", "leave --trace out")
    assert error.coded == (
        f"PS135: --trace needs OpenTelemetry, which is not installed in {sys.prefix}: "
        "pip install 'tf-pserver[otel]', or leave --trace out"
    )


@pytest.mark.parametrize(("module", "name"), [("tensorflow", "TensorFlow"), ("keras", "Keras")])
def test_a_missing_module_is_found_without_an_import(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    check_tensorflow("a worker")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidJob, match=rf"^a worker needs {name}, .*'tf-pserver\[tf\]'$") as no:
        check_tensorflow("a worker")
    assert no.value.code == "PS135"


REQUIRES = ['tensorflow<2.22,>=2.20; extra == "tf"', 'keras<3.16,>=3.10; extra == "tf"', "numpy>=2"]


@pytest.mark.parametrize(
    ("tensorflow", "keras", "found"),
    [
        ("2.20.0", "3.10.0", ""),
        ("2.20.0rc1", "4.0", ""),
        ("2.19.1", "3.15.1", "tensorflow 2.20 or newer; 2.19.1 is installed"),
        ("2.21.0", "3.9.2", "keras 3.10 or newer; 3.9.2 is installed"),
    ],
)
def test_a_version_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, tensorflow: str, keras: str, found: str
) -> None:
    versions = {"tensorflow": tensorflow, "keras": keras}
    monkeypatch.setattr(metadata, "requires", lambda _name: REQUIRES)
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    if not found:
        check_tensorflow("a worker")
        return
    with pytest.raises(InvalidJob, match=rf"^a worker needs {found} .*'tf-pserver\[tf\]'$"):
        check_tensorflow("a worker")


def test_other_distributions_of_tensorflow_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", lambda _name: REQUIRES)
    monkeypatch.setattr(metadata, "version", version)
    check_tensorflow("a worker")


def test_the_declared_ranges_are_those_that_are_checked() -> None:
    declared = {each.split("<")[0]: each for each in extras._requirements()}
    assert ">=" in declared["tensorflow"]
    assert ">=" in declared["keras"]


def test_a_name_that_needs_tensorflow_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError("No module named 'keras'", name="keras")

    monkeypatch.setattr(pserver, "import_module", absent)
    monkeypatch.delitem(vars(pserver), "Cluster", raising=False)
    with pytest.raises(ImportError, match=r"^PS135: pserver\.Cluster needs keras, .*\[tf\]'$"):
        _ = pserver.Cluster


def test_an_import_that_fails_for_another_reason_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    monkeypatch.setattr(pserver, "import_module", absent)
    monkeypatch.delitem(vars(pserver), "Job", raising=False)
    with pytest.raises(ModuleNotFoundError, match="mine"):
        _ = pserver.Job
