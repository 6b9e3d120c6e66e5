"""Runs ``evaluate`` and ``predict`` for their caller: hands model and data over to parts, and joins
the results."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import keras
from keras.src.utils.python_utils import pythonify_logs

from psrpc.core.errors import JobFailed
from worker.data.source import Batch, arrays_of, map_arrays
from worker.embedding.lookups import NoRows, look_up
from worker.embedding.model_tables import write_tables
from worker.handover.models import MEASURES, hand_over
from worker.job.loader import user_code
from worker.model.metrics import PART, is_kerass_own, not_summable, parts
from worker.predict.results import (
    add_states,
    join_outputs,
    load_result,
    result_is_there,
)
from worker.predict.shares import as_keras
from worker.predict.spec import DATA, TABLES, PartsSpec, What, share, write_parts_spec
from worker.stored.arguments import FitData, prediction_data
from worker.stored.stored_data import open_stored, store

FOLDER = "parts"
"""The folder in the directory of a call that holds model, data and results."""

POLL_S = 0.02

END_S = 15.0
"""Seconds that processes may take to end after they have written their results."""


class PartsRun(Protocol):
    """The processes of one call."""

    def wait(self, seconds: float) -> int | None:
        """Waits up to ``seconds`` for the end; returns the exit status, None before it."""

    def why(self) -> str:
        """Returns why they failed."""

    def end(self) -> None:
        """Ends them now if they have not ended."""


@dataclass(frozen=True)
class _Result:
    """The result of the part with the batches ``first`` to ``last``."""

    first: int
    last: int
    value: Any


class Divided:
    """Runs ``evaluate`` and ``predict`` on processes of this machine.

    Args:
        workers: processes at most; less data takes fewer.
        settings: fields of :class:`worker.predict.spec.PartsSpec` by name; ignores others.
        new_directory: makes the directory of a call, by the name of the method.
        start: starts the parts; takes their folder, their number and the file for their output.
    """

    def __init__(
        self,
        workers: int,
        settings: Mapping[str, Any],
        new_directory: Callable[[str], Path],
        start: Callable[[Path, int, Path], PartsRun],
    ) -> None:
        self._workers = workers
        self._settings = {
            name: settings[name]
            for name in ("gpu", "gpu_memory_fraction", "intra_op_threads")
            if name in settings
        }
        self._new_directory = new_directory
        self._start = start

    def evaluate(
        self,
        model: keras.Model,
        x: Any,
        y: Any,
        batch_size: int | None,
        verbose: str | int,
        sample_weight: Any,
        steps: int | None,
        callbacks: Any,
        return_dict: bool,
    ) -> Any:
        """Does what ``keras.Model.evaluate`` does."""
        x = _first(x, steps)
        data = prediction_data(
            x, batch_size=batch_size, steps=steps, y=y, sample_weight=sample_weight
        )
        with self._call("evaluate", model, data) as call:
            hooks = call.hooks(callbacks, verbose)
            model.stop_evaluating = False
            hooks.on_test_begin()
            model.reset_metrics()
            for result in call.results():
                hooks.on_test_batch_begin(result.first)
                add_states(model, result.value, first=not result.first)
                hooks.on_test_batch_end(result.last, pythonify_logs(model.get_metrics_result()))
                if model.stop_evaluating:
                    break
            logs = pythonify_logs(model.get_metrics_result())
            hooks.on_test_end(logs)
        return logs if return_dict else model._flatten_metrics_in_order(logs)

    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None,
        verbose: str | int,
        steps: int | None,
        callbacks: Any,
    ) -> Any:
        """Does what ``keras.Model.predict`` does."""
        data = prediction_data(_first(x, steps), batch_size=batch_size, steps=steps)
        outputs = []
        with self._call("predict", model, data) as call:
            hooks = call.hooks(callbacks, verbose)
            model.stop_predicting = False
            hooks.on_predict_begin()
            for result in call.results():
                hooks.on_predict_batch_begin(result.first)
                outputs.append(result.value)
                hooks.on_predict_batch_end(result.last, {"outputs": result.value})
                if model.stop_predicting:
                    break
            hooks.on_predict_end()
        return join_outputs(model, outputs)

    @contextmanager
    def _call(self, what: What, model: keras.Model, data: FitData) -> Iterator[_Call]:
        """Yields the call. Its processes start at once and end with the context, which then removes
        the directory of the call. If a started call fails, the logs in it stay."""
        directory = self._new_directory(what).absolute()
        folder = directory / FOLDER
        keeps = False
        try:
            folder.mkdir(mode=0o700)
            stored = store(folder / DATA, data)
            records = min(2 * PART if what == "evaluate" else 2, stored["records"])
            sample = open_stored(folder / DATA, stored).read_range(0, records)
            hand_over(folder, model, sample[0], MEASURES if what == "evaluate" else ())
            write_tables(folder / TABLES, model)
            count = min(self._workers, stored["steps"])
            if what == "evaluate" and not _adds_up(model, sample):
                count = 1
            eagerly = bool(model.run_eagerly)
            write_parts_spec(
                folder, PartsSpec(what=what, data=stored, run_eagerly=eagerly, **self._settings)
            )
            run = self._start(folder, count, directory / "parts.log")
            keeps = True
            try:
                yield _Call(model, folder, run, stored["steps"], count)
                run.wait(END_S)
            finally:
                run.end()
            keeps = False
        finally:
            shutil.rmtree(folder if keeps else directory, ignore_errors=True)


class _Call:
    """A call whose processes have started."""

    def __init__(
        self, model: keras.Model, folder: Path, run: PartsRun, steps: int, count: int
    ) -> None:
        self._model = model
        self._folder = folder
        self._run = run
        self._steps = steps
        self._count = count

    def hooks(self, callbacks: Any, verbose: str | int) -> Any:
        """Returns the callbacks as Keras makes them."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        return keras.callbacks.CallbackList(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=self._steps,
            model=self._model,
        )

    def results(self) -> Iterator[_Result]:
        """Yields the results of the parts in the order of the data, each as soon as it is there.

        Raises:
            JobFailed: a part has failed; says why.
        """
        for index in range(self._count):
            status = None
            while not result_is_there(self._folder, index):
                if status is not None:
                    raise JobFailed(self._run.why())
                status = self._run.wait(POLL_S)
            batches = share(self._steps, index, self._count)
            yield _Result(batches[0], batches[-1], load_result(self._folder, index))


def _first(x: Any, steps: int | None) -> Any:
    """Returns the first ``steps`` batches of ``x`` if it is a ``tf.data.Dataset``, which may be
    endless; else ``x``."""
    if steps is not None and "tensorflow" in sys.modules:
        import tensorflow as tf

        if isinstance(x, tf.data.Dataset):
            return x.take(steps)
    return x


def _adds_up(model: keras.Model, sample: tuple[Any, ...]) -> bool:
    """Makes the variables of all metrics, as the first batch of ``evaluate`` does, and returns
    whether their states for some batches add up to those for all."""
    records = len(next(arrays_of(sample)))
    batches = [_rows(sample, at, at + PART) for at in range(0, records, PART)]
    with user_code("evaluate()"), look_up(NoRows()):
        model.test_step(as_keras(batches[0]))
        model.reset_metrics()
        tried = parts(model.metrics)
        if all(is_kerass_own(metric) for metric in tried):
            return True
        updates = [partial(model.test_step, as_keras(batch)) for batch in batches]
        # A single batch of few records shows nothing.
        return len(updates) > 1 and not not_summable(tried, updates)


def _rows(batch: Batch, low: int, high: int) -> Batch:
    rows: Batch = map_arrays(lambda array: array[low:high], batch)
    return rows
