"""Names of Keras's losses, metrics and optimizers, and suggestions for misspelt ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import keras
from keras.src import losses, metrics, optimizers

from psrpc.core.errors import InvalidJob
from worker.job.job import Job
from worker.job.loader import user_code

Kind = Literal["loss", "metric", "optimizer"]

BY_SHAPES = {"loss": ("crossentropy", "ce"), "metric": ("accuracy", "acc")}
"""Names whose meaning depends on the shapes of labels and outputs, as in ``compile``."""

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
    *("loss", "metric", "mean", "mean_metric_wrapper", "sum"),
    *("optimizer", "optimizermap", "lossscaleoptimizer", "multioptimizer"),
}


def get(kind: Kind, name: str) -> Any:
    """Returns the Keras object of a name.

    Raises:
        InvalidJob: Keras has no such name (suggests the nearest), or the object needs arguments.
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


def check_class(kind: Kind, given: Any) -> None:
    """Refuses a class in place of an object if it needs arguments; Keras instantiates others.

    Raises:
        InvalidJob: names the class and the arguments.
    """
    if not isinstance(given, type):
        return
    needed = [
        parameter.name
        for parameter in inspect.signature(given).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        field = "metrics contains" if kind == "metric" else f"{kind} is"
        raise InvalidJob(
            f"{field} the class {given.__name__}, which needs arguments ({', '.join(needed)}); "
            f"give {given.__name__}({needed[0]}=...) instead"
        )


def made_losses(losses: Any) -> Any:
    """Returns a loss, or a nest of them, with classes instantiated as ``compile`` does.

    Raises:
        InvalidJob: as :func:`check_class`.
        UserCodeFailed: a class of the job raised.
    """

    def made(loss: Any) -> Any:
        if not isinstance(loss, type):
            return loss
        check_class("loss", loss)
        with user_code(f"loss {loss.__name__}()"):
            return loss()

    if not any(isinstance(loss, type) for loss in keras.tree.flatten(losses)):
        return losses
    return keras.tree.map_structure(made, losses)


def check_names(job: Job) -> None:
    """Refuses unknown names of losses and metrics, also by output, and metric classes that Keras
    cannot instantiate.

    Raises:
        InvalidJob: as :func:`get` and :func:`check_class`.
    """
    for metric in keras.tree.flatten(job.metrics):
        check_class("metric", metric)
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
    parts = nest if isinstance(nest, list | tuple) else ()
    return [name for part in parts for name in _texts(part)]


def _nearest(kind: Kind, name: str) -> str:
    known = sorted(_all_names(kind))
    word = _as_keras_writes(name)
    # difflib finds adma nearer to adamax than to adam.
    close = [each for each in known if sorted(each) == sorted(word)]
    # difflib does not relate rmse to root_mean_squared_error.
    close += [each for each in known if "_" in each and _initials(each) == word]
    close += _by_words(word, known)
    others = [other for other in _TABLES if other != kind and word in _all_names(other)]
    if others and not close:
        return f"it is the name of {'an' if others[0][0] in 'aeiou' else 'a'} {others[0]}"
    close += get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _as_keras_writes(name: str) -> str:
    """Turns ``SparseCrossEntropy-Loss`` into ``sparse_crossentropy``."""
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")
    word = word.replace("cross_entropy", "crossentropy")
    return word.removesuffix("loss").rstrip("_") or word


def _by_words(word: str, known: Sequence[str]) -> list[str]:
    """Returns names that differ by underscores or a number at the end, then names with all words,
    fewest extra words first, then names with only those words, most words first."""
    exact = [each for each in known if each.replace("_", "") == word.replace("_", "")]
    exact += [each for each in known if each == word.rstrip("0123456789")]
    words = word.split("_")
    more = [each for each in known if all(_among(part, each.split("_")) for part in words)]
    less = [each for each in known if set(each.split("_")) <= set(words)]
    return [*exact, *sorted(more, key=_count), *sorted(less, key=_count, reverse=True)]


def _among(word: str, parts: Sequence[str]) -> bool:
    """Whether ``word`` is one of the parts, or the beginning of one: acc of accuracy."""
    return word in parts or (len(word) > 2 and any(part.startswith(word) for part in parts))


def _count(name: str) -> int:
    return len(name.split("_"))


def _all_names(kind: str) -> set[str]:
    names = {name for name in _TABLES[kind] if isinstance(name, str) and name.islower()}
    return {*(names - _NOT_BY_NAME), *BY_SHAPES.get(kind, ())}


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))
