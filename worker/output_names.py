"""The names of a model's outputs, by which jobs give losses, weights, metrics and labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from psrpc.config_keys import did_you_mean
from psrpc.errors import InvalidJob
from worker.job import Job


def check_output_names(job: Job, model: Any, outputs: Any, own: Collection[str]) -> None:
    """Refuses keys of the job's loss, loss_weights and metrics that are no outputs, and weights by
    output for losses that are not: Keras would take them in the order in which they stand.

    Args:
        model: a ``keras.Model``.
        outputs: of a call of it, or symbolic.
        own: the fields that the job gives; the others are those of ``compile``.

    Raises:
        InvalidJob: names the field, the key and the outputs.
    """

    def said(field: str) -> str:
        return f"{field} in {'the job' if field in own else 'compile() of the model'} has"

    names = _names(model, outputs)
    if isinstance(job.loss, Mapping) and names is None and hasattr(outputs, "shape"):
        raise InvalidJob(
            f"{said('loss')} the keys {listed(job.loss)}, but the model has one output, which has "
            "no name; give the loss itself, in place of a dict"
        )
    for field in ("loss", "loss_weights", "metrics"):
        _check(said(field), getattr(job, field), names)
    weights = job.loss_weights
    if not isinstance(weights, Mapping) or (names is not None and len(names) == 1):
        return
    if not isinstance(job.loss, Mapping):
        raise InvalidJob(
            f"{said('loss_weights')} the keys {listed(weights)}, but loss is not given by output; "
            "give a dict of losses with the same keys"
        )
    for key in weights:
        if key not in job.loss:
            raise InvalidJob(
                f"{said('loss_weights')} the key {key!r}, for which there is no loss; loss has "
                f"{listed(job.loss)}"
            )


def check_label_names(job: Job, model: Any, outputs: Any, labels: Any) -> None:
    """Refuses labels under keys that are no outputs, and losses of outputs without labels.

    Args:
        job: whose loss may leave out outputs.
        model: as in :func:`check_output_names`.
        outputs: the same.
        labels: of a few records.

    Raises:
        InvalidJob: names the key and the outputs.
    """
    names = _names(model, outputs)
    _check("the labels have", labels, names)
    if not isinstance(labels, Mapping) or not isinstance(outputs, Mapping):
        return
    losses = job.loss if isinstance(job.loss, Mapping) else dict.fromkeys(outputs, job.loss)
    for key, loss in losses.items():
        if loss is not None and key not in labels:
            raise InvalidJob(
                f"there are no labels for the output {key!r}; their keys are {listed(labels)}"
            )


def by_output(model: Any, outputs: Any, given: Any) -> dict[Any, Any]:
    """What is ``given`` to several outputs, by their names: a dict, or a list in their order, which
    of outputs in a dict is that of the sorted names, as Keras takes it. Empty where that does not
    fit, or there is one output."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(outputs, Mapping):
        names = sorted(outputs)
    elif isinstance(outputs, list | tuple):
        names = _names(model, outputs) or list(range(len(outputs)))
    else:
        return {}
    if not isinstance(given, list | tuple):
        return dict.fromkeys(names, given)
    return dict(zip(names, given, strict=True)) if len(names) == len(given) else {}


def _names(model: Any, outputs: Any) -> list[Any] | None:
    """None where outputs have no names."""
    names = outputs if isinstance(outputs, Mapping) else getattr(model, "output_names", None)
    return list(names) if names else None


def _check(said: str, given: Any, names: list[Any] | None) -> None:
    if names is None or not isinstance(given, Mapping):
        return
    for key in given:
        if key not in names:
            outputs = "output is" if len(names) == 1 else "outputs are"
            raise InvalidJob(
                f"{said} the key {key!r}, but the model's {outputs} {listed(names)}"
                f"{did_you_mean(str(key), list(map(str, names)))}"
            )


def listed(names: Iterable[Any]) -> str:
    """``'a', 'b'``."""
    return ", ".join(map(repr, names))
