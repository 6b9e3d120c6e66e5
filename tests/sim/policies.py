"""The policies that a seed implies: what a job begins with, and what it changes to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from psrpc.core.policy import ASYNC, Policy


@dataclass(frozen=True)
class Plan:
    """``then`` is what the job's own rule changes to after ``then_after`` epochs; ``changes`` are
    an operator's."""

    first: Policy
    then: Policy | None = None
    then_after: int = 0
    changes: tuple[Policy, ...] = ()


def draw_plan(random: Random, plain: Policy, epochs: int) -> Plan:
    """Policies around ``plain``, which is often all there is."""
    first = plain if random.random() < 0.4 else _varied(random, plain)
    if random.random() < 0.6:
        return Plan(first)
    if epochs > 1 and random.random() < 0.4:
        return Plan(first, then=_another(random), then_after=random.randint(1, epochs - 1))
    return Plan(first, changes=tuple(_another(random) for _ in range(random.randint(1, 2))))


def _another(random: Random) -> Policy:
    plain = ASYNC
    if random.random() < 0.5:
        plain = Policy(mode="sync", replicas=random.randint(1, 4))
    return plain if random.random() < 0.3 else _varied(random, plain)


def _varied(random: Random, plain: Policy) -> Policy:
    if plain.rounds:
        return _of_rounds(random, plain)
    if random.random() < 0.5:
        plain = Policy(mode="ssp", staleness=random.choice((0, 1, 3)))
    else:
        plain = Policy(max_staleness=random.choice((0, 1, 2, 4, None)))
    if random.random() < 0.3:
        plain = replace(plain, staleness_lr="inverse")
    if random.random() < 0.3:
        plain = replace(plain, delay_compensation=random.choice(("constant", "adaptive")))
    return plain


def _of_rounds(random: Random, plain: Policy) -> Policy:
    if random.random() < 0.3:
        plain = replace(plain, round_deadline_s=random.choice((0.1, 2.0)))
    if random.random() < 0.4:
        most = random.randint(2, 4)
        return replace(plain, replicas=most, aggregate=random.randint(1, most - 1))
    if random.random() < 0.7:
        plain = replace(plain, speculate=True)
    if random.random() < 0.4:
        plain = replace(plain, balance=True)
    return plain
