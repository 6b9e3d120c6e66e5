"""A Keras layer whose rows a job trains, and which may have those rows outside of a job too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from psrpc.core.errors import InvalidJob
from worker.embedding.lookups import present
from worker.embedding.table_options import TableOptions
from worker.embedding.trained import (
    KnownRows,
    TrainedTable,
    rows_are_left_out,
    state_arrays,
    state_of_arrays,
)


class TableLayer(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """The rows of a layer outside of a job: those that a ``fit`` has trained, and those of a file
    that Keras has saved.

    Attributes:
        options: the table, as the layer describes it.
        trained: where its rows are; None before a ``fit``.
    """

    options: TableOptions

    def __init__(self, **layer: Any) -> None:
        super().__init__(**layer)
        self.trained: TrainedTable | None = None
        # Rows come from NumPy, which XLA cannot call.
        self.supports_jit = False

    def save_own_variables(self, store: Any) -> None:
        """Writes the rows, for Keras's files, if the layer has any.

        Raises:
            InvalidJob: they are not fetched.
        """
        if self.trained is not None and not rows_are_left_out():
            for name, array in state_arrays(self.trained.needed(self.name)).items():
                store[name] = array

    def load_own_variables(self, store: Any) -> None:
        """Reads what :meth:`save_own_variables` has written. Raises InvalidJob if it is of another
        table."""
        if not list(store.keys()):
            self.trained = None
            return
        try:
            state = state_of_arrays({name: store[name] for name in store.keys()})  # noqa: SIM118
        except ValueError as error:
            raise self.refused(f"cannot read its rows from the file: {error}") from None
        there, here = ((table.width, table.vocabulary) for table in (state.spec, self.options))
        if there != here:
            raise self.refused(
                f"has width {here[0]} and vocabulary {here[1]}, and its rows in the file "
                f"{there[0]} and {there[1]}; make the model as it was saved"
            )
        self.take_trained(TrainedTable(state.spec, None, state))

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        """Refuses to be part of a SavedModel, which would ask this process for rows. Called by
        TensorFlow."""
        if save_type == "savedmodel" and self.trained is not None:
            raise self.refused(
                "has rows that a SavedModel of model.export would not have; say `coordinator "
                "export RUN --to DIR/`, with the directory of the fit's run, or use model.save"
            )
        return super()._trackable_children(save_type, **options)

    def take_trained(self, table: TrainedTable) -> None:
        """Makes ``table`` the layer's rows. The layer takes over its seed, so that ids without a
        row have the same initial values in the next job."""
        self.trained = table
        self.options = replace(self.options, seed=table.spec.seed)

    def known(self) -> KnownRows:
        """Returns the layer's present rows. Raises InvalidJob if they are not in this process."""
        if self.trained is None:
            raise self.refused(
                f"has no rows here: nothing has trained table {self.options.name!r} in this "
                "process; call model.fit within pserver.Cluster, or take the model that "
                "`coordinator export` writes of a job"
            )
        try:
            return self.trained.known(self.name)
        except InvalidJob as error:
            error._keras_call_info_injected = True  # type: ignore[attr-defined]
            raise

    def check_trains(self) -> None:
        """Refuses a training step outside of a job, which would not change the rows. Raises
        InvalidJob."""
        if self.trained is not None and present() is None:
            raise self.refused(
                "trains on a cluster alone, which has its rows; call fit within pserver.Cluster"
            )

    def check_whole(self, what: str, value: Any, *, none: bool = False, least: int = 1) -> None:
        """Raises InvalidJob unless ``value`` is a whole number of at least ``least``."""
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not whole and not (none and value is None):
            raise self.refused(f"has {what} {value!r}; expected a whole number of at least {least}")

    def check_choice(self, what: str, value: Any, choices: tuple[Any, ...]) -> None:
        """Raises InvalidJob unless ``value`` is among ``choices``."""
        if value not in choices:
            raise self.refused(f"has {what} {value!r}; expected {' or '.join(map(repr, choices))}")

    def refused(self, why: str) -> InvalidJob:
        """Returns an error about this layer: its message is the layer's name and ``why``."""
        error = InvalidJob(f"layer {self.name!r} {why}")
        # Keras adds its own text to a message without this mark.
        error._keras_call_info_injected = True  # type: ignore[attr-defined]
        return error
