"""``pserver.Cluster``: trains Keras models with ``fit`` on processes of this machine."""

from __future__ import annotations

import html
import itertools
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras

from psrpc.core.batch import batches_per_epoch
from psrpc.core.errors import InvalidArgument
from psrpc.core.text import counted
from worker.fit.attendant import Attendant
from worker.fit.course import Course
from worker.fit.interception import calls_sent
from worker.fit.processes import STOP_S, Host, UpRun
from worker.fit.settings import check_settings, job_fields, up_flags
from worker.fit.training import PARTS, Fitting, earliest_epoch, has_batch_hooks
from worker.fit.training_logs import build_as_fit
from worker.fit.validation import Validation
from worker.handover.fitted import write_job_file
from worker.handover.models import hand_over
from worker.handover.refusals import (
    check_evaluate_model,
    check_fit_model,
    check_labels,
    check_predict_model,
)
from worker.handover.spec import EVAL, TRAIN, FitSpec, write_spec
from worker.job.checks import check_integer
from worker.model.loss_scale import inner
from worker.predict.divided import Divided
from worker.stored.arguments import training_data
from worker.stored.stored_data import open_stored, store

FOLDER = "fit"
"""The folder in a run's directory that holds model, data and settings."""

MOST_PER_WORKER = 4
"""Micro-batches of a worker in one update, at most."""


def micro_batches(batch_size: int, workers: int) -> int:
    """Returns into how many micro-batches of equal size an update's ``batch_size`` records are cut:
    as many as ``workers``, or, where that is no divisor, the number that keeps the busiest
    worker's share smallest."""
    divisors = [n for n in range(1, MOST_PER_WORKER * workers + 1) if batch_size % n == 0]
    return min(divisors, key=lambda n: (-(-n // workers) * (batch_size // n), abs(n - workers)))


class Cluster:
    """Shards and workers on this machine, which train Keras models.

    Within ``with Cluster(...)`` ``model.fit`` runs on it; :meth:`fit` does the same by name.
    Processes start on
    entering and end on leaving, or with this process. docs/fit.md says what is supported.

    Args:
        shards: shards that hold variables and optimizer state.
        workers: workers that compute gradients.
        mode: ``sync``, ``async`` or ``ssp``, as in :class:`Job`. In ``sync`` mode an update is
            that of plain ``fit``: ``batch_size`` records, of which each worker computes a part.
            In the others each worker computes updates of ``batch_size`` records by itself.
        replicas: micro-batches that an update is cut into (sync), by default as many as workers
            where that divides ``batch_size``.
        run_dir: directory for the runs, one each ``fit``; ``runs`` by default.
        batch_hooks_every: updates from one batch hook of a callback to the next; by default ten
            times per epoch. The model is up to date in each of them, which costs some tens of
            milliseconds.
        settings: further fields of :class:`Job`, such as ``staleness=2`` or ``engine="numpy"``, and
            the options ``gpu``, ``gpu_memory_fraction``, ``intra_op_threads``,
            ``connect_timeout_s`` and ``max_restarts`` of ``coordinator up``.

    Raises:
        InvalidArgument: a number is out of range.
        InvalidJob: a setting is unknown, ``fit`` sets it, its value is invalid, or it does not fit
            the mode.
    """

    def __init__(
        self,
        *,
        shards: int = 1,
        workers: int = 1,
        mode: str = "sync",
        replicas: int | None = None,
        run_dir: str | Path | None = None,
        batch_hooks_every: int | None = None,
        **settings: Any,
    ) -> None:
        counts = {"shards": shards, "workers": workers}
        optional = {"replicas": replicas, "batch_hooks_every": batch_hooks_every}
        counts |= {name: value for name, value in optional.items() if value is not None}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(
                    f"Cluster: {name} is {value!r}; expected a whole number of at least 1"
                )
        if mode != "sync" and replicas is not None:
            raise InvalidArgument(f"Cluster: replicas is for mode sync; the mode is {mode}")
        check_settings(mode, replicas, settings, (*counts, *optional, "mode", "run_dir"))
        self.shards = shards
        self.workers = workers
        self.mode = mode
        self.replicas = replicas
        self.batch_hooks_every = batch_hooks_every
        self.settings = settings
        self.run_dir: Path | None = None
        """The directory of the run under way, or of the last one."""
        self._base = Path("runs") if run_dir is None else Path(run_dir)
        self._host: Host | None = None
        self._up: UpRun | None = None
        self._held = ExitStack()
        self._plain: Mapping[str, Callable[..., Any]] = {}
        """Keras's own functions."""

    def __enter__(self) -> Cluster:
        if self._host is not None:
            raise InvalidArgument("this cluster is entered already; leave its with block first")
        with ExitStack() as held:
            self._host = Host(os.environ)
            held.callback(self._end)
            sent: dict[str, Callable[..., Any]]
            sent = {"fit": self.fit, "evaluate": self.evaluate, "predict": self.predict}
            self._plain = held.enter_context(calls_sent(sent))
            self._held = held.pop_all()
        return self

    def _repr_html_(self) -> str:
        """Returns the state in a line, for a notebook, with a link to the dashboard of a run."""
        shape = f"{counted(self.shards, 'shard')}, {counted(self.workers, 'worker')}, {self.mode}"
        parts = [f"pserver.Cluster ({shape})" + ("" if self._host else ", not entered")]
        if self._up is not None:
            parts.append(html.escape(self._up.last_line))
            if address := html.escape(self._up.dashboard, quote=True):
                parts.append(f'<a href="{address}">dashboard</a>')
        return ": ".join(parts)

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def fit(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> keras.callbacks.History:
        """Trains ``model``, whose weights and optimizer state are the result, as
        ``keras.Model.fit`` with the same arguments does.

        Raises:
            InvalidJob: the model, the data or an argument is not supported, or invalid.
            InvalidArgument: the cluster is not entered.
            JobFailed: the job failed; says why.
        """
        self._entered()
        check_fit_model(model)
        train, validation = training_data(
            x,
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            class_weight=class_weight,
            shuffle=shuffle,
            steps_per_epoch=steps_per_epoch,
            validation_split=validation_split,
            validation_data=validation_data,
            validation_batch_size=validation_batch_size,
            validation_steps=validation_steps,
        )
        _check_epochs(epochs, initial_epoch, validation_freq)
        run_dir = self._new_run_dir("fit")
        with _removed_on_error(run_dir):
            folder = run_dir / FOLDER
            folder.mkdir(mode=0o700)
            stored = store(folder / TRAIN, train)
            sample = open_stored(folder / TRAIN, stored).read_range(0, 1)
            check_labels(model, "y", sample)
            held_out = validator = None
            if validation is not None:
                held_out = store(folder / EVAL, validation)
                source = open_stored(folder / EVAL, held_out)
                check_labels(model, "validation_data", source.read_range(0, 1))
                validator = Validation(model, source, held_out["batch_size"])
            build_as_fit(model, sample)
            hooks = callbacks
            if not isinstance(hooks, keras.callbacks.CallbackList):
                hooks = keras.callbacks.CallbackList(
                    callbacks,
                    add_history=True,
                    add_progbar=verbose != 0,
                    verbose=verbose,
                    epochs=epochs,
                    steps=stored["steps"],
                    model=model,
                )
            hand_over(folder, model, sample[0])
            per_step = self._per_step(stored["batch_size"])
            micro = stored["batch_size"] // per_step
            spec = FitSpec(
                train=stored,
                eval=held_out,
                batch_size=micro,
                epochs=max(epochs - earliest_epoch(model, initial_epoch, hooks.callbacks), 1),
                seed=random.getrandbits(32),
                class_weight=train.class_weight,
                fields=job_fields(self.settings),
            )
            write_spec(folder, spec)
            write_job_file(folder)
            course = Course(
                first=initial_epoch,
                epochs=epochs,
                job_epochs=spec.epochs,
                steps=stored["steps"],
                per_step=per_step,
                per_epoch=batches_per_epoch(stored["records"], micro),
                records=stored["records"],
                every=self._every(hooks.callbacks, stored["steps"]),
                validated=validation is not None,
                validation_freq=validation_freq,
            )
        self.run_dir = run_dir
        self._train(model, run_dir, course, hooks, validator)
        return model.history

    def evaluate(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns loss and metrics as ``keras.Model.evaluate`` with the same arguments does, each
        record once. Called by a callback of :meth:`fit`, it runs in this process.

        Raises: as :meth:`fit`.
        """
        given = (x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict)
        if self._is_busy or kwargs:
            return self._plain["evaluate"](model, *given, **kwargs)
        check_evaluate_model(model)
        return self._divided.evaluate(model, *given)

    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs for all records, in their order, as ``keras.Model.predict`` with the
        same arguments does. Called by a callback of :meth:`fit`, it runs in this process.

        Raises: as :meth:`fit`.
        """
        given = (x, batch_size, verbose, steps, callbacks)
        if self._is_busy:
            return self._plain["predict"](model, *given)
        check_predict_model(model)
        return self._divided.predict(model, *given)

    @property
    def _is_busy(self) -> bool:
        """Whether the host runs a job, which a callback must not wait for."""
        return self._up is not None and self._up.status is None

    @property
    def _divided(self) -> Divided:
        start = self._entered().parts
        return Divided(self.workers, self.settings, self._new_run_dir, hand_over, start)

    def _train(
        self,
        model: keras.Model,
        run_dir: Path,
        course: Course,
        hooks: Any,
        validation: Validation | None,
    ) -> None:
        arguments = self._arguments(run_dir, course.per_step)
        self._up = up = self._entered().up(arguments, run_dir / "up.log")
        attendant = Attendant(run_dir, up)
        rate = _base_rate(model)
        fitting = Fitting(model, run_dir, attendant, course, hooks, rate, validation)
        try:
            fitting.run()
            fitting.finish()
        except KeyboardInterrupt:
            # As in plain fit, the model has the state of the moment.
            attendant.stop()
            if up.wait(STOP_S) is not None:
                fitting.load_newest()
            raise
        finally:
            if up.status is None:
                attendant.stop()
            attendant.close()
            up.end()
            for name in (TRAIN, EVAL):
                shutil.rmtree(run_dir / FOLDER / name, ignore_errors=True)

    def _arguments(self, run_dir: Path, replicas: int) -> list[str]:
        """Returns the command line of ``coordinator up``."""
        found = [
            str(run_dir / FOLDER / "fit.py"),
            "--attended",
            f"--run-dir={run_dir}",
            f"--mode={self.mode}",
        ]
        found += [f"--shards={self.shards}", f"--workers={self.workers}"]
        found += [f"--replicas={replicas}"] * (self.mode == "sync")
        return found + up_flags(self.settings)

    def _per_step(self, batch_size: int) -> int:
        """Returns the micro-batches of an update of ``batch_size`` records."""
        if self.mode != "sync":
            return 1
        if self.replicas is None:
            return micro_batches(batch_size, self.workers)
        if batch_size % self.replicas:
            raise InvalidArgument(
                f"batch_size is {batch_size} and replicas {self.replicas}: an update cannot be cut "
                "into so many equal parts; give a multiple, or leave replicas to the cluster"
            )
        return self.replicas

    def _every(self, callbacks: Sequence[Any], steps: int) -> int:
        if not has_batch_hooks(callbacks):
            return steps
        return self.batch_hooks_every or max(1, steps // PARTS)

    def _new_run_dir(self, method: str) -> Path:
        """Makes the directory of a run of ``fit`` or another method."""
        name = time.strftime(f"{method}-%Y%m%d-%H%M%S")
        try:
            self._base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(
                f"Cluster: run_dir is {str(self._base)!r}, which is no folder to write to: "
                f"{error.strerror}; name one that is, or that can be made"
            ) from None
        for number in itertools.count(1):
            path = self._base / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
        raise AssertionError("count never ends")

    def _entered(self) -> Host:
        if self._host is None:
            raise InvalidArgument("this cluster is not entered; say: with pserver.Cluster(...):")
        return self._host

    def _end(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """Removes a directory if the block raises: no run has begun, and the data may be large."""
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _check_epochs(epochs: Any, initial_epoch: Any, validation_freq: Any) -> None:
    check_integer("epochs", epochs, 0)
    check_integer("initial_epoch", initial_epoch, 0)
    if not isinstance(validation_freq, Collection):
        check_integer("validation_freq", validation_freq, 1)


def _base_rate(model: keras.Model) -> float:
    """Returns the learning rate that the job is described with; NaN under a schedule."""
    rate = inner(model.optimizer)._learning_rate
    return (
        math.nan
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        else float(rate)
    )
