"""Command streams: what was missed, then what comes; a slow reader is cut, not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.training import streams as streams_module
from coordinator.training.streams import FEW, QUEUE, CommandStreams, Notifier
from psrpc.core.commands import Ended, Release
from psrpc.core.errors import ResourceExhausted


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_missed_commands_come_first_and_the_end_ends_it() -> None:
    async def main() -> None:
        streams = CommandStreams(1)
        stream = streams.open(0, 7, [Release("missed")])
        commands = aiter(stream)
        assert await anext(commands) == Release("missed")
        streams.send(Release("new"))
        streams.send(Ended(False))
        assert [c async for c in commands] == [Release("new"), Ended(False)]
        assert stream.told
        assert stream.over
        assert streams.close(stream)

    run(main())


def test_a_reader_that_does_not_come_back_was_not_told() -> None:
    async def main() -> None:
        stream = CommandStreams(1).open(0, 7, [Ended(False)])
        commands = aiter(stream)
        assert await anext(commands) == Ended(False)
        assert not stream.told

    run(main())


def test_a_parked_reader_hears_what_comes() -> None:
    async def main() -> None:
        streams = CommandStreams(2)
        commands = aiter(streams.open(1, 7, []))
        waiting = asyncio.ensure_future(anext(commands))
        await asyncio.sleep(0)
        streams.send_to(0, Release("for the other"))
        streams.send_to(1, Release("for this one"))
        assert await waiting == Release("for this one")

    run(main())


def test_a_newer_stream_ends_the_older() -> None:
    streams = CommandStreams(1)
    older = streams.open(0, 7, [Release("a"), Release("not said")])
    assert older.next() == Release("a")
    newer = streams.open(0, 7, [Release("b")])
    assert older.next() is None
    assert older.over
    assert not streams.close(older)
    assert newer.next() == Release("b")
    assert newer.next() is None
    assert not newer.over
    streams.send(Release("c"))
    assert newer.next() == Release("c")
    streams.end(0)
    streams.send(Release("unheard"))
    assert newer.next() is None
    assert newer.over


def test_a_slow_reader_gets_what_there_was_and_is_cut() -> None:
    streams = CommandStreams(2)
    stream = streams.open(0, 7, [Release("first")])
    for number in range(2 * QUEUE):
        streams.send(Release(str(number)))
    got = [stream.next() for _ in range(QUEUE)]
    assert got[:3] == [Release("first"), Release("0"), Release("1")]
    with pytest.raises(ResourceExhausted, match=f"shard 0 lags {QUEUE} commands"):
        stream.next()
    assert stream.next() is None
    assert stream.over


def test_a_bell_wakes_all_and_a_deadline_wakes_one() -> None:
    async def main() -> None:
        bell = Notifier()
        loop = asyncio.get_running_loop()
        assert not await bell.wait(loop.time())
        waiting = [asyncio.ensure_future(bell.wait(loop.time() + 60)) for _ in range(3)]
        await asyncio.sleep(0)
        bell.ring()
        assert await asyncio.gather(*waiting) == [True, True, True]

    run(main())


@pytest.mark.parametrize(("waiter_s", "looks_each"), [(0.0, 4), (3600.0, 1)])
def test_rings_that_come_faster_than_a_crowd_can_look_are_joined(
    monkeypatch: pytest.MonkeyPatch, waiter_s: float, looks_each: int
) -> None:
    monkeypatch.setattr(streams_module, "WAITER_S", waiter_s)

    async def main() -> None:
        bell, looks = Notifier(), 0
        loop = asyncio.get_running_loop()

        async def look() -> None:
            nonlocal looks
            while await bell.wait(loop.time() + 7200):
                looks += 1

        crowd = [asyncio.ensure_future(look()) for _ in range(2 * FEW)]
        for _ in range(5):
            bell.ring()
            # Time to look, and to wait again.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert looks == looks_each * len(crowd)
        for one in crowd:
            one.cancel()

    run(main())


def test_the_last_ring_is_not_lost_on_a_crowd() -> None:
    async def main() -> None:
        bell = Notifier()
        loop = asyncio.get_running_loop()
        for _ in range(2):
            crowd = [asyncio.ensure_future(bell.wait(loop.time() + 60)) for _ in range(2 * FEW)]
            await asyncio.sleep(0)
            bell.ring()
            assert all(await asyncio.gather(*crowd))

    run(main())
