"""Prepares a call of ``fit``: writes the files that its job reads, and plans its epochs and
callbacks."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from psrpc.core.batch import batches_per_epoch
from psrpc.core.errors import InvalidArgument
from worker.embedding.model_tables import leave_tables
from worker.fit.hooks import PARTS, check_saves_tables, earliest_epoch, has_batch_hooks
from worker.fit.schedule import FitSchedule
from worker.fit.training_logs import build_as_fit
from worker.fit.validation import Validation
from worker.handover.fitted import write_job_file, write_sample
from worker.handover.models import hand_over
from worker.handover.refusals import check_has_labels
from worker.handover.spec import EVAL, TRAIN, FitSpec, write_spec
from worker.job.checks import check_integer
from worker.model.loss_scale import inner
from worker.stored.arguments import FitData
from worker.stored.stored_data import open_stored, store

FOLDER = "fit"
"""The folder in a run's directory that holds model, data and settings."""

MOST_PER_WORKER = 4
"""Most micro-batches of a worker in one update."""


def micro_batches(batch_size: int, workers: int) -> int:
    """Returns the number of micro-batches, of equal size, into which an update's ``batch_size``
    records are cut: as many as ``workers`` or, if that is no divisor, the number that keeps the
    busiest worker's share smallest."""
    divisors = [n for n in range(1, MOST_PER_WORKER * workers + 1) if batch_size % n == 0]
    return min(divisors, key=lambda n: (-(-n // workers) * (batch_size // n), abs(n - workers)))


@dataclass(frozen=True)
class FitCall:
    """A prepared call of ``fit``.

    Attributes:
        model: the caller's model.
        run_dir: the directory of its run.
        schedule: its epochs and steps.
        hooks: a ``keras.callbacks.CallbackList``.
        base_rate: the learning rate that the job is described with; NaN under a schedule.
        validation: the validation data; None if there is none.
    """

    model: Any
    run_dir: Path
    schedule: FitSchedule
    hooks: Any
    base_rate: float
    validation: Validation | None

    def end(self) -> None:
        """Ends the call. Removes its data from the directory of the run, and keeps all else."""
        leave_tables(self.model)
        for name in (TRAIN, EVAL):
            shutil.rmtree(self.run_dir / FOLDER / name, ignore_errors=True)


def prepared(
    run_dir: Path,
    model: keras.Model,
    train: FitData,
    validation: FitData | None,
    *,
    per_step: Callable[[int], int],
    batch_hooks_every: int | None,
    fields: Mapping[str, Any],
    epochs: int,
    initial_epoch: int,
    validation_freq: int | Sequence[int],
    callbacks: Any,
    verbose: str | int,
) -> FitCall:
    """Writes model, data and settings into ``run_dir``, with a job file that reads them.

    Args:
        per_step: returns the micro-batches of an update, by its records.
        batch_hooks_every: updates from one batch hook to the next; None for a part of an epoch.
        fields: further fields of the job.
        epochs: this and the arguments below are those of ``keras.Model.fit``.

    Raises:
        InvalidJob: the model, the data or an argument is not supported, or invalid.
        InvalidArgument: an update cannot be cut as asked.
    """
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700)
    stored = store(folder / TRAIN, train.cut(epochs))
    sample = open_stored(folder / TRAIN, stored).read_range(0, 1)
    check_has_labels(model, "y", sample)
    held_out = validator = None
    if validation is not None:
        held_out = store(folder / EVAL, validation.cut(1))
        source = open_stored(folder / EVAL, held_out)
        check_has_labels(model, "validation_data", source.read_range(0, 1))
        validator = Validation(model, source, held_out["batch_size"])
    build_as_fit(model, sample)
    steps = stored["steps"]
    hooks = callbacks
    if not isinstance(hooks, keras.callbacks.CallbackList):
        hooks = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            model=model,
        )
    check_saves_tables(model, hooks.callbacks)
    with _base_rate(model) as base_rate:
        hand_over(folder, model, sample[0])
    write_sample(folder, sample)
    replicas = per_step(stored["batch_size"])
    micro = stored["batch_size"] // replicas
    spec = FitSpec(
        train=stored,
        eval=held_out,
        batch_size=micro,
        epochs=max(epochs - earliest_epoch(model, initial_epoch, hooks.callbacks), 1),
        seed=random.getrandbits(32),
        class_weight=train.class_weight,
        fields=fields,
    )
    write_spec(folder, spec)
    write_job_file(folder)
    every = steps
    if has_batch_hooks(hooks.callbacks):
        every = batch_hooks_every or max(1, steps // PARTS)
    schedule = FitSchedule(
        first=initial_epoch,
        epochs=epochs,
        job_epochs=spec.epochs,
        steps=steps,
        per_step=replicas,
        per_epoch=batches_per_epoch(stored["records"], micro),
        records=stored["records"],
        every=every,
        validated=validation is not None,
        validation_freq=validation_freq,
    )
    return FitCall(model, run_dir, schedule, hooks, base_rate, validator)


def directory_of_call(base: Path, method: str) -> Path:
    """Makes a new directory in ``base`` for a call of ``method``, and returns it.

    Raises:
        InvalidArgument: ``base`` cannot be made, or written to.
    """
    name = time.strftime(f"{method}-%Y%m%d-%H%M%S")
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = base / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise InvalidArgument(
            f"Cluster: run_dir is {str(base)!r}, which is no folder to write to: "
            f"{error.strerror}; name one that is, or that can be made"
        ) from None
    raise AssertionError("count never ends")


def check_epochs(epochs: Any, initial_epoch: Any, validation_freq: Any) -> int:
    """Checks these arguments of ``fit``; returns the epochs, at most ``keras.config.max_epochs()``.
    Raises InvalidJob."""
    check_integer("epochs", epochs, 0)
    check_integer("initial_epoch", initial_epoch, 0)
    if not isinstance(validation_freq, Collection):
        check_integer("validation_freq", validation_freq, 1)
    most = keras.config.max_epochs()
    return int(epochs) if most is None else min(int(epochs), int(most))


@contextmanager
def removed_on_error(path: Path) -> Iterator[None]:
    """Removes a directory if the block raises: no run has begun, and the data may be large."""
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


@contextmanager
def _base_rate(model: keras.Model) -> Iterator[float]:
    """Yields the learning rate that the block hands over with the model; NaN under a schedule.
    Later rates are sent as multiples of it, so a rate of 0 is replaced by 1 within the block."""
    optimizer = inner(model.optimizer)
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        yield math.nan
    elif float(rate) != 0.0:
        yield float(rate)
    else:
        rate.assign(1.0)
        try:
            yield 1.0
        finally:
            rate.assign(0.0)
