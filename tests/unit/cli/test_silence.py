"""Which workers are killed because nothing is heard of them. Counted in looks, not in time."""

from __future__ import annotations

import asyncio
import contextlib

from headrace.cli import silence
from headrace.cli.silence import FORGOTTEN_AFTER_S, Silence

HERE = {"decode-0": "box:1", "render-0": "box:2"}
ALL = frozenset(HERE.values())


def test_only_who_was_heard_before_can_fall_silent() -> None:
    silence = Silence()
    assert silence.look(HERE, frozenset({"box:1"}), 1.0) == {"decode-0": 0.0, "render-0": 0.0}
    assert silence.look(HERE, frozenset(), 1.0) == {"decode-0": 1.0, "render-0": 0.0}
    assert silence.look(HERE, frozenset(), 1.0) == {"decode-0": 2.0, "render-0": 0.0}


def test_a_heartbeat_ends_the_silence() -> None:
    silence = Silence()
    for heard in (ALL, frozenset(), ALL):
        silence.look(HERE, heard, 1.0)
    assert silence.look(HERE, frozenset(), 1.0)["decode-0"] == 1.0


def test_nobody_is_silent_while_the_broker_is_away() -> None:
    silence = Silence()
    silence.look(HERE, ALL, 1.0)
    silence.look(HERE, frozenset(), 1.0)
    assert silence.look(HERE, None, 60.0) == {"decode-0": 0.0, "render-0": 0.0}
    assert silence.look(HERE, frozenset(), 1.0) == {"decode-0": 1.0, "render-0": 1.0}


def test_a_worker_that_was_started_again_is_a_new_process() -> None:
    silence = Silence()
    silence.look(HERE, ALL, 1.0)
    silence.look(HERE, frozenset(), 9.0)
    again = {**HERE, "decode-0": "box:3"}
    assert silence.look(again, frozenset(), 1.0)["decode-0"] == 0.0


async def test_a_worker_is_killed_when_its_last_heartbeat_is_too_long_ago() -> None:
    killed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    looks = iter([frozenset({"box:1", "box:2"})])

    class Workers:
        def processes(self) -> dict[str, str]:
            return HERE

        def kill_worker(self, name: str, reason: str) -> None:
            killed.put_nowait((name, reason))

    watching = asyncio.create_task(
        silence.watch(
            Workers(),
            lambda: next(looks, frozenset({"box:2"})),
            silent_s=FORGOTTEN_AFTER_S + 0.002,
            interval_s=0.001,
        )
    )
    name, reason = await killed.get()
    assert (name, reason) == ("decode-0", "has sent no heartbeat for 6.002 s (up.silent_s)")
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
