"""The memory of shards in real runs beside its bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.memory import MB, MemoryWatch, Peak, bound
from benchmarks.scaling import MIB
from benchmarks.table import MISSING, OURS, markdown
from benchmarks.workloads import Dense, Transport

PARAMETERS = Dense(1, (64 * MIB,), steps=20)

SLOTS = {"sgd": 0, "adam": 2}


@dataclass(frozen=True)
class MemoryCase:
    """One shard of 256 MB; ``replicas`` is 0 in async mode."""

    engine: str
    optimizer: str
    transport: Transport = "shm"
    replicas: int = 0

    @property
    def bound(self) -> int:
        return bound(PARAMETERS.nbytes, SLOTS[self.optimizer], self.replicas, self.engine)


CASES = (
    *(MemoryCase(engine, name) for engine in ("keras", "numpy") for name in SLOTS),
    MemoryCase("keras", "adam", "tcp"),
    MemoryCase("keras", "adam", replicas=2),
)


@dataclass(frozen=True)
class MemorySample:
    """Peak memory of a shard; or why it is not known."""

    case: MemoryCase
    bound: int
    peak: Peak | None = None
    miss: str = ""


def measure() -> Iterator[MemorySample]:
    """All cases, once: memory does not vary as time does."""
    for case in CASES:
        try:
            yield MemorySample(case, case.bound, run_case(case))
        except RunFailed as error:
            yield MemorySample(case, case.bound, miss=str(error))


def run_case(case: MemoryCase) -> Peak:
    settings = [f"engine={case.engine}", f"optimizer={case.optimizer}"]
    if case.replicas:
        settings += ["mode=sync", f"replicas={case.replicas}"]
    with (
        Cluster(
            PARAMETERS,
            workers=max(1, case.replicas),
            transport=case.transport,
            settings=settings,
        ) as cluster,
        MemoryWatch(lambda: cluster.processes("pserver")) as watch,
    ):
        cluster.wait()
        (peak,) = watch.peaks()
    return peak


def table(samples: Sequence[MemorySample]) -> str:
    """Markdown."""
    header = ["engine, optimizer, mode, transport", "peak RSS (VmHWM), MB"]
    header += ["RssAnon, MB", "RssShmem, MB", "RssFile, MB", "bound, MB"]
    header += ["RSS", "RssAnon + RssFile"]
    rows = [[_name(s.case), *_cells(s), f"{s.bound // MB}", *_verdicts(s)] for s in samples]
    title = f"One shard of {PARAMETERS.nbytes // MB} MB of parameters.\n\n"
    return title + markdown(header, rows) + "\n"


def _name(case: MemoryCase) -> str:
    mode = f"sync K={case.replicas}" if case.replicas else "async"
    return f"{case.engine}, {case.optimizer}, {mode}, {OURS[case.transport]}"


def _cells(sample: MemorySample) -> list[str]:
    if sample.peak is None:
        return [MISSING] * 4
    peak = sample.peak
    return [f"{nbytes // MB}" for nbytes in astuple(peak)]


def _verdicts(sample: MemorySample) -> list[str]:
    """With and without the workers' segments."""
    if sample.peak is None:
        return [sample.miss, MISSING]
    own = sample.peak.anonymous + sample.peak.files
    return ["met" if n <= sample.bound else "**missed**" for n in (sample.peak.rss, own)]
