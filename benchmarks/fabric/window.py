"""What all readers of the fabric's benchmark share: their options, what they note, and the window they note it in."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

PROMPT_TOKEN_IDS = 400
"""Of each prompt, in every program: the fake engine's time for it is part of each TTFT."""
RAMPS = 1.5
"""So many times `ramp_s` pass before the window begins."""


@dataclass
class Found:
    """What was read within the window."""

    ttft: list[float] = field(
        default_factory=list
    )  #: seconds, of requests that began in the window
    gaps: list[float] = field(default_factory=list)  #: seconds between two reads of one stream
    num_token_ids: int = 0
    num_answers: int = 0

    def note(
        self, num_token_ids: int, now: float, *, asked: float, last: float | None, since: float
    ) -> None:
        """Note what came at `now` of what was asked for at `asked`, if the window had begun (`since`).

        `last` is when something of the same answer came before; None: nothing did.
        """
        if now < since:
            return
        self.num_token_ids += num_token_ids
        if last is None and asked >= since:
            self.ttft.append(now - asked)
        elif last is not None and last >= since:
            self.gaps.append(now - last)

    def result(self, *, window_s: float, cpu_s: float) -> dict[str, Any]:
        """Return what `summary.row` takes of a reader; `cpu_s` is the reader's own."""
        return {
            "ttft_s": self.ttft,
            "gaps_s": self.gaps,
            "num_token_ids": self.num_token_ids,
            "num_answers": self.num_answers,
            "window_s": window_s,
            "cpu_s": cpu_s,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every reader is told."""
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--token-ids", type=int, required=True)
    parser.add_argument("--ramp-s", type=float, required=True)
    parser.add_argument("--window-s", type=float, required=True)
    parser.add_argument("--prompt-bytes", type=int, default=PROMPT_TOKEN_IDS)
    parser.add_argument("--cpus", default="")


def pin(cpus: str) -> None:
    """Stay on these CPUs, `0,1`; empty: anywhere."""
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


async def keep_open(
    streams: int,
    ramp_s: float,
    window_s: float,
    ask: Callable[[str, Found, float], Awaitable[None]],
    cpu_s: Callable[[], dict[str, float]],
) -> dict[str, Any]:
    """Keep so many streams open with `ask`, one request after the other; return what was found in the window.

    `ask(name, found, since)` has one request answered. `cpu_s` says what each process has used, `caller` this one.
    Raises: what `ask` raises.
    """
    begin = time.perf_counter() + ramp_s * RAMPS
    found = Found()

    async def stream(number: int) -> None:
        await asyncio.sleep(number / streams * ramp_s)
        count = 0
        while True:
            await ask(f"{number}-{count}", found, begin)
            count += 1

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    await asyncio.wait(tasks, timeout=ramp_s * RAMPS, return_when=asyncio.FIRST_COMPLETED)
    before = cpu_s()
    await asyncio.wait(tasks, timeout=window_s, return_when=asyncio.FIRST_COMPLETED)
    after, elapsed = cpu_s(), time.perf_counter() - begin
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    used = {name: after[name] - before[name] for name in after}
    return {**found.result(window_s=elapsed, cpu_s=used["caller"]), "by_service": used}
