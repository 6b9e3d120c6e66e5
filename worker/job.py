"""What a user writes: ``job = Job(...)`` in a Python file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from psrpc.batch import batches_per_epoch
from psrpc.errors import InvalidJob
from psrpc.policy import MODES, Mode, Policy, fitting
from worker.data import DataSource
from worker.keep_best import parse_keep_best

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Engine = Literal["keras", "numpy"]
WireDtype = Literal["float32", "bfloat16", "float16"]
Compression = Literal["topk", "int8"]

ModelFactory: TypeAlias = "Callable[[], keras.Model | tf.Module]"
Loss: TypeAlias = "str | keras.losses.Loss | Callable[..., Any]"
Metric: TypeAlias = "str | keras.metrics.Metric | Callable[..., Any]"
Optimizer: TypeAlias = "str | keras.optimizers.Optimizer | Callable[..., Any]"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. ``--set field=value`` overrides any field that is not code or data, and
    ``--set optimizer.argument=value`` an argument of the optimizer.

    Attributes:
        model: makes the model: a Keras model, or a plain ``tf.Module``. Called once per process,
            after all random seeds have been set from ``seed``.
        loss: for a Keras model a Keras loss or its name, or ``f(y_true, y_pred)`` that returns one
            value per example or their mean; losses that layers add (regularizers) are added to it.
            For a ``tf.Module`` a function ``f(module, x, y)`` that returns the mean loss over the
            batch, a scalar; ``f(module, x, y, sample_weight)`` when the data has weights.
        optimizer: a built-in Keras optimizer, its name, a function without arguments that makes
            one, or a function of ``total_updates``, the number of updates of the whole job, so
            that a learning-rate schedule ends with the job in every mode. With ``use_ema`` all
            evaluations, the final one too, see the parameters as they are trained; an export
            takes the averages, as Keras does when ``fit`` ends.
        train: the training data, see ``worker.data``.
        eval: the data that each epoch is evaluated on, or None.
        metrics: what to report beside the loss: names of Keras metrics, metrics, functions that
            make one, or functions ``f(y_true, y_pred)``. Keras models only.
        batch_size: examples of one micro-batch: what a worker computes one gradient on.
        epochs: passes over the training data.
        mode: ``async`` applies every gradient as it comes; ``sync`` applies the mean of
            ``replicas`` micro-batches at a time. ``--mode`` overrides it.
        replicas: K, the micro-batches of one synchronous round. Needed in ``sync`` mode, here or
            with ``--replicas``. The result depends on it and not on how many workers there are.
        seed: of the initial values, the order of records and dropout masks.
        init_from: start from these values: a Keras file (``.keras``, ``.weights.h5``) or the
            directory of an earlier checkpoint. Relative to the working directory.
        engine: who updates the parameters: ``keras`` runs any built-in Keras optimizer,
            ``numpy`` SGD, momentum, Adagrad and Adam, and needs no TensorFlow on the shards.
        checkpoint_every: global steps from one checkpoint to the next.
        keep_checkpoints: how many of the newest checkpoints stay; older ones are removed.
        keep_best: keep the checkpoint that an evaluation found best as well: ``"max:accuracy"``,
            ``"min:loss"``, or the bare name of a result that has accuracy, auc, precision or recall
            in it (more is better), or loss, error or crossentropy (less is). With it the state
            that each epoch is evaluated on is written as a checkpoint.
        intra_op_threads: threads of one TensorFlow operation in a worker. Gradients are the same
            bits only where this is pinned; None leaves it to TensorFlow.
        wire_dtype: what float32 parameters and their gradients are rounded to on their way between
            worker and shard: half the bytes. ``float16`` is finer than ``bfloat16``, but what is
            beyond its range, 65504, becomes that, and what is below 6e-8 becomes 0. Shards update,
            evaluate, checkpoint and export float32 all the same; float64 variables and state
            (BatchNormalization statistics) are never rounded.
        compression: of the gradients of float32 variables, instead of rounding them: ``int8`` is a
            quarter of the bytes, ``topk`` sends the fraction ``topk`` of the elements, those of
            largest magnitude. What is left out is kept by the worker and added to its next
            gradient. It is lost when the worker dies or joins anew, so with compression the
            results depend, in sync mode too, on which worker computes what.
        topk: the fraction of elements that ``compression="topk"`` sends of each shard's part, at
            most one half; at least one element.

    Raises:
        InvalidJob: a field holds what it cannot; the message names it, the value and the fix.
    """

    model: ModelFactory
    loss: Loss
    optimizer: Optimizer
    train: DataSource
    eval: DataSource | None = None
    metrics: Sequence[Metric] = ()
    batch_size: int
    epochs: int = 1
    mode: Mode = "async"
    replicas: int | None = None
    seed: int = 0
    init_from: str | Path | None = None
    engine: Engine = "keras"
    checkpoint_every: int = 1000
    keep_checkpoints: int = 5
    keep_best: str | None = None
    intra_op_threads: int | None = None
    wire_dtype: WireDtype = "float32"
    compression: Compression | None = None
    topk: float = 0.01

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "checkpoint_every", "keep_checkpoints"):
            _check_integer(name, getattr(self, name), 1)
        _check_integer("seed", self.seed, 0)
        for name in ("replicas", "intra_op_threads"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1)
        _check_choice("mode", self.mode, MODES)
        _check_choice("engine", self.engine, ("keras", "numpy"))
        _check_choice("wire_dtype", self.wire_dtype, ("float32", "bfloat16", "float16"))
        _check_choice("compression", self.compression, ("topk", "int8", None))
        _check_fraction("topk", self.topk, 0.5)
        if not callable(self.model):
            raise InvalidJob(
                f"model is {_show(self.model)}; expected a function without arguments that makes "
                "the model"
            )
        # A class is callable too, but means a loss that somebody forgot to make.
        if isinstance(self.loss, type) or not (isinstance(self.loss, str) or callable(self.loss)):
            raise InvalidJob(
                f"loss is {_show(self.loss)}; expected a Keras loss, its name or a function"
            )
        if not (
            isinstance(self.optimizer, str)
            or callable(self.optimizer)
            or hasattr(self.optimizer, "get_config")
        ):
            raise InvalidJob(
                f"optimizer is {_show(self.optimizer)}; expected a Keras optimizer, its name or a "
                "function that makes one"
            )
        if isinstance(self.metrics, str) or not isinstance(self.metrics, Sequence):
            raise InvalidJob(f"metrics is {_show(self.metrics)}; expected a list")
        for metric in self.metrics:
            if not isinstance(metric, str) and not callable(metric):
                raise InvalidJob(
                    f"metrics contains {_show(metric)}; expected names of Keras metrics, metrics "
                    "or functions that make one"
                )
        if self.keep_best is not None:
            parse_keep_best(self.keep_best)
            if self.eval is None:
                raise InvalidJob(
                    f"keep_best is {self.keep_best!r}, but eval is None; nothing is evaluated"
                )
        _check_source("train", self.train)
        if self.eval is not None:
            _check_source("eval", self.eval)
        if self.init_from is not None and not isinstance(self.init_from, str | Path):
            raise InvalidJob(f"init_from is {_show(self.init_from)}; expected a path")

    def policy(self) -> Policy:
        """What the job begins with.

        Raises:
            InvalidJob: settings that do not fit the mode, or each other.
        """
        # A job may say for which rounds it is made, and be run without any.
        settings = {"replicas": self.replicas}
        return Policy(mode=self.mode, **fitting(self.mode, settings))

    def total_updates(self) -> int:
        """Updates that every shard applies over the whole job: ``epochs * ceil(N / batch_size)``
        in async mode; in sync mode ``epochs * ceil(ceil(N / batch_size) / replicas)``, since a
        round never crosses an epoch. Reads the size of the training data."""
        updates = batches_per_epoch(self.train.num_records, self.batch_size)
        if self.mode == "sync":
            assert self.replicas is not None  # worker.describe has refused it
            updates = -(-updates // self.replicas)
        return self.epochs * updates


def _show(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _check_integer(name: str, value: object, least: int) -> None:
    # bool is an int to Python, and True records a batch to nobody.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidJob(f"{name} is {_show(value)}; expected a whole number of at least {least}")


def _check_fraction(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise InvalidJob(f"{name} is {_show(value)}; expected a number above 0 and at most {most}")


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise InvalidJob(f"{name} is {_show(value)}; expected {' or '.join(map(str, choices))}")


def _check_source(name: str, value: object) -> None:
    # A look at the class: isinstance on the protocol would read num_records, that is, the file.
    if isinstance(value, type) or not all(
        hasattr(type(value), part)
        for part in ("num_records", "read", "read_range", "fingerprint", "close")
    ):
        raise InvalidJob(
            f"{name} is {_show(value)}; expected a data source: Arrays, Npz, TfRecords, Csv or "
            "Function"
        )
