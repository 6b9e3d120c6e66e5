"""What a user writes: ``job = Job(...)`` in a Python file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from psrpc.batch import batches_per_epoch
from psrpc.checkpoint_every import EXPECTED, CheckpointEvery, read_checkpoint_every
from psrpc.config_keys import did_you_mean
from psrpc.errors import InvalidSetting
from psrpc.job_instead import INSTEAD
from psrpc.policy import MODES, DelayCompensation, Mode, Policy, StalenessLr
from psrpc.tables import FULL_EVERY
from worker.data import DataSource
from worker.job_checks import (
    check_boolean,
    check_choice,
    check_class_weight,
    check_fraction,
    check_integer,
    check_loss,
    check_loss_weights,
    check_metrics,
    check_not_negative,
    check_source,
    show,
)
from worker.keep_best import parse_keep_best
from worker.phases import phases_of
from worker.plateau import parse_reduce_lr, parse_stop_early

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Engine = Literal["keras", "numpy"]
WireDtype = Literal["float32", "bfloat16", "float16"]
Compression = Literal["topk", "int8"]
ScaleLr = Literal["linear"]

ModelFactory: TypeAlias = "Callable[[], keras.Model | tf.Module]"
Loss: TypeAlias = "str | keras.losses.Loss | Callable[..., Any] | Mapping[str, Any] | Sequence[Any]"
LossWeights: TypeAlias = "float | Mapping[str, float] | Sequence[float]"
Metric: TypeAlias = "str | keras.metrics.Metric | Callable[..., Any]"
Optimizer: TypeAlias = "str | keras.optimizers.Optimizer | Callable[..., Any]"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. ``--set field=value`` overrides any field that is not code or data, and
    ``--set optimizer.argument=value`` an argument of the optimizer.

    Attributes:
        model: makes the model: a Keras model, or a plain ``tf.Module``. Called once per process,
            after all random seeds have been set from ``seed``.
        loss: for a Keras model a Keras loss, its class or its name, or ``f(y_true, y_pred)`` that
            returns one value per example or their mean; losses that layers add (regularizers) are
            added to it.
            Labels come in the rank of the output, ``[n]`` as ``[n, 1]`` where that is its shape, as
            in ``fit``. Of a model with several outputs one for all, a dict of those by the outputs'
            names, or a list in their order, as ``keras.Model.compile`` takes it; where the
            outputs are a dict, that is the order of their sorted names. None takes the
            loss that the model is compiled with, or its own ``compute_loss``. For a ``tf.Module`` a
            function ``f(module, x, y)`` that returns the mean loss over the batch, a scalar;
            ``f(module, x, y, sample_weight)`` when the data has weights.
        loss_weights: what the losses of several outputs are multiplied by before they are added
            up: a dict or list like ``loss``; None takes those that the model is compiled with.
        optimizer: a built-in Keras optimizer, its name, a function without arguments that makes
            one, or a function of ``total_updates``, the number of updates of the whole job (local
            steps of a worker are updates, too), so that a learning-rate schedule ends with the job
            in every mode. With ``use_ema`` all
            evaluations, the final one too, see the parameters as they are trained; an export
            takes the averages, as Keras does when ``fit`` ends. None takes the one that the model
            is compiled with.
        train: the training data, see ``worker.data``.
        eval: the data that each epoch is evaluated on, or None. Training does not wait: where
            epochs take less time than evaluations, some are left out, with a warning; see
            ``evaluate_every_epoch``.
        metrics: what to report beside the loss: names of Keras metrics, metrics, functions that
            make one, or functions ``f(y_true, y_pred)``. Of a model with several outputs a dict of
            lists by the outputs' names, as ``keras.Model.compile`` takes it. One whose state is not
            a sum over batches (a maximum) has no value of training data. Empty takes those that
            the model is compiled with. Keras models only.
        class_weight: what the loss of each training record is multiplied by, by its class:
            ``{0: 1.0, 1: 5.0}``, 1 for a class that is left out, as in ``keras.Model.fit``. For a
            model of one output, and data without sample weights.
        batch_size: examples of one micro-batch: what a worker computes one gradient on.
        epochs: passes over the training data.
        mode: ``async`` applies every gradient as it comes; ``sync`` applies the mean of
            ``replicas`` micro-batches at a time; ``ssp`` (stale synchronous parallel) applies every
            gradient as it comes, but lets no worker run more than ``staleness`` steps ahead of the
            slowest. ``--mode`` overrides it; what the file says for its own mode alone is then
            left out, ``then`` and ``scale_lr`` too.
        replicas: K, the micro-batches of one synchronous round. Needed in ``sync`` mode, here or
            with ``--replicas``. The result depends on it and not on how many workers there are.
        aggregate: M, how many of the K a round takes: the first that are done. The others count in
            a later round (backup workers) (sync).
        speculate: an idle worker computes a micro-batch that another one is late with (sync).
        round_deadline_s: name who is late with a round that lasts longer, in seconds (sync).
        balance: cut micro-batches by the speed of the workers that compute them; a round is of
            ``replicas * batch_size`` records as ever (sync).
        staleness: s, the steps that a worker may be ahead of the slowest (ssp). Needed there.
        max_staleness: gradients of older parameters are refused, and their batch is computed again
            (async).
        staleness_lr: ``inverse`` divides the learning rate by 1 + staleness (async, ssp).
        delay_compensation: corrects a gradient for the updates since it was computed, as DC-ASGD
            does: ``constant`` or ``adaptive`` (async, ssp).
        dc_lambda: λ of that; None takes the paper's (async, ssp).
        dc_decay: memory of the mean square of ``adaptive``; at least 0, below 1 (async, ssp).
            These are the settings of :class:`psrpc.policy.Policy`, which says more of each.
        then: the mode of the rest of the job, after ``then_after`` epochs in ``mode``. Each of the
            settings above belongs to the phases whose mode it fits.
        then_after: epochs before ``then``; fewer than ``epochs``.
        local_steps: H, the steps that a worker takes by itself, from the parameters that it has
            received, on H batches of ``batch_size`` records, before it pushes how far it came.
            Shards add that (async, ssp), or the mean over a round (sync). The job's optimizer runs
            in the worker, afresh each time, and must be SGD, with momentum or without; see
            :class:`worker.local_steps.LocalSteps`.
        scale_lr: ``linear`` multiplies the learning rate by the micro-batches of an update, for
            large batches (Goyal et al. 2017). Only rounds have several.
        warmup_epochs: over which ``scale_lr`` rises to that from 1; may be a fraction.
        prefetch_rows: pull the rows of embedding tables for the next batch while this one is
            computed, instead of with its push: a step waits less, and its rows are a step older,
            which counts as staleness (async, ssp).
        seed: of the initial values, the order of records and dropout masks.
        init_from: start from these values: a Keras file (``.keras``, ``.weights.h5``), the
            directory of an earlier checkpoint, or that of a run, whose newest good checkpoint is
            taken. The rows of tables with the same name and width are taken, too. Relative to the
            working directory, or a URL, see docs/urls.md.
        engine: who updates the parameters: ``keras`` runs any built-in Keras optimizer,
            ``numpy`` SGD, momentum, Adagrad and Adam, and needs no TensorFlow on the shards.
        checkpoint_every: from one checkpoint to the next, which is how much a loss may cost: global
            steps (500), or time with its unit (``"60s"``, ``"2m"``). None, ``--set
            checkpoint_every=none``, is 1000 steps or a minute, whichever comes first: it does not
            switch checkpoints off. Where time counts, checkpoints come so far apart that
            they take at most 5 % of the time.
        full_checkpoint_every: of so many checkpoints at least one has all rows of embedding tables
            by itself; the others have those touched since the one before, and files in common with
            it. More makes checkpoints smaller, and a restart reads more files.
        keep_checkpoints: how many of the newest checkpoints stay; older ones are removed.
        keep_best: keep the checkpoint that an evaluation found best as well: ``"max:accuracy"``,
            ``"min:loss"``, or the bare name of a result that has accuracy, auc, precision or recall
            in it (more is better), or loss, error or crossentropy (less is). With it the state
            that each epoch is evaluated on is written as a checkpoint. The best is one of the
            epochs that were evaluated, see ``evaluate_every_epoch``.
        evaluate_every_epoch: an epoch begins once the one before is evaluated, so that none is left
            out and ``keep_best`` chooses among all of them. Costs the time of an evaluation per
            epoch. ``stop_early`` and ``reduce_lr`` do the same.
        stop_early: end the run when epochs bring nothing more, as Keras's ``EarlyStopping`` does:
            ``"min:loss patience=3 min_delta=0.001 restore_best=true"``. The name is that of a
            result of evaluations, as in ``keep_best``; patience (0) is how many epochs may pass
            that are not better by more than min_delta (0). With restore_best (false) the run comes
            to the checkpoint of its best epoch, which is then kept like ``keep_best``'s.
        reduce_lr: multiply the learning rate when epochs bring nothing more, as Keras's
            ``ReduceLROnPlateau`` does: ``"min:loss factor=0.5 patience=2"``; further settings are
            min_delta (0.0001), cooldown (0) and min_lr (0); factor is 0.1 and patience 10 unless
            said. For a learning rate that is a number, not a schedule.
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
    wire_dtype: WireDtype = "float32"
    compression: Compression | None = None
    topk: float = 0.01

    def __new__(cls, **given: Any) -> Self:
        """Refuses what is no field before Python does, which does not name the nearest one."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                if name in INSTEAD:
                    hint = f"; {INSTEAD[name]}"
                else:
                    hint = did_you_mean(name, known) or f"; its fields are {', '.join(known)}"
                raise InvalidSetting(f"Job has no field {name}{hint}", code="PS104")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "epochs",
            "full_checkpoint_every",
            "keep_checkpoints",
            "local_steps",
        ):
            check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, 0, (1 << 64) - 1)
        try:
            read_checkpoint_every(self.checkpoint_every)
        except ValueError:
            raise InvalidSetting(
                f"checkpoint_every is {show(self.checkpoint_every)}; expected {EXPECTED}"
            ) from None
        for name in ("replicas", "intra_op_threads", "then_after"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("mode", self.mode, MODES)
        check_choice("then", self.then, (*MODES, None))
        check_choice("scale_lr", self.scale_lr, ("linear", None))
        check_not_negative("warmup_epochs", self.warmup_epochs)
        check_choice("engine", self.engine, ("keras", "numpy"))
        check_choice("wire_dtype", self.wire_dtype, ("float32", "bfloat16", "float16"))
        check_choice("compression", self.compression, ("topk", "int8", None))
        check_fraction("topk", self.topk, 0.5)
        if hasattr(self.model, "trainable_variables") and not isinstance(self.model, type):
            raise InvalidSetting(
                f"model is {show(self.model)}, a model; expected a function without arguments "
                "that makes one: each process makes its own (model=build, not model=build())"
            )
        if not callable(self.model):
            raise InvalidSetting(
                f"model is {show(self.model)}; expected a function without arguments that makes "
                "the model"
            )
        check_loss(self.loss)
        check_loss_weights(self.loss_weights)
        check_class_weight(self.class_weight)
        if not (
            self.optimizer is None
            or isinstance(self.optimizer, str)
            or callable(self.optimizer)
            or hasattr(self.optimizer, "get_config")
        ):
            raise InvalidSetting(
                f"optimizer is {show(self.optimizer)}; expected a Keras optimizer, its name or a "
                "function that makes one"
            )
        check_metrics(self.metrics)
        if self.keep_best is not None:
            parse_keep_best(self.keep_best)
            if self.eval is None:
                raise InvalidSetting(
                    f"keep_best is {self.keep_best!r}, but eval is None; nothing is evaluated"
                )
        check_boolean("evaluate_every_epoch", self.evaluate_every_epoch)
        if self.evaluate_every_epoch and self.eval is None:
            raise InvalidSetting(
                "evaluate_every_epoch is True, but eval is None; nothing is evaluated"
            )
        self._check_plateaus()
        check_source("train", self.train)
        if self.eval is not None:
            check_source("eval", self.eval)
        if self.init_from is not None and not isinstance(self.init_from, str | Path):
            raise InvalidSetting(f"init_from is {show(self.init_from)}; expected a path")

    def _check_plateaus(self) -> None:
        for name, parse in (("stop_early", parse_stop_early), ("reduce_lr", parse_reduce_lr)):
            text = getattr(self, name)
            if text is None:
                continue
            parse(text)
            if self.eval is None:
                raise InvalidSetting(f"{name} is {text!r}, but eval is None; nothing is evaluated")
            if name == "reduce_lr" and self.then is not None:
                raise InvalidSetting(
                    f"reduce_lr and then exclude each other: then is {self.then!r}, and a run that "
                    "has another learning rate than at first follows no rule"
                )
            if name == "reduce_lr" and self.local_steps > 1:
                raise InvalidSetting(
                    "reduce_lr and local_steps exclude each other: the learning rate of local "
                    "steps is the worker's own; give the optimizer a schedule"
                )

    def policy(self) -> Policy:
        """What the job begins with.

        Raises:
            InvalidJob: settings that do not fit the mode, or each other, or a rule that never ends.
        """
        return phases_of(self).first

    def then_policy(self) -> Policy | None:
        """What follows after ``then_after`` epochs; None without a rule. Raises as :meth:`policy`
        does."""
        return phases_of(self).then

    def total_updates(self) -> int:
        """Updates that every shard applies over the whole job, n of them in an epoch without
        rounds, n = ``ceil(N / (batch_size * local_steps))``, and ``ceil(n / M)`` in sync mode, M
        being the micro-batches that a round takes, since a round never crosses an epoch. Reads the
        size of the training data. Raises as :meth:`policy` does."""
        phases = phases_of(self)
        batches = batches_per_epoch(self.train.num_records, self.batch_size * self.local_steps)
        updates = phases.first_epochs * -(-batches // phases.first.taken)
        if phases.then is not None:
            rest = self.epochs - phases.first_epochs
            updates += rest * -(-batches // phases.then.taken)
        return updates

    def optimizer_updates(self) -> int:
        """What a function of ``total_updates`` that makes the optimizer is given: H local steps for
        each update of the shards."""
        return self.total_updates() * self.local_steps
