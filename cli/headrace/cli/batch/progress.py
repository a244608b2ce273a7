"""How far a batch is: a bar on a terminal, else a line in the log now and then."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

logger = logging.getLogger(__name__)

BAR_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0


class Counts:
    """What was done since the start.

    How many lines there are is not known before the last is read: the share that is done goes by the file's bytes.
    """

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_bytes`: of the input; 0: unknown."""
        self.num_bytes = num_bytes
        self._clock = clock
        self._started = clock()
        self.num_skipped = 0  #: lines whose result was there
        self.num_ok = 0
        self.num_failed = 0
        self.num_token_ids = 0  #: of the answers
        self.num_done_bytes = 0  #: of the lines that have a result
        self._num_new_bytes = 0

    def skipped(self, num_bytes: int) -> None:
        """Count a line whose result was there before."""
        self.num_skipped += 1
        self.num_done_bytes += num_bytes

    def ended(self, num_bytes: int, *, is_ok: bool, num_token_ids: int = 0) -> None:
        """Count a line that has its result now."""
        self.num_ok += is_ok
        self.num_failed += not is_ok
        self.num_token_ids += num_token_ids
        self.num_done_bytes += num_bytes
        self._num_new_bytes += num_bytes

    @property
    def num_new(self) -> int:
        """How many lines have got their result since the start."""
        return self.num_ok + self.num_failed

    @property
    def seconds(self) -> float:
        """Since the start."""
        return max(self._clock() - self._started, 1e-6)

    @property
    def rates(self) -> str:
        """Since the start."""
        lines, tokens = self.num_new / self.seconds, self.num_token_ids / self.seconds
        return f"{lines:,.1f} lines/s, {tokens:,.0f} tokens/s"

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the rate so far. None: unknown."""
        if not self.num_bytes or not self._num_new_bytes:
            return None
        return (self.num_bytes - self.num_done_bytes) * self.seconds / self._num_new_bytes

    def __str__(self) -> str:
        num_done = self.num_skipped + self.num_new
        parts = [f"{num_done:,} lines", f"{self.num_failed:,} failed", self.rates]
        if self.seconds_left is not None:
            parts.append(f"{_clock_time(self.seconds_left)} left")
        return ", ".join(parts)


@asynccontextmanager
async def shown(counts: Counts) -> AsyncIterator[None]:
    """Show how far it is, as long as this is open."""
    show = _bar if sys.stderr.isatty() else _log
    showing = asyncio.create_task(show(counts))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _bar(counts: Counts) -> None:
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=counts.num_bytes or None, text="")
        while True:
            progress.update(task, completed=counts.num_done_bytes, text=str(counts))
            await asyncio.sleep(BAR_INTERVAL_S)


async def _log(counts: Counts) -> None:
    while True:
        await asyncio.sleep(LOG_INTERVAL_S)
        logger.info(
            "%s",
            counts,
            extra={
                "action": "batch_progress",
                "num_done": counts.num_skipped + counts.num_new,
                "num_failed": counts.num_failed,
                "num_token_ids": counts.num_token_ids,
            },
        )


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
