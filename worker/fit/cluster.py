"""``pserver.Cluster``: trains Keras models with ``fit`` on processes of this machine."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import keras

from psrpc.core.errors import InvalidArgument
from psrpc.core.text import counted
from worker.embedding.model_tables import fetch_tables
from worker.fit.attendant import Attendant
from worker.fit.interception import calls_sent
from worker.fit.prepare import (
    FOLDER,
    FitCall,
    check_epochs,
    directory_of_call,
    micro_batches,
    prepared,
    removed_on_error,
)
from worker.fit.processes import LEAVE_S, STOP_S, Host, HostRun
from worker.fit.settings import check_settings, job_fields, up_flags
from worker.fit.training import Fitting
from worker.handover.refusals import check_evaluate_model, check_fit_model, check_predict_model
from worker.predict.divided import Divided
from worker.stored.arguments import training_data


class Cluster:
    """Shards and workers on this machine, which train Keras models.

    Within ``with Cluster(...)``, ``model.fit``, ``model.evaluate`` and ``model.predict`` run on
    it; :meth:`fit`, :meth:`evaluate` and :meth:`predict` do the same by name. Processes start on
    entering and end on leaving, or with this process. docs/fit.md says what is supported.

    Args:
        shards: shards that hold variables and optimizer state.
        workers: workers that compute gradients.
        mode: ``sync``, ``async`` or ``ssp``, as in :class:`Job`. In ``sync`` mode an update is
            that of plain ``fit``: ``batch_size`` records, of which each worker computes a part.
            In the other modes each worker computes updates of ``batch_size`` records by itself.
        replicas: micro-batches that an update is cut into (sync), by default as many as workers
            where that divides ``batch_size``.
        run_dir: directory for the runs, one for each ``fit``; ``runs`` by default.
        batch_hooks_every: updates from one batch hook of a callback to the next; by default ten
            times per epoch. The model is up to date in each of them, which costs some tens of
            milliseconds.
        settings: further fields of :class:`Job`, such as ``staleness=2`` or ``engine="numpy"``, and
            the options ``gpu``, ``gpu_memory_fraction``, ``intra_op_threads``,
            ``connect_timeout_s`` and ``max_restarts`` of ``coordinator up``.

    Raises:
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
        named = {"shards": shards, "workers": workers, "mode": mode, "replicas": replicas}
        named |= {"run_dir": run_dir, "batch_hooks_every": batch_hooks_every}
        check_settings(named, settings)
        self.shards = shards
        self.workers = workers
        self.mode = mode
        self.replicas = replicas
        self.batch_hooks_every = batch_hooks_every
        self.settings = settings
        self.run_dir: Path | None = None  # of the run under way, or of the last one
        self._base = Path("runs") if run_dir is None else Path(run_dir)
        self._host: Host | None = None
        self._up: HostRun | None = None
        self._held = ExitStack()
        # Keras's own functions.
        self._plain: Mapping[str, Callable[..., Any]] = {}

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

    def __repr__(self) -> str:
        shape = f"{counted(self.shards, 'shard')}, {counted(self.workers, 'worker')}, {self.mode}"
        state = f"pserver.Cluster ({shape})" + ("" if self._host else ", not entered")
        return f"{state}: {self._up.last_line}" if self._up else state

    def _repr_html_(self) -> str:
        """Returns the state for a notebook, with a link to the dashboard while a run has one."""
        address = html.escape(self._up.dashboard, quote=True) if self._up else ""
        link = f': <a href="{address}">dashboard</a>' if address else ""
        return html.escape(repr(self)) + link

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
        epochs = check_epochs(epochs, initial_epoch, validation_freq)
        run_dir = directory_of_call(self._base, "fit")
        with removed_on_error(run_dir):
            call = prepared(
                run_dir,
                model,
                train,
                validation,
                per_step=self._per_step,
                batch_hooks_every=self.batch_hooks_every,
                fields=job_fields(self.settings),
                epochs=epochs,
                initial_epoch=initial_epoch,
                validation_freq=validation_freq,
                callbacks=callbacks,
                verbose=verbose,
            )
        self.run_dir = run_dir
        self._train(call)
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
        """Returns loss and metrics as ``keras.Model.evaluate`` with the same arguments does; each
        record counts once. If a callback of :meth:`fit` calls it, it runs in this process.

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
        same arguments does. If a callback of :meth:`fit` calls it, it runs in this process.

        Raises: as :meth:`fit`.
        """
        given = (x, batch_size, verbose, steps, callbacks)
        if self._is_busy:
            return self._plain["predict"](model, *given)
        check_predict_model(model)
        return self._divided.predict(model, *given)

    def fetch(self, model: keras.Model) -> None:
        """Reads the rows of all tables of a trained ``model`` into the model, for ``save`` and for
        calls outside of the cluster. May be called after the with block. Raises InvalidJob if the
        model has no :class:`pserver.Embedding` or an untrained one, CheckpointError if the
        directory of the run is gone."""
        fetch_tables(model)

    @property
    def _is_busy(self) -> bool:
        """Whether the host runs a job, which a callback must not wait for."""
        return self._up is not None and self._up.status is None

    @property
    def _divided(self) -> Divided:
        start = self._entered().parts
        new_directory = partial(directory_of_call, self._base)
        return Divided(self.workers, self.settings, new_directory, start)

    def _train(self, call: FitCall) -> None:
        arguments = self._arguments(call.run_dir, call.schedule.per_step)
        self._up = up = self._entered().up(arguments, call.run_dir / "up.log")
        attendant = Attendant(call.run_dir, up)
        fitting = Fitting(call, attendant)
        try:
            fitting.run()
            if fitting.finish():
                up.wait(LEAVE_S)
        except KeyboardInterrupt:
            # As after an interrupt of plain fit, the model gets the newest state.
            attendant.stop()
            if up.wait(STOP_S) is not None:
                fitting.load_newest()
            raise
        finally:
            if up.status is None:
                attendant.stop()
            attendant.close()
            up.end()
            call.end()

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

    def _entered(self) -> Host:
        if self._host is None:
            raise InvalidArgument("this cluster is not entered; say: with pserver.Cluster(...):")
        return self._host

    def _end(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()
