"""The names of a model's outputs, the keys of losses, weights, metrics and labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from psrpc.core.errors import InvalidJob
from psrpc.options.config_keys import did_you_mean
from worker.job.job import Job


def check_output_names(job: Job, model: Any, outputs: Any, own: Collection[str]) -> None:
    """Checks the job's loss, loss_weights and metrics against the outputs.

    Refuses keys that are no outputs, lists of another length than the outputs, and weights by
    output for losses that are not: Keras would match those by their order.

    Args:
        model: a ``keras.Model``.
        outputs: the outputs of a call of the model, or symbolic ones.
        own: the fields that the job gives; the others come from ``compile``.

    Raises:
        InvalidJob: names the field, the key and the outputs.
    """

    def place(field: str) -> str:
        return f"{field} in {'the job' if field in own else 'compile() of the model'} has"

    names = _names(model, outputs)
    if isinstance(job.loss, Mapping) and names is None and hasattr(outputs, "shape"):
        raise InvalidJob(
            f"{place('loss')} the keys {as_list(job.loss)}, but the model has one output, which"
            " has no name; give the loss itself, in place of a dict"
        )
    for field in ("loss", "loss_weights", "metrics"):
        _check(place(field), getattr(job, field), names)
    several = _several(model, outputs)
    for field in ("loss", "metrics"):
        given = getattr(job, field)
        if several and isinstance(given, list | tuple) and len(given) not in (0, len(several)):
            of_each = "[...]" if field == "metrics" else "..."
            raise InvalidJob(
                f"{place(field).removesuffix(' has')} is {list(given)}, but "
                f"{_counted(several)}; say which are of which: {field}={_form(several, of_each)}"
            )
    weights = job.loss_weights
    if not isinstance(weights, Mapping) or (names is not None and len(names) == 1):
        return
    if not isinstance(job.loss, Mapping):
        raise InvalidJob(
            f"{place('loss_weights')} the keys {as_list(weights)}, but loss is not given by"
            " output; give a dict of losses with the same keys"
        )
    for key in weights:
        if key not in job.loss:
            raise InvalidJob(
                f"{place('loss_weights')} the key {key!r}, for which there is no loss; loss has "
                f"{as_list(job.loss)}"
            )


def check_label_names(job: Job, model: Any, outputs: Any, labels: Any) -> None:
    """Refuses labels under keys that are no outputs, losses of outputs without labels, and one
    array for several outputs, whose rows Keras would take. The job's loss may leave out outputs.

    Args:
        model: as in :func:`check_output_names`.
        outputs: as in :func:`check_output_names`.
        labels: the labels of a few records.

    Raises:
        InvalidJob: names the key and the outputs.
    """
    names = _names(model, outputs)
    _check("the labels have", labels, names)
    several = _several(model, outputs)
    if several and not isinstance(labels, Mapping):
        _check_number(job, labels, several)
    if several is None and hasattr(outputs, "shape") and isinstance(labels, Mapping | list | tuple):
        _check_alone(job, labels)
    if not isinstance(labels, Mapping) or not isinstance(outputs, Mapping):
        return
    losses = job.loss if isinstance(job.loss, Mapping) else dict.fromkeys(outputs, job.loss)
    for key, loss in losses.items():
        if loss is not None and key not in labels:
            raise InvalidJob(
                f"there are no labels for the output {key!r}; their keys are {as_list(labels)}"
            )


def _check_number(job: Job, labels: Any, outputs: list[Any]) -> None:
    """Refuses labels with another number of arrays than there are outputs, or losses."""
    trained = len(outputs)
    if isinstance(job.loss, Mapping | list | tuple):
        losses = job.loss.values() if isinstance(job.loss, Mapping) else job.loss
        trained = sum(loss is not None for loss in losses)
    arrays = len(labels) if isinstance(labels, list | tuple) else None
    if arrays is None or arrays not in (len(outputs), trained):
        given = (
            f"one array of shape {shown_shape(labels.shape[1:])}"
            if arrays is None
            else f"{arrays} arrays"
        )
        raise InvalidJob(
            f"the labels are {given}, but {_counted(outputs)}; give one array for each: "
            f"y={_form(outputs)}"
        )


def _check_alone(job: Job, labels: Any) -> None:
    """Refuses nested labels for the loss of one array."""
    # Keras takes one array in a list if the losses are in a list.
    listed_losses = isinstance(job.loss, Mapping | list | tuple) and not isinstance(labels, Mapping)
    if listed_losses or not _takes_arrays(job.loss):
        return
    keys = f"a dict with the keys {as_list(labels)}"
    given = keys if isinstance(labels, Mapping) else f"{len(labels)} arrays in a list"
    raise InvalidJob(f"the labels are {given}, but the model has one output; give one array as y")


def _takes_arrays(loss: Any) -> bool:
    """Whether a loss takes only plain arrays; one of a user's class may take a nest."""
    # Keras, not imported here, makes a Loss of a function or a name.
    return not hasattr(loss, "reduction") or type(loss).__module__.startswith("keras.")


def check_weight_names(job: Job, model: Any, outputs: Any, weights: Any) -> None:
    """Refuses sample weights under keys that are no outputs, missing weights of an output with a
    loss, and lists of another length. One array is for the losses of all outputs.

    Args:
        model: as in :func:`check_output_names`.
        outputs: as in :func:`check_output_names`.
        weights: the sample weights of a few records.

    Raises:
        InvalidJob: names the key and the outputs.
    """
    several = _several(model, outputs)
    if several is None:
        if hasattr(outputs, "shape") and isinstance(weights, Mapping | list | tuple):
            keys = f"a dict with the keys {as_list(weights)}"
            given = keys if isinstance(weights, Mapping) else f"{len(weights)} arrays in a list"
            raise InvalidJob(
                f"the sample weights are {given}, but the model has one output; give one array as "
                "sample_weight"
            )
        return
    _check("the sample weights have", weights, several)
    if isinstance(weights, list | tuple) and len(weights) != len(several):
        raise InvalidJob(
            f"the sample weights are {len(weights)} arrays, but {_counted(several)}; give one "
            f"array for all, or one for each: sample_weight={_form(several)}"
        )
    losses = by_output(model, outputs, job.loss)
    for key in several if isinstance(weights, Mapping) else ():
        if losses.get(key) is not None and key not in weights:
            raise InvalidJob(
                f"there are no sample weights for the output {key!r}; their keys are "
                f"{as_list(weights)}; give it ones"
            )


def weights_as_outputs(model: Any, outputs: Any, weights: Any) -> Any:
    """Returns sample weights in the form of the outputs, dict or list, as Keras requires."""
    if isinstance(outputs, Mapping) and isinstance(weights, list | tuple):
        return by_output(model, outputs, weights)
    if isinstance(outputs, list | tuple) and isinstance(weights, Mapping):
        return [weights.get(name) for name in _several(model, outputs) or ()]
    return weights


def by_output(model: Any, outputs: Any, given: Any) -> dict[Any, Any]:
    """Returns the values ``given`` for several outputs by output name. They are a dict, or a list
    in output order; for outputs in a dict, Keras uses the order of the sorted names. Empty if the
    number differs, or for one output."""
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


def _several(model: Any, outputs: Any) -> list[Any] | None:
    """Returns the names of several outputs, or their numbers; None for one output, or nested
    nests."""
    if not isinstance(outputs, Mapping | list | tuple) or len(outputs) < 2:
        return None
    each = outputs.values() if isinstance(outputs, Mapping) else outputs
    if not all(hasattr(one, "shape") for one in each):
        return None
    names = _names(model, outputs) or []
    return names if len(names) == len(outputs) else list(range(len(outputs)))


def _counted(outputs: list[Any]) -> str:
    """Returns ``the model has 2 outputs, 'a', 'b'``."""
    named = f", {as_list(outputs)}" if isinstance(outputs[0], str) else ""
    return f"the model has {len(outputs)} outputs{named}"


def _form(outputs: list[Any], of_each: str = "...") -> str:
    """Returns the notation of values for several outputs: ``{'a': ..., 'b': ...}``."""
    if not isinstance(outputs[0], str):
        return f"({', '.join([of_each] * len(outputs))})"
    return f"{{{', '.join(f'{name!r}: {of_each}' for name in outputs)}}}"


def shown_shape(shape: Iterable[int | None]) -> str:
    """Formats the shape of records, ``[n, 8]``, from that of one record."""
    return f"[{', '.join(['n', *('any' if each is None else str(each) for each in shape)])}]"


def _names(model: Any, outputs: Any) -> list[Any] | None:
    """Returns the names of outputs; None if they have none."""
    names = outputs if isinstance(outputs, Mapping) else getattr(model, "output_names", None)
    return list(names) if names else None


def _check(place: str, given: Any, names: list[Any] | None) -> None:
    if names is None or not isinstance(given, Mapping):
        return
    for key in given:
        if key not in names:
            outputs = "output is" if len(names) == 1 else "outputs are"
            raise InvalidJob(
                f"{place} the key {key!r}, but the model's {outputs} {as_list(names)}"
                f"{did_you_mean(str(key), list(map(str, names)))}"
            )


def as_list(names: Iterable[Any]) -> str:
    """Returns ``'a', 'b'``."""
    return ", ".join(map(repr, names))
