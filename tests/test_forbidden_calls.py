"""Calls that our source may not make, read from its syntax trees.

Two things may run code of others: a deserializer, and Python itself. No call of either kind is in
here, apart from what :data:`ALLOWED` names with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

Parents = dict[ast.AST, ast.AST]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("psrpc", "pserver", "worker", "coordinator", "examples", "benchmarks")

MODULES = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve", "yaml"}
"""Their loaders run code that is in the data, or make any object of it."""

PROCESSES = {"Popen", "call", "check_call", "check_output", "run"}

BUILTINS = {"eval", "exec", "compile", "__import__"}

CALLS = {
    "asyncio.create_subprocess_shell": "hands a string to a shell",
    "code.interact": "runs what it reads",
    "ctypes.pythonapi": "runs anything",
    "os.popen": "hands a string to a shell",
    "os.system": "hands a string to a shell",
    "runpy.run_module": "runs a file",
    "runpy.run_path": "runs a file",
    "subprocess.getoutput": "hands a string to a shell",
    "subprocess.getstatusoutput": "hands a string to a shell",
    "torch.load": "unpickles",
}

REBUILD = {"deserialize", "deserialize_keras_object", "from_config", "load_model"}
"""Of Keras: they make an object of any class that a document names."""

CLASSES = {
    "keras.constraints",
    "keras.initializers",
    "keras.layers",
    "keras.losses",
    "keras.metrics",
    "keras.optimizers",
    "keras.optimizers.schedules",
}
"""A value that is one of these modules gives any class of it by name."""

REBUILT = (
    "the one function that makes objects of documents: of classes that the allow-list has, with "
    "plain arguments, and by no deserializer of Keras's"
)

HANDED_OVER = (
    "the model of the program that called fit, from the folder with its classes: see "
    "worker/stored/objects.py"
)

OF_THE_CALLER = (
    "classes and functions of the program that called fit, in a file of the same user that no "
    "other may read or write; none of it comes over the network"
)

ALLOWED = {
    ("pserver/__init__.py", "exec_module"): (
        "our own packages, from beside this one, though a file of the user's has the name of one"
    ),
    ("worker/job/loader.py", "exec_module"): (
        "the job file is its user's own code, which a worker runs from its own disk; none of it "
        "comes over the network"
    ),
    ("worker/cli/forked.py", "runpy.run_module"): (
        "one of our commands, as `python -m` runs it in a fresh process; requests come over an "
        "inherited socket without a path, which only `coordinator up` and its coordinator hold"
    ),
    ("worker/export/check.py", "keras.models.load_model"): (
        "the file that this very process has just written, of the model of its user's own job"
    ),
    ("worker/predict/frames.py", "keras.saving.load_model"): (
        "the file that the caller of `predictions` names, in Keras's safe mode"
    ),
    ("coordinator/launchers/kubernetes/job_set.py", "yaml"): "writes manifests, and reads nothing",
    ("worker/stored/objects.py", "cloudpickle"): OF_THE_CALLER,
    ("worker/stored/objects.py", "pickle"): OF_THE_CALLER,
    ("worker/handover/models.py", "keras.saving.load_model"): HANDED_OVER,
    ("worker/handover/models.py", "keras.saving.deserialize_keras_object"): HANDED_OVER,
    ("worker/handover/construction.py", "keras.saving.deserialize_keras_object"): HANDED_OVER,
    ("pserver/updates/keras_objects.py", "keras.constraints"): REBUILT,
    ("pserver/updates/keras_objects.py", "keras.initializers"): REBUILT,
    ("pserver/updates/keras_objects.py", "keras.optimizers"): REBUILT,
    ("pserver/updates/keras_objects.py", "keras.optimizers.schedules"): REBUILT,
}
"""(file, what) -> why it may be."""


def sources() -> dict[str, Path]:
    """All that we have written ourselves, by its path from here."""
    return {
        str(path.relative_to(ROOT)): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "_pb2" not in path.name
    }


def names_of(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> the full one that an import, or an assignment, gave it."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_another_name(node):
            names[ast.unparse(node.targets[0])] = _full_name(node.value, names)
    return names


def _is_another_name(node: ast.AST) -> bool:
    """Whether it is ``layers = keras.layers``, after which the one is as good as the other."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
        and ast.unparse(node.value).startswith("keras.")
    )


def violations(file: str, tree: ast.Module) -> Iterator[str]:
    """Forbidden calls of one file, with their lines."""
    parents: Parents = {}
    nodes: list[ast.AST] = [tree]
    # It grows while it is gone through.
    for node in nodes:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr_context):
                parents[child] = node
                nodes.append(child)
    names = names_of(nodes)
    for node in nodes:
        for what in _of_node(node, names, parents):
            if (file, what.partition(":")[0]) not in ALLOWED:
                yield f"{file}:{getattr(node, 'lineno', 0)}: {what}"


def _of_node(node: ast.AST, names: dict[str, str], parents: Parents) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from _of_import(node)
    # Names, not calls alone: a function that is passed on or renamed is called elsewhere.
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield from _of_name(node, _full_name(node, names), parents)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, names, parents)


def _of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [node.module or ""]
    for module in modules:
        if module.partition(".")[0] in MODULES:
            yield f"{module}: makes any object of data"


def _of_name(node: ast.Name | ast.Attribute, full: str, parents: Parents) -> Iterator[str]:
    head, _, name = full.rpartition(".")
    if name in BUILTINS and head in ("", "builtins"):
        yield f"{name}: runs code"
    if full in CALLS:
        yield f"{full}: {CALLS[full]}"
    if name in {"exec_module", "load_module"}:
        yield f"{name}: runs a file"
    if name in REBUILD and (head.startswith("keras") or head == "super()"):
        yield f"{full}: rebuilds an object of any class"
    of_keras = full in CLASSES
    if (
        of_keras
        and not isinstance(parents[node], ast.Attribute)
        and not _is_another_name(parents[node])
    ):
        yield f"{full}: has any class, by its name"


def _of_call(node: ast.Call, names: dict[str, str], parents: Parents) -> Iterator[str]:
    full = _full_name(node.func, names)
    keywords = {k.arg: k.value for k in node.keywords}
    if full == "numpy.load" and not _is_false(keywords.get("allow_pickle")):
        # False is the default; writing it shows that it was considered.
        yield f"{full}: without allow_pickle=False"
    if full.rpartition(".")[2] in PROCESSES and not _is_false(keywords.get("shell")):
        if "shell" in keywords:
            yield f"{full}: shell= hands a string to a shell"
        elif None in keywords and full.startswith("subprocess."):
            yield f"{full}: **options may hold shell=True"
    if full == "getattr" and _full_name(node.args[0], names) == "builtins":
        yield "getattr: of builtins, runs code"
    by_name = full.startswith("keras.") and full.rpartition(".")[2] == "get"
    if by_name and node.args and not _is_string(node.args[0], node, parents):
        yield f"{full}: rebuilds what a document names; ask isinstance(..., str) first"


def _is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _is_string(value: ast.expr, node: ast.AST, parents: Parents) -> bool:
    """Whether ``node`` stands where an ``if`` has found ``value`` to be a string."""
    asked = f"isinstance({ast.unparse(value)}, str)"
    while node in parents:
        child, node = node, parents[node]
        taken = node.body if isinstance(node, ast.If | ast.IfExp) else None
        if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) == asked:
            return child is taken or (isinstance(taken, list) and child in taken)
    return False


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    """``keras.optimizers.deserialize`` of what stands there, however it was imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}".removeprefix("tensorflow.")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return "super()"
    return "?"


SOURCES = sources()


@pytest.mark.slow
def test_our_source_calls_none_of_it() -> None:
    assert len(SOURCES) > 200
    found = [
        what
        for file, path in SOURCES.items()
        for what in violations(file, ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("file", "call"), ALLOWED)
def test_every_exception_is_still_needed(file: str, call: str) -> None:
    whole = {**ALLOWED}
    ALLOWED.pop((file, call))
    try:
        assert any(
            f" {call}" in what for what in violations(file, ast.parse(SOURCES[file].read_text()))
        )
    finally:
        ALLOWED.update(whole)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import pickle", "pickle: makes any object"),
        ("from cloudpickle import loads", "cloudpickle: makes any"),
        ("import marshal as quick", "marshal: makes any"),
        ("import shelve", "shelve: makes any"),
        ("import yaml; yaml.load(text)", "yaml: makes any"),
        ("eval(text)", "eval: runs code"),
        ("list(map(eval, texts))", "eval: runs code"),
        ("exec(text)", "exec: runs code"),
        ("exec(compile(text, name, mode))", "compile: runs code"),
        ("import builtins; builtins.exec(text)", "exec: runs code"),
        ("from builtins import eval as read; read(text)", "eval: runs code"),
        ("import builtins; getattr(builtins, name)(text)", "getattr: of builtins"),
        ("__import__(name)", "__import__: runs code"),
        ("import numpy as np; np.load(path)", "numpy.load: without allow_pickle=False"),
        ("from numpy import load; load(path, allow_pickle=True)", "numpy.load: without"),
        ("import numpy as np; np.load(path, allow_pickle=given)", "numpy.load: without"),
        ("import os; os.system(line)", "os.system: hands a string to a shell"),
        ("from os import popen as start; start(line)", "os.popen: hands"),
        ("import subprocess; subprocess.run(line, shell=True)", "subprocess.run: shell="),
        ("from subprocess import Popen as P; P(line, shell=given)", "subprocess.Popen: shell="),
        ("import subprocess; subprocess.run(line, **options)", "may hold shell=True"),
        ("import subprocess; subprocess.getoutput(line)", "subprocess.getoutput: hands"),
        ("import asyncio; asyncio.create_subprocess_shell(line)", "create_subprocess_shell: hands"),
        ("import runpy; runpy.run_path(path)", "runpy.run_path: runs a file"),
        ("loader.exec_module(module)", "exec_module: runs a file"),
        ("import keras; keras.optimizers.deserialize(document)", "deserialize: rebuilds"),
        ("from keras.saving import deserialize_keras_object as make; make(d)", "rebuilds"),
        ("import tensorflow as tf; tf.keras.models.load_model(path)", "load_model: rebuilds"),
        ("import keras; keras.layers.Dense.from_config(config)", "from_config: rebuilds"),
        ("import keras; getattr(keras.optimizers, name)(**config)", "has any class"),
        ("from keras import layers; table = {'layer': layers}", "has any class"),
        ("import keras; l = keras.layers; getattr(l, name)()", "has any class"),
        ("import keras; o = keras.optimizers; o.deserialize(document)", "rebuilds"),
        ("import keras; keras.losses.get(loss)", "rebuilds what a document names"),
        ("import keras\nif isinstance(a, str): keras.losses.get(b)", "rebuilds what a document"),
        ("import keras\nif isinstance(a, str): pass\nelse: keras.losses.get(a)", "rebuilds what"),
    ],
)
def test_every_rule_can_fail(source: str, words: str) -> None:
    assert any(words in what for what in violations("planted.py", ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import re; re.compile(pattern)",
        "model.compile(optimizer, loss)",
        "import keras; keras.optimizers.SGD(0.1)",
        "import keras; layers = keras.layers; layers.Dense(1)",
        "import keras; keras.optimizers.serialize(optimizer)",
        "import keras\nif isinstance(loss, str): loss = keras.losses.get(loss)",
        "import keras; made = keras.losses.get(a) if isinstance(a, str) else a",
        "import numpy as np; np.load(path, allow_pickle=False)",
        "import subprocess; subprocess.run([program, argument], check=True)",
        "options.get(name)",
    ],
)
def test_harmless_calls_pass(source: str) -> None:
    assert not list(violations("planted.py", ast.parse(source)))
