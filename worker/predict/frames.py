"""Applies a trained model to a data frame of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidArgument, InvalidData, LaunchFailed
from psrpc.ops.extras import missing
from worker.data.columns import ColumnReader, Columns, column_names
from worker.data.ragged import as_tensor, part
from worker.data.source import Array, map_arrays

_RETURNS = ("array<float>", "array<double>", "float", "double")


def predictions(
    frame: Any,
    model: str | Path | Callable[[], Any],
    *,
    x: Columns,
    output: str = "prediction",
    returns: str = "array<float>",
    ragged: Sequence[str] = (),
    x_dtype: str | None = None,
    map: Callable[[Any], Any] | None = None,
    batch_size: int = 1024,
) -> Any:
    """Returns a frame of Spark with the predictions of a Keras model as one more column.

    The tasks of Spark load the model, once per process; nothing runs before the frame is used.

    Args:
        frame: a ``DataFrame``.
        model: a ``.keras`` file that all executors see, as ``coordinator export`` writes it, or a
            function that returns a model, for one with classes of your own.
        x: the inputs, as for ``Parquet``: a column, a list of columns, or a dict of them.
        output: the new column.
        returns: the type of the new column: ``array<float>`` or ``array<double>`` for a model whose
            output is ``[n, k]``, ``float`` or ``double`` for ``[n]`` and ``[n, 1]``.
        ragged, x_dtype: as for ``Parquet``.
        map: converts each batch ``x`` for the model.
        batch_size: records of one step.

    Raises:
        InvalidJob: pyspark is missing, or the frame has no such column; when the frame is used, a
            value is missing or of no type that becomes an array.
        InvalidArgument: ``returns`` is none of these, or the frame has the column ``output``; when
            the frame is used, the model's output does not fit ``returns``.
        LaunchFailed: when the frame is used, an executor does not see the file.
    """
    try:
        from pyspark.sql import types
    except ModuleNotFoundError:
        raise missing("predictions", "pyspark", "spark") from None
    if returns not in _RETURNS:
        raise InvalidArgument(f"returns is {returns!r}; expected {' or '.join(_RETURNS)}")
    if output in frame.columns:
        raise InvalidArgument(f"the frame has a column {output!r} already; say output='...'")
    if batch_size < 1:
        raise InvalidArgument(f"batch_size is {batch_size}; expected a number of records")
    reader = ColumnReader(
        "predictions", "the frame", frozenset(ragged), row_name=lambda _: "a row of the frame"
    )
    reader.check_names(frame.columns, column_names(x))
    if not callable(model):
        model = Path(model).absolute()
    inner = types.DoubleType() if "double" in returns else types.FloatType()
    new = types.ArrayType(inner, False) if "array" in returns else inner
    schema = types.StructType([*frame.schema.fields, types.StructField(output, new, False)])
    return frame.mapInArrow(
        _Predictor(model, reader, x, x_dtype, map, output, returns, batch_size), schema
    )


@dataclass(frozen=True)
class _Predictor:
    """Appends a column to batches of records; Spark's tasks call it."""

    model: Path | Callable[[], Any]
    reader: ColumnReader
    x: Columns
    x_dtype: str | None
    map: Callable[[Any], Any] | None
    output: str
    returns: str
    batch_size: int
    __name__: str = field(default="predictions", init=False)

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        predict = None
        for batch in batches:
            # Check before the model is loaded, which takes seconds.
            self.reader.check(batch.schema, column_names(self.x))
            x = self.reader.read(pa.Table.from_batches([batch]), self.x, self.x_dtype)
            inputs = x if self.map is None else self.map(x)
            predict = predict or self._loaded()
            found = [
                predict(map_arrays(partial(_tensor, low=low, high=low + self.batch_size), inputs))
                for low in range(0, batch.num_rows, self.batch_size)
            ]
            if found:
                column = self._column(np.concatenate(found), batch.num_rows)
                yield batch.append_column(self.output, column)

    def _loaded(self) -> Callable[[Any], Array]:
        if not isinstance(self.model, Path):
            return _compiled(self.model())
        if not self.model.is_file():
            raise LaunchFailed(
                f"predictions: an executor does not see {str(self.model)!r}; the model has to lie "
                "on a file system that all executors share",
                code="PS141",
            )
        return _of_file(self.model, self.model.stat().st_mtime_ns)

    def _column(self, values: Array, rows: int) -> Any:
        import pyarrow as pa

        values = values.astype(np.float64 if "double" in self.returns else np.float32)
        several = "array" in self.returns
        if several and values.ndim == 2:
            splits = np.arange(rows + 1, dtype=np.int32) * values.shape[1]
            return pa.ListArray.from_arrays(splits, values.ravel())
        if not several and values.size == rows:
            return pa.array(values.reshape(rows))
        raise InvalidArgument(
            f"the model gives {list(values.shape)} for {rows} records, which is no {self.returns}; "
            + ("say returns='float'" if several else "say returns='array<float>'")
        )


def _tensor(array: Any, low: int, high: int) -> Any:
    return as_tensor(part(array, low, min(high, len(array))))


@lru_cache(maxsize=1)
def _of_file(path: Path, _changed_ns: int) -> Callable[[Any], Array]:
    """Returns the model of a file. Tasks of one process share it until the file changes."""
    import keras

    return _compiled(keras.saving.load_model(path, compile=False))


def _compiled(model: Any) -> Callable[[Any], Array]:
    import tensorflow as tf

    call = tf.function(partial(model, training=False), reduce_retracing=True)

    def predict(inputs: Any) -> Array:
        outputs = call(inputs)
        if isinstance(outputs, dict | list | tuple):
            raise InvalidData(
                f"the model has {len(outputs)} outputs; make a model of one of them: "
                "keras.Model(model.inputs, model.outputs[0])"
            )
        return np.asarray(outputs)

    return predict
