"""Files in memory, for what reads and writes them by parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from headrace.shared.errors import BrokerError, ConflictError
from headrace.shared.files import Part


class MemoryFiles:
    """A `FileStore` that counts; as long as it is away, nothing is stored or removed. It knows no tenants."""

    max_part_bytes = 1_000

    def __init__(self, part_bytes: int = 100) -> None:
        self.part_bytes = part_bytes
        self.files: dict[str, list[Part]] = {}
        self.is_away = False
        self.asked = asyncio.Event()  #: somebody has tried to store a part
        self.num_read = 0  #: parts
        self.num_deletes = 0  #: tried

    def add(self, file_id: str, *parts: bytes) -> None:
        """Have a file of these parts."""
        self.files[file_id] = [Part(number, data, {}) for number, data in enumerate(parts)]

    async def append_part(
        self,
        tenant: str,
        file_id: str,
        number: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.asked.set()
        self._answer()
        parts = self.files.setdefault(file_id, [])
        if len(parts) != number:
            raise ConflictError("taken")
        parts.append(Part(number, data, headers or {}))

    async def parts(
        self, tenant: str, file_id: str, *, start: int = 0, num_parts: int | None = None
    ) -> AsyncGenerator[Part]:
        for part in self.files.get(file_id, [])[start:num_parts]:
            self.num_read += 1
            yield part

    async def delete(self, tenant: str, file_id: str) -> None:
        self.num_deletes += 1
        self._answer()
        self.files.pop(file_id, None)

    def _answer(self) -> None:
        if self.is_away:
            raise BrokerError("away")
