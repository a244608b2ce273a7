"""One file of results, as the parts that hold them: the batch's checkpoint.

A part is stored only as the next one, and says which lines are in it. A new owner puts a part of its own behind those
that are there, which holds nothing: from then on an older owner, wherever it was paused, can store no part any more.
So what the new owner has read is all that there is, and no line gets two results.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace.batch.errors import NotOwnerError
from headrace.batch.results import NO_USAGE, add
from headrace.shared.batches import BatchUsage
from headrace.shared.errors import BrokerError, ConflictError, QueueFullError
from headrace.shared.files import FileStore, Part

logger = logging.getLogger(__name__)

EPOCH = "Hr-Epoch"  # which owner has stored the part
LINES = "Hr-Lines"  # the numbers of the lines in it
USAGE = "Hr-Usage"  # the sums of their usage, in the order of `BatchUsage`'s fields
SWEPT = "Hr-Swept"  # the code of lines that were never run; empty: of others
AGAIN_S = 0.5


@dataclass
class Content:
    """What a file holds."""

    lines: set[int] = field(default_factory=set)
    usage: BatchUsage = NO_USAGE
    num_bytes: int = 0
    num_parts: int = 0
    swept: str = ""  #: the code of those that were never run; empty: there are none

    def note(self, lines: Collection[int], usage: BatchUsage, num_bytes: int, swept: str) -> None:
        """Count one more part."""
        self.lines.update(lines)
        self.usage = add(self.usage, usage)
        self.num_bytes += num_bytes
        self.num_parts += 1
        self.swept = self.swept or swept


class PartLog:
    """One of the two files of a batch, as its owner writes it."""

    def __init__(self, store: FileStore, tenant: str, file_id: str, epoch: int) -> None:
        """`epoch`: which owner this is, of all that the batch has had."""
        self._store = store
        self._tenant = tenant
        self.file_id = file_id
        self._epoch = epoch
        self.content = Content()

    async def take_over(self) -> None:
        """Read what is there, and let no earlier owner add to it. Raises: NotOwnerError, FileGoneError, BrokerError."""
        while True:
            async for part in self._store.parts(
                self._tenant, self.file_id, start=self.content.num_parts
            ):
                self._read(part)
            if self._epoch == 1:
                return  # nobody was before
            number = self.content.num_parts
            try:
                await self._store.append_part(
                    self._tenant, self.file_id, number, b"", {EPOCH: str(self._epoch)}
                )
            except ConflictError:
                continue  # an earlier owner was faster, this once
            self.content.num_parts += 1
            return

    async def append(
        self, data: bytes, lines: Collection[int], usage: BatchUsage, swept: str = ""
    ) -> None:
        """Store one part, however long the broker is away. Raises: NotOwnerError."""
        number = self.content.num_parts
        headers = {
            EPOCH: str(self._epoch),
            LINES: ",".join(map(str, lines)),
            USAGE: ",".join(map(str, _numbers(usage))),
        }
        if swept:
            headers[SWEPT] = swept
        while True:
            try:
                await self._store.append_part(self._tenant, self.file_id, number, data, headers)
            except ConflictError:
                if not await self._is_stored(number, headers):
                    raise NotOwnerError(f"{self.file_id}: another owner adds to it") from None
            except (BrokerError, QueueFullError) as error:
                logger.warning(
                    "results not stored yet: %s", error, extra={"action": "results_not_stored"}
                )
                await asyncio.sleep(AGAIN_S)
                continue
            self.content.note(lines, usage, len(data), swept)
            return

    async def _is_stored(self, number: int, headers: Mapping[str, str]) -> bool:
        """Whether an earlier try of this owner, which went unanswered, has stored the part."""
        while True:
            try:
                async for part in self._store.parts(
                    self._tenant, self.file_id, start=number, num_parts=number + 1
                ):
                    return all(
                        part.headers.get(name, "") == headers.get(name, "")
                        for name in (EPOCH, LINES)
                    )
                return False
            except BrokerError:
                await asyncio.sleep(AGAIN_S)

    def _read(self, part: Part) -> None:
        if int(part.headers.get(EPOCH, "0")) >= self._epoch:
            raise NotOwnerError(f"{self.file_id} has a part of a later owner")
        text = part.headers.get(LINES, "")
        usage = part.headers.get(USAGE, "")
        self.content.note(
            [int(number) for number in text.split(",")] if text else (),
            BatchUsage(**dict(zip(_FIELDS, map(int, usage.split(",")), strict=True)))
            if usage
            else NO_USAGE,
            len(part.data),
            part.headers.get(SWEPT, ""),
        )


_FIELDS = BatchUsage.__struct_fields__


def _numbers(usage: BatchUsage) -> list[int]:
    return [getattr(usage, name) for name in _FIELDS]
