"""Classes and functions of the caller's program in a Keras model."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import keras

from psrpc.core.errors import InvalidJob

_LIBRARIES = ("builtins", "h5py", "numpy", "tensorflow", "threading", "weakref")
"""Packages whose objects hold none of the caller's."""

_WRAPPED = ("build", "quantize")
"""Methods of a class that Keras wraps in each of its layers."""


def user_objects(*roots: Any) -> tuple[list[type], list[FunctionType]]:
    """Returns the classes of Keras objects, and the functions, that ``roots`` refer to, directly or
    not, and that are not Keras's own."""
    classes: dict[type, None] = {}
    functions: dict[FunctionType, None] = {}
    seen: dict[int, Any] = {}  # Keeps the objects alive, so that no other gets their ids.
    waiting = list(reversed(roots))
    while waiting:
        each = waiting.pop()
        if each is None or isinstance(each, str | bytes | int | float) or id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, FunctionType):
            if not _is_kerass(each.__module__):
                functions[each] = None
        elif isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, Sequence | Set):
            waiting.extend(each)
        elif not _of(type(each).__module__, _LIBRARIES) and not isinstance(each, type):
            if hasattr(each, "get_config") and not _is_kerass(type(each).__module__):
                classes[type(each)] = None
            own = getattr(each, "__dict__", {})
            waiting.extend(value for name, value in own.items() if name not in _WRAPPED)
    return list(classes), list(functions)


def check_functions(model: keras.Model, functions: Sequence[FunctionType]) -> None:
    """Refuses functions that use layers or weights of the model through a global or captured
    variable: in another process they would use a copy, which is not trained.

    Raises:
        InvalidJob: names the function and the variable.
    """
    parts = {id(each) for each in (*model._flatten_layers(), *model.variables)}
    for function in functions:
        for name, value in _outer_variables(function):
            if id(value) in parts:
                raise InvalidJob(
                    f"function {function.__name__}() uses {name!r}, which is the model or a part "
                    "of it; write a loss that needs it in compute_loss() of a class of the model's "
                    "own, or add_loss() in a layer",
                    code="PS108",
                )


def _outer_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    # inspect.getclosurevars takes the names of attributes for global variables.
    for each in dis.get_instructions(function):
        if each.opname == "LOAD_GLOBAL" and each.argval in function.__globals__:
            yield each.argval, function.__globals__[each.argval]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


@contextmanager
def named_apart(
    classes: Sequence[type], functions: Sequence[FunctionType]
) -> Iterator[dict[str, Any]]:
    """Yields the objects by the names under which Keras writes them within the block. There each
    function has a unique name: Keras would write a lambda as bytecode without its module, and could
    not distinguish two functions of one name, or a function from a built-in of its name.

    Raises:
        InvalidJob: two classes have the same name.
    """
    names = [function.__name__ for function in functions]
    try:
        for number, function in enumerate(functions):
            function.__name__ = f"function_{number}_of_fit"
        found: dict[str, Any] = {}
        for each in (*classes, *functions):
            name = keras.saving.get_registered_name(each)
            if name in found:
                raise InvalidJob(
                    f"the model uses two classes named {name!r}, of {found[name].__module__} and "
                    f"{each.__module__}; give one of them another name",
                    code="PS108",
                )
            found[name] = each
        yield found
    finally:
        for function, name in zip(functions, names, strict=True):
            function.__name__ = name


def _is_kerass(module: str | None) -> bool:
    return _of(module, ("keras",))


def _of(module: str | None, packages: Sequence[str]) -> bool:
    return (module or "").partition(".")[0] in packages
