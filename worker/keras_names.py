"""Names of Keras's losses, metrics and optimizers, and the nearest to one that is misspelt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

import keras
from keras.src import losses, metrics, optimizers

from psrpc.errors import InvalidJob
from worker.job import Job

Kind = Literal["loss", "metric", "optimizer"]

BY_SHAPES = {"loss": ("crossentropy", "ce"), "metric": ("accuracy", "acc")}
"""Names that mean one of several by the shapes of labels and outputs, as ``compile`` takes them."""

_GET: dict[str, Callable[[str], Any]] = {
    "loss": keras.losses.get,
    "metric": keras.metrics.get,
    "optimizer": keras.optimizers.get,
}
_MODULES = {"loss": "keras.losses", "metric": "keras.metrics", "optimizer": "keras.optimizers"}
# No public function lists the names that get() takes.
_TABLES: dict[str, Mapping[Any, Any]] = {
    "loss": losses.ALL_OBJECTS_DICT,
    "metric": metrics.ALL_OBJECTS_DICT,
    "optimizer": optimizers.ALL_OBJECTS_DICT,
}
_NOT_BY_NAME = {
    *("loss", "metric", "mean_metric_wrapper"),
    *("optimizer", "optimizermap", "lossscaleoptimizer", "multioptimizer"),
}


def get(kind: Kind, name: str) -> Any:
    """The Keras object of a name.

    Raises:
        InvalidJob: Keras has none, with the nearest name that it has; or it needs arguments.
    """
    field = "metrics contains" if kind == "metric" else f"{kind} is"
    module = _MODULES[kind]
    try:
        return _GET[kind](name)
    except ValueError:
        hint = _nearest(kind, name) or f"see {module} for those that it has"
        raise InvalidJob(f"{field} {name!r}; Keras has no {kind} of that name; {hint}") from None
    except (TypeError, KeyError) as error:
        made = getattr(_TABLES[kind].get(name), "__name__", name)
        raise InvalidJob(
            f"{field} {name!r}, which needs arguments ({error}); give {module}.{made}(...) instead"
        ) from None


def check_names(job: Job) -> None:
    """Refuses names of losses and metrics that Keras does not have, those by output too.

    Raises:
        InvalidJob: as :func:`get` does.
    """
    fields: tuple[tuple[Kind, Any], ...] = (("loss", job.loss), ("metric", job.metrics))
    for kind, nest in fields:
        for name in _texts(nest):
            if name.lower() not in BY_SHAPES[kind]:
                get(kind, name)


def _texts(nest: Any) -> list[str]:
    if isinstance(nest, str):
        return [nest]
    if isinstance(nest, Mapping):
        nest = list(nest.values())
    return (
        [name for part in nest for name in _texts(part)] if isinstance(nest, list | tuple) else []
    )


def _nearest(kind: Kind, name: str) -> str:
    known = sorted({*_names(kind), *BY_SHAPES.get(kind, ())})
    word = name.lower().replace("-", "_").replace(" ", "_")
    # adma is nearer to adamax by the letters in common than to adam.
    close = [each for each in known if sorted(each) == sorted(word)]
    # rmse is as far from root_mean_squared_error as from anything.
    close += [each for each in known if "_" in each and _initials(each) == word]
    close += get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    others = [other for other in _TABLES if other != kind and word in _names(other)]
    return (
        f"it is the name of {'an' if others[0][0] in 'aeiou' else 'a'} {others[0]}"
        if others
        else ""
    )


def _names(kind: str) -> set[str]:
    names = {name for name in _TABLES[kind] if isinstance(name, str) and name.islower()}
    return names - _NOT_BY_NAME


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))
