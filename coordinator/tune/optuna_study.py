"""A study in Optuna: asks for points, reports evaluations, and says how trials end."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.search.points import Point, Space
from coordinator.search.space import RealRange, WholeRange
from coordinator.search.study_page import IMPORTANCE_TRIALS
from coordinator.search.trials import (
    Direction,
    TrialEnd,
    TrialPhase,
    TrialRecord,
    TrialValue,
)
from coordinator.tune.options import Pruner, Sampler

_PHASES: Mapping[str, TrialPhase] = {
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}
"""Phases of a trial by the name of Optuna's state."""

_VERDICT, _REASON, _SECONDS = "verdict", "reason", "seconds"
"""User attributes of a trial. Load-bearing: studies go on with other versions."""

REDUCTION = 4
"""At each rung, Hyperband goes on with a quarter of the trials, as in Li et al., "A System for
Massively Parallel Hyperparameter Tuning" (MLSys 2020). With a third, brackets of a few epochs would
prune late."""


@dataclass(frozen=True)
class StudyRules:
    """How a study chooses points and prunes trials.

    Attributes:
        epochs: number of epochs of a trial that is not pruned.
    """

    space: Space
    sampler: Sampler
    pruner: Pruner
    direction: Direction
    seed: int
    epochs: int

    def point(self, number: int) -> Point:
        """Returns the point of a trial if the rules alone decide it; empty if it depends on earlier
        trials."""
        if self.sampler == "grid":
            return self.space.grid_point(number)
        if self.sampler == "zip":
            return self.space.pair(number)
        return self.space.random_point(self.seed, number) if self.sampler == "random" else {}


class OptunaStudy:
    """The study in a journal file; only this process may write to the file. Not thread-safe."""

    def __init__(self, path: Path, name: str, rules: StudyRules) -> None:
        """Opens the journal; call :func:`coordinator.tune.directory.mend_journal` before.

        Hyperband draws a trial's bracket from ``name``.
        """
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._rules = rules
        with _quiet():
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(path))),
                study_name=name,
                direction="maximize" if rules.direction == "max" else "minimize",
                pruner=_pruner(rules),
                load_if_exists=True,
            )
        self._trials: dict[int, Any] = {}
        self._records: list[TrialRecord] | None = None

    def records(self) -> list[TrialRecord]:
        """Returns all trials by number; the same list until one of them has changed."""
        if self._records is None:
            self._records = stored_trials(self._study)
        return self._records

    def ask(self) -> TrialRecord:
        """Begins the next trial; stores it with its point."""
        number = len(self.records())
        self._choose_sampler(number)
        with _quiet():
            trial = self._study.ask()
        assert trial.number == number, (trial.number, number)
        return self._complete(trial)

    def take_up(self, number: int) -> TrialRecord:
        """Goes on with a trial that an earlier process has begun; chooses the values that its point
        lacks."""
        from optuna.trial import Trial

        self._choose_sampler(number)
        frozen = self._study.get_trials(deepcopy=False)[number]
        with _quiet():
            trial = Trial(self._study, frozen._trial_id)
        return self._complete(trial)

    def _complete(self, trial: Any) -> TrialRecord:
        with _quiet():
            for key, each in self._rules.space.ranges.items():
                if isinstance(each, RealRange):
                    trial.suggest_float(key, each.low, each.high, log=each.log)
                elif isinstance(each, WholeRange):
                    trial.suggest_int(key, each.low, each.high, log=each.log)
                else:
                    trial.suggest_categorical(key, each.values)
        self._trials[trial.number] = trial
        self._records = None
        number: int = trial.number
        return self.records()[number]

    def report(self, number: int, value: TrialValue) -> bool:
        """Stores an evaluation, unless its epoch has one already; returns whether the pruner wants
        to end the trial."""
        trial = self._trials[number]
        if value.epoch in {each.epoch for each in self.records()[number].values}:
            return False
        self._records = None
        trial.report(value.value, value.epoch)
        return value.epoch < self._rules.epochs and bool(trial.should_prune())

    def give_verdict(self, number: int, verdict: TrialEnd, reason: str) -> None:
        """Stores the `TrialEnd` of a trial, to be recorded once its run has ended."""
        self._records = None
        self._trials[number].set_user_attr(_REASON, reason)
        self._trials[number].set_user_attr(_VERDICT, verdict)

    def ran(self, number: int, seconds: float) -> None:
        """Adds to the time for which a trial has run; what a killed command ran is not counted."""
        self._records = None
        trial = self._trials[number]
        trial.set_user_attr(_SECONDS, trial.user_attrs.get(_SECONDS, 0.0) + seconds)

    def tell(
        self, number: int, end: TrialEnd, value: float | None = None, reason: str = ""
    ) -> None:
        """Ends a trial, with a ``value`` if it is complete.

        Optuna gets a failed trial as a pruned one: samplers ignore trials that failed in Optuna's
        sense, and would try the same learning rates again.
        """
        from optuna.trial import TrialState

        self._records = None
        trial = self._trials.pop(number)
        if reason:
            trial.set_user_attr(_REASON, reason)
        if end == "failed":
            trial.set_user_attr(_VERDICT, end)
        state = TrialState.COMPLETE if end == "complete" else TrialState.PRUNED
        self._study.tell(trial, value, state=state)

    def importance(self) -> dict[str, float]:
        """Returns how much each setting decides whether a trial is among the best tenth, as shares
        of 1, by PED-ANOVA (Watanabe et al., IJCAI 2023). Empty with fewer than
        :data:`IMPORTANCE_TRIALS` complete trials, or if all of them have the same value."""
        return importance_of(self._study, self.records())

    def _choose_sampler(self, number: int) -> None:
        """Makes the sampler of a trial. Its seed follows from the trial's number, so that a study
        that goes on draws no point twice."""
        from optuna import samplers

        point = self._rules.point(number)
        seed = zlib.crc32(f"{self._rules.seed} {number}".encode())
        with _quiet():
            if point:
                base = samplers.RandomSampler(seed=seed)
                self._study.sampler = samplers.PartialFixedSampler(dict(point), base)
            else:
                self._study.sampler = samplers.TPESampler(seed=seed, constant_liar=True)


def stored_trials(study: Any) -> list[TrialRecord]:
    """Returns the trials of an ``optuna.Study`` by number."""
    return [_record(each) for each in study.get_trials(deepcopy=False)]


def importance_of(study: Any, records: Sequence[TrialRecord]) -> dict[str, float]:
    """Returns what :meth:`OptunaStudy.importance` does, of any ``optuna.Study``."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    done = [each.value for each in records if each.phase == "complete"]
    if len(done) < IMPORTANCE_TRIALS or len(set(done)) == 1:
        return {}
    with _quiet():
        evaluator = PedAnovaImportanceEvaluator(evaluate_on_local=False)
        return dict(get_param_importances(study, evaluator=evaluator))


def _record(frozen: Any) -> TrialRecord:
    values = sorted(frozen.intermediate_values.items())
    attributes: Mapping[str, Any] = frozen.user_attrs
    phase = _PHASES[frozen.state.name]
    if phase == "pruned" and attributes.get(_VERDICT) == "failed":
        phase = "failed"
    return TrialRecord(
        number=frozen.number,
        phase=phase,
        point=dict(frozen.params),
        values=tuple(TrialValue(epoch, value) for epoch, value in values),
        value=frozen.value if phase != "failed" else None,
        verdict=str(attributes.get(_VERDICT, "")),
        reason=str(attributes.get(_REASON, "")),
        seconds=_seconds(frozen),
    )


def _seconds(frozen: Any) -> float | None:
    """Returns for how long a trial has run; for one of an older study, with its pauses."""
    if frozen.duration is None:
        # Of one that was stopped, or None.
        return frozen.user_attrs.get(_SECONDS)  # type: ignore[no-any-return]
    return float(frozen.user_attrs.get(_SECONDS, frozen.duration.total_seconds()))


def _pruner(rules: StudyRules) -> Any:
    from optuna import pruners

    if rules.pruner == "hyperband":
        return pruners.HyperbandPruner(1, rules.epochs, REDUCTION)
    return pruners.MedianPruner() if rules.pruner == "median" else pruners.NopPruner()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides Optuna's warnings about its experimental features."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield
