"""The fake engine's KV blocks: a pool, what each block holds, and leases on them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from headrace.shared.errors import EngineRequestError


class BlockPool:
    """KV blocks, given out in the order in which they were asked for."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._contents: dict[int, bytes] = {}
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    async def acquire(self, count: int) -> list[int]:
        """Return that many blocks, as soon as there are so many.

        Raises: EngineRequestError when there never will be.
        """
        if count > self.num_blocks:
            raise EngineRequestError(f"needs {count} KV blocks, the engine has {self.num_blocks}")
        if not self._waiting and count <= len(self._free):
            return self._take(count)
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        entry = (count, future)
        self._waiting.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._serve_waiting()
            elif not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def fail_waiting(self, error: Exception) -> None:
        """Raise the error in everyone who waits for blocks."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def write(self, blocks: list[int], content: bytes) -> None:
        """Fill blocks with what a prompt leaves."""
        self._contents.update(dict.fromkeys(blocks, content))

    def read(self, blocks: list[int]) -> bytes:
        """Return what is in the blocks; nobody checks whose it is, as in NIXL's read."""
        content = self._contents.get(blocks[0]) if blocks else None
        return content or blake2b(f"freed {blocks}".encode(), digest_size=16).digest()

    def release(self, blocks: list[int]) -> None:
        """Give blocks back. Their content is lost at once, so that a late read always shows."""
        for block in blocks:
            self._contents.pop(block, None)
        self._free.extend(blocks)
        self._serve_waiting()

    def _take(self, count: int) -> list[int]:
        return [self._free.popleft() for _ in range(count)]

    def _serve_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._take(count))


@dataclass(slots=True)
class _Lease:
    blocks: list[int]
    timer: asyncio.TimerHandle | None = None
    holders: set[object] = field(default_factory=set)


class Leases:
    """Blocks kept for a pull: freed by it, by a release, or when nobody comes in time."""

    def __init__(self, pool: BlockPool, lease_s: float, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._on_change = on_change
        self._leases: dict[str, _Lease] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_held(self) -> int:
        """How many of them somebody holds."""
        return sum(bool(lease.holders) for lease in self._leases.values())

    def add(self, request_id: str, blocks: list[int]) -> None:
        """Keep the blocks for the lease's time."""
        lease = self._leases[request_id] = _Lease(blocks)
        self._arm(request_id, lease)

    def hold(self, request_id: str, holder: object) -> None:
        """Stop the lease's clock while a decode engine is about to pull (vLLM: heartbeats)."""
        if lease := self._leases.get(request_id):
            lease.holders.add(holder)
            self._disarm(lease)
            self._on_change()

    def unhold(self, request_id: str, holder: object) -> None:
        """The holder is gone: the clock starts anew."""
        if (lease := self._leases.get(request_id)) and holder in lease.holders:
            lease.holders.discard(holder)
            if not lease.holders:
                self._arm(request_id, lease)

    def end(self, request_id: str) -> None:
        """Free the blocks, if they are still kept."""
        if lease := self._leases.pop(request_id, None):
            self._disarm(lease)
            self._pool.release(lease.blocks)
            self._on_change()

    def expire_all(self) -> None:
        """Let every lease that nobody holds run out now."""
        for request_id in [r for r, lease in self._leases.items() if not lease.holders]:
            self._expire(request_id)

    def close(self) -> None:
        """Stop every clock."""
        for lease in self._leases.values():
            self._disarm(lease)

    def _arm(self, request_id: str, lease: _Lease) -> None:
        loop = asyncio.get_running_loop()
        lease.timer = loop.call_later(self._lease_s, self._expire, request_id)

    def _disarm(self, lease: _Lease) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None

    def _expire(self, request_id: str) -> None:
        self.num_expired += 1
        self.end(request_id)
