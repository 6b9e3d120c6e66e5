"""Command streams: what was missed, then what comes; a slow reader is cut, not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.bell import Bell
from coordinator.streams import QUEUE, CommandStreams
from coordinator.work import Command, Ended, Release
from psrpc.errors import ResourceExhausted


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_missed_commands_come_first_and_the_end_ends_it() -> None:
    async def main() -> None:
        streams = CommandStreams(1)
        stream = streams.stream(0, [Release("missed")])
        assert await anext(stream) == Release("missed")
        streams.send(Release("new"))
        streams.send(Ended(False))
        assert [c async for c in stream] == [Release("new"), Ended(False)]
        assert streams.told(0)

    run(main())


def test_a_reader_that_does_not_come_back_was_not_told() -> None:
    async def main() -> None:
        streams = CommandStreams(1)
        stream = streams.stream(0, [Ended(False)])
        assert await anext(stream) == Ended(False)
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator
        assert not streams.told(0)

    run(main())


def test_a_newer_stream_ends_the_older() -> None:
    async def main() -> None:
        streams = CommandStreams(1)
        older = streams.stream(0, [Release("a")])
        await anext(older)
        newer = streams.stream(0, [Release("b")])
        await anext(newer)
        assert [c async for c in older] == []
        streams.send(Release("c"))
        assert await anext(newer) == Release("c")

    run(main())


def test_a_slow_reader_gets_what_there_was_and_is_cut() -> None:
    async def main() -> None:
        streams = CommandStreams(2)
        stream = streams.stream(0, [Release("first")])
        got: list[Command] = [await anext(stream)]
        for number in range(2 * QUEUE):
            streams.send(Release(str(number)))

        async def read_on() -> None:
            async for command in stream:
                got.append(command)

        with pytest.raises(ResourceExhausted, match=f"lags {QUEUE} commands"):
            await read_on()
        assert got[:3] == [Release("first"), Release("0"), Release("1")]
        assert len(got) <= QUEUE + 2

    run(main())


def test_a_bell_wakes_all_and_a_deadline_wakes_one() -> None:
    async def main() -> None:
        bell = Bell()
        loop = asyncio.get_running_loop()
        assert not await bell.wait(loop.time())
        waiting = [asyncio.ensure_future(bell.wait(loop.time() + 60)) for _ in range(3)]
        await asyncio.sleep(0)
        bell.ring()
        assert await asyncio.gather(*waiting) == [True, True, True]

    run(main())
