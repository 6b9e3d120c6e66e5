"""The job that a user writes: ``job = Job(...)`` in a Python file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from psrpc.checkpoint.checkpoint_every import CheckpointEvery
from psrpc.core.batch import batches_per_epoch
from psrpc.core.errors import InvalidSetting
from psrpc.core.policy import MODES, DelayCompensation, Mode, Policy, StalenessLr
from psrpc.core.tables import FULL_EVERY
from worker.data.source import DataSource
from worker.job import checks
from worker.job.phases import phases_of
from worker.job.plateau import check_evaluated

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Engine = Literal["keras", "numpy"]
Dense = Literal["shards", "allreduce"]
WireDtype = Literal["float32", "bfloat16", "float16"]
Compression = Literal["topk", "int8"]
ScaleLr = Literal["linear"]
Devices = Mapping[str, int] | Literal["columns"]

_COUNTS = ("batch_size", "epochs", "full_checkpoint_every", "keep_checkpoints", "local_steps")

ModelFactory: TypeAlias = "Callable[[], keras.Model | tf.Module]"
Loss: TypeAlias = "str | keras.losses.Loss | Callable[..., Any] | Mapping[str, Any] | Sequence[Any]"
LossWeights: TypeAlias = "float | Mapping[str, float] | Sequence[float]"
Metric: TypeAlias = "str | keras.metrics.Metric | Callable[..., Any]"
Optimizer: TypeAlias = "str | keras.optimizers.Optimizer | Callable[..., Any]"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. ``--set field=value`` overrides any field that is not code or data, and
    ``--set optimizer.argument=value`` overrides an argument of the optimizer.

    Attributes:
        model: Function that makes the model: a Keras model, or a plain ``tf.Module``. Each process
            calls it once, after all random seeds have been set from ``seed``.
        loss: Loss of a batch. For a Keras model it is a Keras loss, its class, its name, or a
            function ``f(y_true, y_pred)`` that returns one value per example or their mean; losses
            that layers add (regularizers) are added to it.
            Labels have the rank of the output: ``[n]`` counts as ``[n, 1]`` where the output has
            that shape, as in ``fit``. A model with several outputs takes one loss for all of them,
            a dict by the outputs' names, or a list in their order, as ``keras.Model.compile``
            does; where the outputs are a dict, their order is that of the sorted names. None takes
            the loss that the model is compiled with, or the model's own ``compute_loss``. For a
            ``tf.Module`` the loss is a function ``f(module, x, y)`` that returns the mean loss over
            the batch, a scalar; ``f(module, x, y, sample_weight)`` where the data has weights.
        loss_weights: Factors of the losses of several outputs in their sum. A dict or list like
            ``loss``; None takes those that the model is compiled with.
        optimizer: Built-in Keras optimizer, its name, or a function that makes one. The function
            takes no argument, or ``total_updates``, the number of updates of the whole job (each
            local step of a worker counts as one), so that a learning-rate schedule ends with the
            job in every mode. With ``use_ema`` all evaluations, the final one too, use the
            parameters as they are trained; an export takes the averages, as Keras does when ``fit``
            ends. None takes the optimizer that the model is compiled with.
        train: Training data, a data source (``worker.data.source``). docs/data.md lists the
            sources.
        eval: Evaluation data, or None. Each epoch is evaluated on it, and training does not wait:
            where an epoch takes less time than an evaluation, some epochs are not evaluated, with
            a warning; see ``evaluate_every_epoch``.
        metrics: Metrics to report beside the loss. Names of Keras metrics, metrics, functions that
            make one, or functions ``f(y_true, y_pred)``. A model with several outputs takes a dict
            of lists by the outputs' names, as ``keras.Model.compile`` does. A metric whose state is
            not a sum over batches (a maximum) has no value for training data. Empty takes those
            that the model is compiled with. For Keras models only.
        class_weight: Factors of the loss of each training record, by its class. With
            ``{0: 1.0, 1: 5.0}`` classes that are left out have 1, as in ``keras.Model.fit``. For a
            model with one output, and data without sample weights.
        batch_size: Examples of one micro-batch: a worker computes one gradient from it.
        epochs: Passes over the training data.
        mode: How gradients of several workers are combined. ``async`` applies every gradient as it
            comes; ``sync`` applies the mean of ``replicas`` micro-batches at a time; ``ssp`` (stale
            synchronous parallel) applies every gradient as it comes, but lets no worker run more
            than ``staleness`` steps ahead of the slowest. ``--mode`` overrides it, and then leaves
            out the fields that only fit the mode in the file, ``then`` and ``scale_lr`` too.
        replicas: Micro-batches of one synchronous round, K (sync). ``sync`` mode needs it, here or
            with ``--replicas``. The result depends on it and not on the number of workers.
        aggregate: Micro-batches that a round takes, M of the K (sync). The round takes the first M
            that are done; the others count in a later round (backup workers).
        speculate: Whether an idle worker computes a micro-batch that another one is late with
            (sync).
        round_deadline_s: Seconds after which late workers of a round are named (sync).
        balance: Whether micro-batches are cut by the speed of the workers that compute them (sync).
            A round always has ``replicas * batch_size`` records.
        staleness: Steps that a worker may be ahead of the slowest, s (ssp). ``ssp`` mode needs it.
        max_staleness: Updates that a gradient may be behind (async). Older gradients are refused,
            and their batch is computed again.
        staleness_lr: ``inverse`` divides the learning rate by 1 + staleness (async, ssp).
        delay_compensation: Correction of a gradient for the updates since it was computed, as in
            DC-ASGD (async, ssp).
        dc_lambda: Factor λ of ``delay_compensation``; None takes the paper's (async, ssp).
        dc_decay: Decay of the mean square in ``delay_compensation="adaptive"``, at least 0 and
            below 1 (async, ssp). :class:`psrpc.core.policy.Policy` says more of the fields from
            ``mode`` on.
        then: Mode of the rest of the job, after ``then_after`` epochs in ``mode``. Each of the
            fields above belongs to the phases whose mode it fits.
        then_after: Epochs before ``then``; fewer than ``epochs``.
        local_steps: Steps that a worker takes on its own before it pushes, H. It takes them from
            the parameters that it has received, on H batches of ``batch_size`` records, and pushes
            the difference. Shards add that (async, ssp), or the mean over a round (sync). SGD
            alone, with momentum or without, which runs in the worker, afresh each time.
        scale_lr: ``linear`` multiplies the learning rate by the micro-batches of an update (sync).
            For large batches (Goyal et al. 2017).
        warmup_epochs: Epochs over which ``scale_lr`` rises from 1 to its full factor; may be a
            fraction.
        prefetch_rows: Whether a worker pulls the rows of embedding tables for the next batch while
            it computes this one (async, ssp). Otherwise they come with the reply to its push. A
            step then waits less, and its rows are one step older, which counts as staleness.
        seed: Seed of the initial values, the order of records and dropout masks.
        init_from: Initial values: a Keras file, a checkpoint, or a run. A Keras file is
            ``.keras`` or ``.weights.h5``; a checkpoint is the directory of an earlier one; of the
            directory of a run the newest good checkpoint is taken. Rows of tables with the same
            name and width are taken, too. Relative to the working directory, or a URL, see
            docs/urls.md.
        engine: Implementation of the optimizer on the shards. ``keras`` runs any built-in Keras
            optimizer; ``numpy`` has SGD, momentum, Adagrad and Adam, and needs no TensorFlow on the
            shards.
        checkpoint_every: Distance from one checkpoint to the next, in global steps (500) or in
            time (``"60s"``, ``"2m"``). It bounds what a loss may cost. None, ``--set
            checkpoint_every=none``, is 1000 steps or a minute, whichever comes first: it does not
            switch checkpoints off. Where time counts, checkpoints come so far apart that
            they take at most 5 % of the time.
        full_checkpoint_every: Of this many checkpoints at least one has all rows of embedding
            tables by itself. The others have the rows touched since the checkpoint before, and
            share files with it. More makes checkpoints smaller, and a restart reads more files.
        keep_checkpoints: Number of the newest checkpoints that stay; older ones are removed.
        keep_best: Keep the checkpoint with the best evaluation as well. ``"max:accuracy"``,
            ``"min:loss"``, or the bare name of a result that has accuracy, auc, precision or recall
            in it (more is better), or loss, error or crossentropy (less is). With it the state
            that each epoch is evaluated on is written as a checkpoint. The best is one of the
            epochs that were evaluated, see ``evaluate_every_epoch``.
        evaluate_every_epoch: Whether each epoch waits for the evaluation of the one before. Then
            none is left out, and ``keep_best`` chooses among all of them. Costs the time of an
            evaluation per epoch. ``stop_early`` and ``reduce_lr`` do the same.
        stop_early: End the run when epochs stop improving, as Keras's ``EarlyStopping`` does.
            ``"min:loss patience=3 min_delta=0.001 restore_best=true"``: the name is that of a
            result of evaluations, as in ``keep_best``; patience (0) is how many epochs may pass
            that are not better by more than min_delta (0). With restore_best (false) the run ends
            with the checkpoint of its best epoch, which is then kept like ``keep_best``'s.
        reduce_lr: Multiply the learning rate when epochs stop improving, as Keras's
            ``ReduceLROnPlateau`` does. ``"min:loss factor=0.5 patience=2"``; further settings are
            min_delta (0.0001), cooldown (0) and min_lr (0); factor is 0.1 and patience 10 by
            default. For a learning rate that is a number, not a schedule.
        intra_op_threads: Threads of one TensorFlow operation in a worker. Gradients have the same
            bits only where this is pinned; None leaves it to TensorFlow.
        devices: Devices of a worker that layers of a Keras model compute on, with their gradients:
            ``{"block1/*": 0, "block2/*": 1}`` by the names of layers (the first pattern that fits
            counts, others are on device 0); ``"columns"`` cuts the units of each
            ``keras.layers.Dense``. See docs/devices.md.
        sum_devices: Whether a worker pushes one sum for its devices (async). See docs/devices.md.
        exact: Whether a round has the same bits for any number of workers (sync). If not, each
            worker pushes one sum, with fewer bytes. See docs/devices.md.
        soft_placement: Whether layers whose device a worker lacks compute on its first one.
        dense: Where dense parameters are updated. ``shards``: in processes of their own.
            ``allreduce``: in the workers (sync), with the same bits; see docs/devices.md.
        slices: Number of slices (``allreduce``); None is ``--shards``, or 1 if there are tables.
        wire_dtype: Type that float32 parameters and gradients are rounded to between worker and
            shard. The 16-bit types halve the bytes. ``float16`` is finer than ``bfloat16``, but
            values beyond its range, 65504, become that, and values below 6e-8 become 0. Shards
            update, evaluate, checkpoint and export float32 all the same; float64 variables and
            state (BatchNormalization statistics) are never rounded.
        compression: Compression of the gradients of float32 variables, instead of rounding.
            ``int8`` is a quarter of the bytes; ``topk`` sends the fraction ``topk`` of the
            elements, those of largest magnitude. The worker keeps the rest and adds it to its
            next gradient. It is lost when the worker dies or joins anew, so with compression the
            results depend, in sync mode too, on which worker computes which batch.
        topk: Fraction of the elements of each shard's part that ``compression="topk"`` sends. At
            most one half; at least one element is sent.

    Raises:
        InvalidJob: a field is invalid; the message names it, the value and the fix.
    """

    model: ModelFactory
    loss: Loss | None = None
    loss_weights: LossWeights | None = None
    optimizer: Optimizer | None = None
    train: DataSource
    eval: DataSource | None = None
    metrics: Sequence[Metric] | Mapping[str, Any] = ()
    class_weight: Mapping[int, float] | None = None
    batch_size: int
    epochs: int = 1
    mode: Mode = "async"
    replicas: int | None = None
    aggregate: int | None = None
    speculate: bool = False
    round_deadline_s: float | None = None
    balance: bool = False
    staleness: int | None = None
    max_staleness: int | None = None
    staleness_lr: StalenessLr | None = None
    delay_compensation: DelayCompensation | None = None
    dc_lambda: float | None = None
    dc_decay: float = 0.95
    then: Mode | None = None
    then_after: int | None = None
    local_steps: int = 1
    scale_lr: ScaleLr | None = None
    warmup_epochs: float = 0.0
    prefetch_rows: bool = False
    seed: int = 0
    init_from: str | Path | None = None
    engine: Engine = "keras"
    checkpoint_every: CheckpointEvery = None
    full_checkpoint_every: int = FULL_EVERY
    keep_checkpoints: int = 5
    keep_best: str | None = None
    evaluate_every_epoch: bool = False
    stop_early: str | None = None
    reduce_lr: str | None = None
    intra_op_threads: int | None = None
    devices: Devices | None = None
    sum_devices: bool = False
    exact: bool = True
    soft_placement: bool = False
    dense: Dense = "shards"
    slices: int | None = None
    wire_dtype: WireDtype = "float32"
    compression: Compression | None = None
    topk: float = 0.01

    def __new__(cls, **given: Any) -> Self:
        """Refuses unknown fields with the nearest known name, which Python's own error lacks."""
        checks.check_field_names(given, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checks.check_integer(name, getattr(self, name), 1)
        checks.check_integer("seed", self.seed, 0, (1 << 64) - 1)
        checks.check_checkpoint_every(self.checkpoint_every)
        for name in ("replicas", "intra_op_threads", "then_after", "slices"):
            if getattr(self, name) is not None:
                checks.check_integer(name, getattr(self, name), 1)
        checks.check_choice("mode", self.mode, MODES)
        checks.check_choice("then", self.then, (*MODES, None))
        checks.check_choice("scale_lr", self.scale_lr, ("linear", None))
        checks.check_not_negative("warmup_epochs", self.warmup_epochs)
        checks.check_devices(self.devices, self.local_steps)
        checks.check_choice("engine", self.engine, ("keras", "numpy"))
        checks.check_choice("dense", self.dense, ("shards", "allreduce"))
        checks.check_choice("wire_dtype", self.wire_dtype, ("float32", "bfloat16", "float16"))
        checks.check_choice("compression", self.compression, ("topk", "int8", None))
        checks.check_fraction("topk", self.topk, 0.5)
        checks.check_model(self.model)
        checks.check_loss(self.loss)
        checks.check_loss_weights(self.loss_weights)
        checks.check_class_weight(self.class_weight)
        checks.check_job_optimizer(self.optimizer)
        checks.check_metrics(self.metrics)
        for name in ("evaluate_every_epoch", "soft_placement", "exact"):
            checks.check_boolean(name, getattr(self, name))
        if self.evaluate_every_epoch and self.eval is None:
            why = "evaluate_every_epoch is True, but eval is None; nothing is evaluated"
            raise InvalidSetting(why)
        for name in ("keep_best", "stop_early", "reduce_lr"):
            check_evaluated(self, name)
        checks.check_source("train", self.train)
        if self.eval is not None:
            checks.check_source("eval", self.eval)
        checks.check_path("init_from", self.init_from)

    def policy(self) -> Policy:
        """Returns the policy of the first phase. Raises InvalidJob if settings do not fit the mode
        or each other, or if a rule never ends."""
        return phases_of(self).first

    def then_policy(self) -> Policy | None:
        """Returns the policy after ``then_after`` epochs; None without a rule. Raises as
        :meth:`policy`."""
        return phases_of(self).then

    def total_updates(self) -> int:
        """Returns the updates that every shard applies over the whole job. An epoch without rounds
        has n = ``ceil(N / (batch_size * local_steps))``; in sync mode it has ``ceil(n / M)``, M
        being the micro-batches that a round takes, since a round never crosses an epoch. Reads the
        size of the training data. Raises as :meth:`policy`."""
        phases = phases_of(self)
        batches = batches_per_epoch(self.train.num_records, self.batch_size * self.local_steps)
        updates = phases.first_epochs * -(-batches // phases.first.taken)
        if phases.then is not None:
            rest = self.epochs - phases.first_epochs
            updates += rest * -(-batches // phases.then.taken)
        return updates

    def optimizer_updates(self) -> int:
        """Returns the ``total_updates`` that the optimizer function gets: H local steps per
        update."""
        return self.total_updates() * self.local_steps
