"""A Keras layer whose rows live on the shards."""

from __future__ import annotations

from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from pserver.updates.keras_objects import rebuild
from psrpc.core.tables import STRINGS, Eviction
from worker.embedding.lookups import Found, HeldRows, LookUpCall, held, present
from worker.embedding.rows import IdRule, OutOfVocabulary
from worker.embedding.table_layer import TableLayer
from worker.embedding.table_options import TableOptions, table_initializer, table_optimizer
from worker.embedding.trained import find_known

Combiner = Literal["sum", "mean", "sqrtn"]

_OF_KERAS = {
    "input_dim": "vocabulary",
    "output_dim": "width",
    "mask_zero": "padding=0",
    "embeddings_initializer": "initializer",
}
"""Arguments of ``keras.layers.Embedding`` and their names here."""


def string_ids(strings: Any, vocabulary: int | None = None) -> tf.Tensor:
    """Returns the table ids of strings, int64 in their shape: FarmHash's Fingerprint64, which never
    changes, modulo ``vocabulary``, or modulo ``STRINGS`` without one.
    :func:`psrpc.core.tables.hashed` does the same without TensorFlow."""
    return tf.strings.to_hash_bucket_fast(strings, STRINGS if vocabulary is None else vocabulary)


@keras.saving.register_keras_serializable("worker")
class Embedding(TableLayer):
    """Turns ids into rows of a table that only the shards store; the layer has no weights.

    Ids are integers or strings, in a dense tensor ``[...]``, a ``tf.RaggedTensor`` or a
    ``tf.SparseTensor`` ``[batch, ...]``. The rows have the layer's compute dtype, and the shape

    * ``[..., width]`` without a combiner (ragged ids give a ragged tensor; sparse ids need one);
    * with a combiner, which reduces the last axis of the ids, ``[..., width]`` of a dense
      ``[..., k]``, and ``[batch, width]`` of ragged and sparse ids: their sum, their ``mean``, or
      their sum divided by the square root of their number (``sqrtn``); zeros if there are no ids.

    A worker finds the ids by running the model up to its Embedding layers, ahead of the step. So
    ids must not depend on parameters or rows, and a layer must not be called inside a loop or a
    condition that TensorFlow runs.

    Calling the layer outside of a job is an error, unless it has rows: after ``fit`` within a
    :class:`worker.fit.cluster.Cluster`, ``cluster.fetch(model)`` brings them, and from then on
    files to which the model is saved contain them. ``coordinator export`` writes models without
    this layer: a fixed vocabulary in a ``keras.layers.Embedding``, a growing table in a SavedModel.

    Args:
        width: elements of a row.
        vocabulary: ids are 0 to ``vocabulary - 1``, and strings are hashed to these; with None, ids
            are any int64.
        combiner: how several ids become one vector: ``sum``, ``mean`` or ``sqrtn``.
        initializer: initializer of the rows: ``RandomUniform``, ``RandomNormal``, ``Constant``,
            ``Zeros``, ``Ones`` or a name. Values depend on the job's seed, the table and the id
            alone.
        optimizer: optimizer of the rows: SGD, Adagrad, Adam or Ftrl of Keras, or
            ``RowwiseAdagrad``; None takes the job's.
        min_count: updates that an id has to take part in before it gets a row of its own.
        max_rows: most rows over all shards; None is no limit.
        evict: which rows a full table removes: ``age``, those not updated for longest, or
            ``frequency``, those updated least often; with None, a full table is an error.
        keep_evicted: checkpoints keep evicted rows, for ``coordinator export --evicted``.
        out_of_vocabulary: treatment of an id outside the vocabulary: ``error``, ``clip`` to the
            nearest id, or ``drop``: zeros, which a combiner leaves out.
        padding: the id, or string, that means no id and is dropped; without a combiner the layer
            masks it for the layers that follow.
        table: the table's name; None takes the layer's. Layers with the same table share it.
        seed: seed of the initial values; None takes the job's.

    Raises:
        InvalidJob: an argument or the ids are invalid; names which.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int | None = None,
        *,
        combiner: Combiner | None = None,
        initializer: Any = "uniform",
        optimizer: Any = None,
        min_count: int = 1,
        max_rows: int | None = None,
        evict: Eviction | None = None,
        keep_evicted: bool = False,
        out_of_vocabulary: OutOfVocabulary = "error",
        padding: int | str | None = None,
        table: str | None = None,
        seed: int | None = None,
        **layer: Any,
    ) -> None:
        others = [name for name in _OF_KERAS if layer.pop(name, None)]
        super().__init__(**layer)
        if others:
            raise self.refused(
                f"has {others[0]}, as keras.layers.Embedding has; here say {_OF_KERAS[others[0]]}"
            )
        self.check_whole("width", width)
        self.check_whole("vocabulary", vocabulary, none=True)
        self.check_whole("min_count", min_count)
        self.check_whole("max_rows", max_rows, none=True)
        self.check_whole("seed", seed, none=True, least=0)
        self.check_choice("combiner", combiner, (*get_args(Combiner), None))
        self.check_choice("evict", evict, (*get_args(Eviction), None))
        self.check_choice("keep_evicted", keep_evicted, (False, True))
        self.check_choice("out_of_vocabulary", out_of_vocabulary, get_args(OutOfVocabulary))
        if evict is not None and max_rows is None:
            raise self.refused(f"has evict={evict!r}, but no max_rows; nothing would be evicted")
        if keep_evicted and evict is None:
            raise self.refused("has keep_evicted, but no evict; nothing would be evicted")
        if out_of_vocabulary != "error" and vocabulary is None:
            raise self.refused(
                f"has out_of_vocabulary={out_of_vocabulary!r}, but no vocabulary; every id is in it"
            )
        if isinstance(padding, bool) or not isinstance(padding, int | str | None):
            raise self.refused(f"has padding={padding!r}; expected an id or a string")
        self.width = width
        self.vocabulary = vocabulary
        self.combiner = combiner
        self.padding = padding
        self.out_of_vocabulary: OutOfVocabulary = out_of_vocabulary
        self.options = TableOptions(
            name=self.name if table is None else table,
            width=width,
            vocabulary=vocabulary,
            initializer=table_initializer(self.name, initializer),
            optimizer=table_optimizer(self.name, optimizer),
            min_count=min_count,
            max_rows=max_rows,
            eviction=evict,
            keep_evicted=keep_evicted,
            seed=seed,
            layer=self.name,
        )
        self.supports_masking = padding is not None and combiner is None
        self._initializer = initializer
        self.strings = False
        """Whether a functional model gave it strings."""
        # In a model for export this layer holds its own rows, in a Keras layer that Keras tracks.
        self._held = None if held.tables is None else HeldRows(self.options)
        self._rows = None if self._held is None else self._held.rows

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the rows of ``inputs``; see the class."""
        if training:
            self.check_trains()
        if isinstance(inputs, tf.RaggedTensor):
            return self._ragged(inputs)
        if isinstance(inputs, tf.SparseTensor):
            return self._sparse(inputs)
        rows, there = self._find(inputs)
        if self.combiner is None:
            return tf.cast(rows, self.compute_dtype)
        if there is None:
            count = tf.cast(tf.shape(inputs)[-1], rows.dtype)
        else:
            count = tf.reduce_sum(tf.cast(there, rows.dtype), -1)[..., tf.newaxis]
        # Rows of dropped ids are zero.
        return self._combined(tf.reduce_sum(rows, -2), count)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Checks ids and returns the output of a functional model, for Keras."""
        self._check_dtype(inputs.dtype)
        self.strings |= inputs.dtype == "string"
        # The first axis is the batch.
        self._check_rank(len(inputs.shape) - 1)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the output shape, for Keras."""
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None else shape[:-1]), self.width)

    # previous_mask is Keras's name; ids have no mask.
    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:  # noqa: ARG002
        """Returns where dense ids are not padding, as ``mask_zero`` of Keras's layer does."""
        if not self.supports_masking or isinstance(inputs, tf.RaggedTensor | tf.SparseTensor):
            return None
        padding = str(self.padding) if inputs.dtype == "string" else self.padding
        return keras.ops.not_equal(inputs, padding)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that rebuild the layer."""
        options, initializer = self.options, self._initializer
        if not isinstance(initializer, str):
            initializer = keras.saving.serialize_keras_object(initializer)
        return {
            **super().get_config(),
            "width": self.width,
            "vocabulary": self.vocabulary,
            "combiner": self.combiner,
            "initializer": initializer,
            "optimizer": options.optimizer,
            "min_count": options.min_count,
            "max_rows": options.max_rows,
            "evict": options.eviction,
            "keep_evicted": options.keep_evicted,
            "out_of_vocabulary": self.out_of_vocabulary,
            "padding": self.padding,
            "table": options.name,
            "seed": options.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Embedding:
        """Inverse of :meth:`get_config`."""
        if isinstance(config["initializer"], dict):
            config = config | {"initializer": rebuild("initializer", config["initializer"])}
        return cls(**config)

    def _ragged(self, inputs: tf.RaggedTensor) -> Any:
        found = self._find(inputs.flat_values)
        if self.combiner is None:
            return inputs.with_flat_values(tf.cast(found[0], self.compute_dtype))
        if inputs.ragged_rank != 1 or inputs.flat_values.shape.rank != 1:
            raise self.refused(
                f"was given ragged ids of shape {inputs.shape}; expected [batch, None] to combine"
            )
        return self._segments(found, inputs.value_rowids(), inputs.nrows(), inputs.shape[0])

    def _sparse(self, inputs: tf.SparseTensor) -> Any:
        if self.combiner is None or inputs.shape.rank != 2:
            raise self.refused(
                f"was given sparse ids of shape {inputs.shape}; expected [batch, n] and a combiner"
            )
        found, batch = self._find(inputs.values), inputs.dense_shape[0]
        return self._segments(found, inputs.indices[:, 0], batch, inputs.shape[0])

    def _segments(
        self, found: Found, segments: tf.Tensor, batch: tf.Tensor, known: int | None
    ) -> tf.Tensor:
        rows, there = found
        ones = tf.ones_like(segments, rows.dtype) if there is None else tf.cast(there, rows.dtype)
        total = tf.math.unsorted_segment_sum(rows, segments, batch)
        count = tf.math.unsorted_segment_sum(ones, segments, batch)[:, tf.newaxis]
        combined = self._combined(total, count)
        combined.set_shape([known, self.width])
        return combined

    def _combined(self, total: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        if self.combiner != "sum":
            # Without ids the result is 0, not 0 / 0.
            count = tf.maximum(count, 1)
            total /= tf.sqrt(count) if self.combiner == "sqrtn" else count
        return tf.cast(total, self.compute_dtype)

    def _find(self, inputs: tf.Tensor) -> Found:
        """Returns the rows of ids in a dense tensor."""
        if not isinstance(inputs, tf.Tensor):
            inputs = tf.convert_to_tensor(inputs)
        self._check_dtype(inputs.dtype.name)
        self._check_rank(inputs.shape.rank)
        padding = self.padding
        if inputs.dtype == tf.string:
            ids = string_ids(inputs, self.vocabulary)
            if padding is not None:
                # No string hashes to this id.
                ids = tf.where(inputs == str(padding), tf.constant(-1, tf.int64), ids)
                padding = -1
        elif isinstance(padding, str):
            raise self.refused(f"has padding={padding!r}, but was given numbers; give the id")
        else:
            ids = tf.cast(inputs, tf.int64)
        rule = IdRule(self.name, self.out_of_vocabulary, padding, inputs.dtype == tf.string)
        asked = LookUpCall(self.options, rule, ids)
        source = self._held or present()
        if source is not None:
            return source.find(asked)
        # Fail before TensorFlow traces the look-up, whose errors it would wrap.
        self.known()
        return find_known(self.known, asked)

    def _check_dtype(self, dtype: str) -> None:
        # Not in an exported model: Keras traces subclassed models with floats for any inputs, and
        # its own layer casts these too.
        if self._rows is None and dtype != "string" and not dtype.startswith(("int", "uint")):
            raise self.refused(
                f"was given ids of dtype {dtype}; expected integers or strings: let the model, a "
                "Sequential one too, begin with keras.Input(shape, dtype='int64'), or cast them "
                "before anything makes them floats, which are not exact above 2^24"
            )

    def _check_rank(self, rank: int | None) -> None:
        if self.combiner is not None and not rank:
            raise self.refused("was given a scalar; there is nothing to combine")
