"""What the fake engines of both roles share: blocks, faults, death and counters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from headrace.engine.fake_blocks import BlockPool
from headrace.engine.fake_faults import FaultPlan
from headrace.engine.fake_text import VOCAB_SIZE, kv_content
from headrace.engine.interface import EngineInfo, EngineStats
from headrace.shared.errors import EngineDeadError, EngineRequestError
from headrace.shared.settings import Settings

BLOCK_BYTES = 4096
IDLE_STEP_S = 1.0  # of an engine in which everything waits


class FakeEngine:
    """What both roles share: blocks, faults, death, counters."""

    def __init__(self, settings: Settings, faults: FaultPlan | None) -> None:
        fake = settings.fake
        self.faults = faults or FaultPlan()
        self.info = EngineInfo(
            engine_id=str(uuid.uuid4()),
            block_size=settings.model.block_size,
            num_blocks=fake.num_blocks,
            max_model_len=settings.model.max_model_len or fake.max_model_len,
            vocab_size=VOCAB_SIZE,
            block_bytes=BLOCK_BYTES,
            lease_s=settings.nixl.lease_s,
        )
        self._settings = settings
        self.num_held = 0  #: requests that `FaultPlan.hold` holds now
        self._pool = BlockPool(fake.num_blocks)
        self._stats = EngineStats()
        self._dead: asyncio.Future[None] | None = None
        self._released = asyncio.Event()
        self._computing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._notifying: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        """Be ready. Never fails."""
        self._dead = asyncio.get_running_loop().create_future()
        return self.info

    async def check_health(self) -> None:
        """Raises: EngineDeadError after `die`, or before `start`."""
        self._check_alive()

    def release(self) -> None:
        """Let go of the requests that `FaultPlan.hold` holds, and hold no more."""
        self.faults.hold = False
        self._released.set()

    def die(self) -> None:
        """End the engine: every request in it, and every later one, raises EngineDeadError."""
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(None)
            self._pool.fail_waiting(EngineDeadError("the fake engine is dead"))
            self._notify()

    async def wait_until(self, condition: Callable[[EngineStats], bool]) -> None:
        """Return as soon as the condition is true of `stats()`; for tests."""
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self.stats()))

    def stats(self) -> EngineStats:
        """Return the counters as they are."""
        return dataclasses.replace(self._stats, num_blocks_free=self._pool.num_free)

    def _check_alive(self) -> None:
        if self._dead is None:
            raise EngineDeadError("the fake engine was not started")
        if self._dead.done():
            raise EngineDeadError("the fake engine is dead")

    def _add(self, **counts: float) -> None:
        """Add to the counters named, and wake who waits for them."""
        self._stats = dataclasses.replace(
            self._stats, **{name: getattr(self._stats, name) + n for name, n in counts.items()}
        )
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.ensure_future(notify())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """Count a request while it is in the engine; inject what is planned for it."""
        self._check_alive()
        if self.faults.die_next:
            self.faults.die_next = False
            self.die()
            self._check_alive()
        if self.faults.fail_next > 0:
            self.faults.fail_next -= 1
            raise EngineRequestError("injected: the fake engine was told to fail this request")
        self._add(num_running=1)
        try:
            yield
        finally:
            self._add(num_running=-1)

    @contextlib.asynccontextmanager
    async def _blocks(self, num_token_ids: int) -> AsyncGenerator[list[int], None]:
        """Hold the blocks of so many token IDs."""
        count = -(-num_token_ids // self.info.block_size)
        blocks = await self._pool.acquire(count)
        self._notify()
        try:
            yield blocks
        finally:
            self._pool.release(blocks)
            self._notify()

    async def _compute(self, token_ids: list[int]) -> bytes:
        """Take the time of a prompt's forward pass, one prompt at a time; return what it leaves."""
        await self._hold(len(token_ids))
        async with self._computing:
            await self._stall()
            seconds = len(token_ids) / 1000 * self._settings.fake.prefill_s_per_1k
            await self._unless_dead(asyncio.sleep(seconds + self.faults.extra_s))
        self._add(num_steps=1, num_local_computed_token_ids=len(token_ids))
        return kv_content(token_ids)

    async def _hold(self, num_token_ids: int) -> None:
        if self.faults.hold and num_token_ids >= self.faults.hold_from:
            self._released.clear()
            self.num_held += 1
            self._notify()
            try:
                await self._stepping(self._released.wait())
            finally:
                self.num_held -= 1

    async def _stall(self) -> None:
        """Hang as a step does that never ends, until the engine dies."""
        if self.faults.stall and self._dead is not None:
            await asyncio.wait({self._dead})

    async def _stepping(self, awaitable: Any) -> Any:
        """Await as an engine does that waits for a pull: it makes steps in which nothing comes out."""
        stepping = asyncio.create_task(self._step_idly())
        try:
            return await self._unless_dead(awaitable)
        finally:
            stepping.cancel()

    async def _step_idly(self) -> None:
        while True:
            await asyncio.sleep(IDLE_STEP_S)
            await self._stall()
            self._add(num_steps=1)

    async def _unless_dead(self, awaitable: Any) -> Any:
        """Await, but not beyond the engine's death."""
        assert self._dead is not None
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({task, self._dead}, return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
