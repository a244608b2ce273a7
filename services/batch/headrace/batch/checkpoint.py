"""The results of one batch: held for a moment, then stored in parts, the answers in one file, the rest in another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from headrace.batch.part_log import PartLog
from headrace.batch.results import NO_USAGE, Outcome, add
from headrace.shared.batches import BatchCounts, BatchUsage, error_file_id, output_file_id
from headrace.shared.files import FileStore

PART_LINES = 1_000  # their numbers stand in a header
HELD_BYTES = 2**20  # more is stored at once
HELD_S = 1.0  # and less after so long
MAX_HELD_BYTES = 8 * 2**20  # with more than this no further line is begun
MAX_HELD_LINES = 2_000


@dataclass(kw_only=True)
class _Held:
    """Results that will be one part of a file."""

    is_ok: bool
    swept: str
    data: list[bytes] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    usage: BatchUsage = NO_USAGE
    num_bytes: int = 0

    def fits(self, outcome: Outcome, part_bytes: int) -> bool:
        return (
            (self.is_ok, self.swept) == (outcome.is_ok, outcome.swept)
            and len(self.lines) < PART_LINES
            and self.num_bytes + len(outcome.data) <= part_bytes
        )

    def add(self, line: int, outcome: Outcome) -> None:
        self.data.append(outcome.data)
        self.lines.append(line)
        self.usage = add(self.usage, outcome.usage)
        self.num_bytes += len(outcome.data)


class Checkpoint:
    """Takes results, and stores them; `run` runs beside whoever adds them."""

    def __init__(self, store: FileStore, tenant: str, batch_id: str, epoch: int) -> None:
        self._part_bytes = store.part_bytes
        self.max_line_bytes = store.max_part_bytes  #: of one result; a line is never cut
        self.output = PartLog(store, tenant, output_file_id(batch_id), epoch)
        self.errors = PartLog(store, tenant, error_file_id(batch_id), epoch)
        self._done: set[int] = set()
        self._filling: dict[bool, _Held] = {}  # is_ok → the part that still takes results
        self._full: deque[_Held] = deque()
        self._num_lines = 0  # that are held
        self._num_bytes = 0
        self._added = asyncio.Event()
        self._stored = asyncio.Event()
        self._closing = asyncio.Event()

    async def take_over(self) -> None:
        """Read what is there, and let no earlier owner add to it. Raises: NotOwnerError, FileGoneError, BrokerError."""
        await self.output.take_over()
        await self.errors.take_over()
        self._done = self.output.content.lines | self.errors.content.lines

    @property
    def num_done(self) -> int:
        """How many lines have their result, stored or held."""
        return len(self._done)

    def has(self, line: int) -> bool:
        """Whether a line has its result, stored or held."""
        return line in self._done

    def add(self, line: int, outcome: Outcome) -> None:
        """Take a line's result; it keeps the first one."""
        if line in self._done:
            return
        self._done.add(line)
        part = self._filling.get(outcome.is_ok)
        if part is None or not part.fits(outcome, self._part_bytes):
            if part is not None:
                self._full.append(part)
            part = self._filling[outcome.is_ok] = _Held(is_ok=outcome.is_ok, swept=outcome.swept)
        part.add(line, outcome)
        self._num_lines += 1
        self._num_bytes += len(outcome.data)
        self._added.set()

    async def room(self) -> None:
        """Wait until no more results are held than there is memory for."""
        while self._num_bytes > MAX_HELD_BYTES or self._num_lines > MAX_HELD_LINES:
            self._stored.clear()
            await self._stored.wait()

    async def run(self) -> None:
        """Store what was added, soon, until `close`. Raises: NotOwnerError."""
        while not (self._closing.is_set() and self._num_lines == 0):
            await self._added.wait()
            self._added.clear()
            if self._num_bytes < HELD_BYTES:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HELD_S):
                        await self._closing.wait()
            await self._store()

    def close(self) -> None:
        """Let `run` return once everything is stored."""
        self._closing.set()
        self._added.set()

    async def _store(self) -> None:
        """Store what is held. Raises: NotOwnerError."""
        self._full.extend(self._filling.values())
        self._filling.clear()
        while self._full:
            held = self._full[0]
            log = self.output if held.is_ok else self.errors
            await log.append(b"".join(held.data), held.lines, held.usage, held.swept)
            self._full.popleft()
            self._num_lines -= len(held.lines)
            self._num_bytes -= held.num_bytes
            self._stored.set()

    def counts(self, total: int) -> BatchCounts:
        """Return how many of `total` lines have a stored result."""
        return BatchCounts(
            total=total,
            completed=len(self.output.content.lines),
            failed=len(self.errors.content.lines),
        )
