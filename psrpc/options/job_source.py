"""Finds mistakes in a job file without running it and without TensorFlow.

It reports only mistakes that would be found later anyway, with the same messages. Mistakes that
show only when the file runs are left to that.
"""

from __future__ import annotations

import ast
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from psrpc.core.errors import InvalidData, InvalidJob, InvalidSetting
from psrpc.options.job_keys import (
    CODE,
    FIELDS,
    OPTIMIZER,
    WHOLE_NUMBERS,
    UserCodeFailed,
    literal_settings,
    read_job_file,
    unknown_key,
)

_HARMLESS = """
    h5py keras matplotlib ml_dtypes numpy pandas PIL pserver pyarrow scipy sklearn tensorflow
    tensorflow_datasets worker
"""
_LIBRARIES = (frozenset(_HARMLESS.split()) | sys.stdlib_module_names) - {"runpy", "subprocess"}
"""Modules that do not read settings of a job and do not write its data."""

_DYNAMIC = "__import__ chdir eval exec getattr globals import_module system vars"
_OPAQUE = frozenset(_DYNAMIC.split())
"""Names by which a file can do things that its source does not show."""

_OF_TABLES = frozenset(["Embedding", "load_model", "model_from_json", "from_config", "pickle"])
"""Names by which a file can have a model with embedding tables."""

_FILES = {"Csv": "path", "Npz": "path"}
"""Data sources that need one file, and the name of that argument."""

MOST_MODULES = 100
"""Maximum number of the user's own files that are read together with a job file."""


def first_look(path: Path, settings: Sequence[str] = ()) -> None:
    """Checks a job file and its ``--set`` settings in milliseconds.

    Raises:
        InvalidJob: the file is missing, or names a data file that is missing.
        UserCodeFailed: the file is not valid Python.
        InvalidSetting: a setting has a key that neither a job nor this file has (if the file shows
            all of its settings), it has no key or no value, or its value is no whole number where
            only one fits.
    """
    tree, modules = look_at_settings(path, settings)
    values = dict(map(setting_pair, settings))
    _check_init_from(values)
    for what, call in _sources(tree) if modules is not None else ():
        if what not in values:
            _check_file(what, call, modules or ())


def look_at_settings(
    path: Path, settings: Sequence[str]
) -> tuple[ast.Module, list[ast.Module] | None]:
    """Checks settings as :func:`first_look` does, and no data, which may lie on other machines.
    Returns the parsed file, and with it the modules of the user's that it imports; None in place of
    these if only running them can show their settings."""
    tree = _parsed(path, read_job_file(path))
    keys = {setting: setting_pair(setting)[0] for setting in settings}
    modules = _modules(path, tree)
    if modules is None:
        return tree, None
    own = frozenset[str]().union(*(literal_settings(module) or () for module in modules))
    for setting, key in keys.items():
        if key in CODE:
            raise InvalidSetting(f"--set {setting}: {key} is code; change it in the job file")
        if key not in own and key not in FIELDS and not key.startswith(OPTIMIZER):
            raise unknown_key(setting, key, [*sorted(own), *FIELDS, f"{OPTIMIZER}learning_rate"])
        if key in WHOLE_NUMBERS - own:
            _check_whole(setting)
    return tree, modules


def said_of_job(tree: ast.Module) -> dict[str, object] | None:
    """Returns the arguments of ``job = Job(...)`` by name, ``...`` for those that are no literals;
    None if the file makes its job in another way."""
    call = _assigned(tree).get("job")
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    ours = any(each.module == "pserver" and "Job" in _imported_names(each) for each in imports)
    makers = {"pserver.Job", *(["Job"] if ours else [])}
    if not isinstance(call, ast.Call) or ast.unparse(call.func) not in makers:
        return None
    said: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        said[keyword.arg] = ...
        with suppress(ValueError, TypeError):
            said[keyword.arg] = ast.literal_eval(keyword.value)
    return said


def may_have_tables(modules: Sequence[ast.Module] | None) -> bool:
    """Whether a model of ``modules``, see :func:`look_at_settings`, may have embedding tables:
    they name a layer of that kind, or read a model from elsewhere."""
    for module in modules or ():
        names = _names(module) | {name for n in ast.walk(module) for name in _imported_names(n)}
        if names & _OF_TABLES:
            return True
    return modules is None


def setting_pair(setting: str) -> tuple[str, str]:
    """Splits ``key=value``. Raises InvalidSetting."""
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise InvalidSetting(
            f"--set {setting}: expected key=value, for example epochs=3", code="PS104"
        )
    return key.strip(), value.strip()


def _check_whole(setting: str) -> None:
    text = setting_pair(setting)[1]
    try:
        int(text)
    except ValueError:
        raise InvalidSetting(
            f"--set {setting}: {text!r} cannot be read; expected a whole number"
        ) from None


def _parsed(path: Path, source: bytes) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(source, str(path.absolute()))
    except (SyntaxError, ValueError) as error:
        raise UserCodeFailed(
            f"job file {path} raised {type(error).__name__}: {error}",
            "".join(traceback.format_exception(type(error), error, None)),
        ) from None


def _check_init_from(values: dict[str, str]) -> None:
    value = values.get("init_from", "")
    if value and value.lower() != "none" and "://" not in value and not Path(value).exists():
        raise InvalidJob(
            f"init_from is {value!r}; there is no such file or checkpoint in {Path.cwd()}"
        )


# -- what the file asks for ------------------------------------------------------------------------


def _modules(path: Path, tree: ast.Module) -> list[ast.Module] | None:
    """Parses the file and the user's modules that it imports. Returns None if only running them can
    show their settings and effects."""
    found: list[ast.Module] = []
    folders = (path.absolute().parent, Path.cwd())
    todo, seen = [tree], {path.absolute()}
    while todo:
        module = todo.pop()
        if literal_settings(module) is None or any(_names(module) & _OPAQUE):
            return None
        found.append(module)
        for name in _imported(module):
            files = _local(name, folders)
            if files is None and name not in _LIBRARIES:
                return None
            new = set(files or ()) - seen
            seen |= new
            if len(seen) > MOST_MODULES:
                return None
            try:
                todo += [ast.parse(file.read_bytes()) for file in new]
            except (OSError, SyntaxError, ValueError):
                return None
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the top-level names of all modules that the file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def _local(name: str, folders: Sequence[Path]) -> list[Path] | None:
    """Returns the files of a module of the user's own; None for other modules."""
    for folder in folders:
        if (folder / f"{name}.py").is_file():
            return [folder / f"{name}.py"]
        if (folder / name).is_dir() and name not in _LIBRARIES:
            return sorted((folder / name).rglob("*.py"))
    return None


def _imported_names(node: ast.AST) -> set[str]:
    """Returns the names that an import brings; those of tables also where it renames them."""
    names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else ()
    return {alias.name for alias in names if alias.asname is None or alias.name in _OF_TABLES}


def _names(tree: ast.Module) -> set[str]:
    """Returns all names and attributes that the file uses."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }


# -- data files ------------------------------------------------------------------------------------


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the values of the names that the file assigns once: for others, the value is known
    only by running it."""
    stored = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and stored[target.id] == 1
    }


def _sources(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yields ``train`` and ``eval`` of ``job = Job(...)`` with the calls that make them."""
    assigned = _assigned(tree)
    job = assigned.get("job")
    for keyword in job.keywords if isinstance(job, ast.Call) else ():
        value: ast.expr | None = keyword.value
        if isinstance(value, ast.Name):
            value = assigned.get(value.id)
        if keyword.arg in ("train", "eval") and isinstance(value, ast.Call):
            yield keyword.arg, value


def _check_file(what: str, call: ast.Call, modules: Sequence[ast.Module]) -> None:
    """Raises InvalidData if the call names a missing data file. Raises nothing if the name, perhaps
    without suffix, also occurs elsewhere, since that code may create the file."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name not in _FILES:
        return
    by_name = (keyword.value for keyword in call.keywords if keyword.arg == _FILES[name])
    file = next(by_name, call.args[0] if call.args else None)
    if not isinstance(file, ast.Constant) or not isinstance(file.value, str):
        return
    nodes = (node for module in modules for node in ast.walk(module))
    texts = (getattr(node, "value", None) for node in nodes if isinstance(node, ast.Constant))
    alone = sum(Path(file.value).stem in text for text in texts if isinstance(text, str)) == 1
    if alone and "://" not in file.value and not Path(file.value).exists():
        raise InvalidData(f"{what}: {name}: there is no file {file.value!r}")
