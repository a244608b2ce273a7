"""A process's two connections as one: whether the broker is there, and what is done once it is back."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

from headrace.shared.broker.connection import Connection, DeniedError
from headrace.shared.errors import BrokerError, HeadraceError
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import ROOT

logger = logging.getLogger(__name__)


class Connections:
    """Tokens and results on `data`, control messages and settling on `control`.

    So a heartbeat or a cancel never waits behind megabytes.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        role: str,
        name: str,
        declare: Callable[[], Awaitable[None]],
    ) -> None:
        """`declare` makes streams and consumers what they should be; after an absence they may be gone."""
        self._settings = settings
        self._declare = declare
        self._user = settings.user or (role if settings.password else "")
        self._inbox_prefix = f"_INBOX_{re.sub(r'[^A-Za-z0-9_-]', '-', self._user or role)}"
        ends = (self._on_lost, self._on_back, self._on_closed)
        self.data = Connection(f"{role} {name} data", *ends)
        self.control = Connection(f"{role} {name} control", *ends)
        self.callbacks: list[Callable[[], Awaitable[None]]] = []  #: awaited each time it is back
        self.num_losses = 0  #: how often a connection to the broker broke
        #: when the broker was there for the last time (`time.monotonic`)
        self.lost_at = float("-inf")
        self.back_at = 0.0  #: when it was reached last, after a loss or at first (Unix seconds)
        self._ready = asyncio.Event()
        self._restoring: asyncio.Task[None] | None = None
        self._closed = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Connect and declare, waiting for the broker as long as it takes. Raises: BrokerError."""
        for connection in (self.data, self.control):
            await connection.open(self._settings, self._user, self._inbox_prefix)
        await self._declare()
        self._has_come()

    @property
    def is_ready(self) -> bool:
        """Whether nobody needs to wait: the broker is there, or will never be again."""
        return self._ready.is_set()

    @property
    def is_connected(self) -> bool:
        """Whether both are up and the streams declared."""
        return self._ready.is_set() and not self._closed and not self._failed.done()

    @property
    def is_closed(self) -> bool:
        """Whether they will never be up again."""
        return self._closed or self._failed.done()

    async def closed_for_good(self) -> None:
        """Never return. Raises: BrokerError when the broker ended a connection in a way that no reconnect mends."""
        await asyncio.shield(self._failed)

    def of(self, subject: str) -> Connection:
        """Return the connection that a subject's messages take."""
        return self.control if subject.startswith(f"{ROOT}.ctl.") else self.data

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the broker is there. Raises: BrokerError when it isn't in time, or won't be."""
        if not self._ready.is_set():
            try:
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._ready.wait()
            except TimeoutError:
                raise BrokerError(
                    f"not connected to {self._settings.shown_url} (broker.url) for {timeout_s:g} s"
                ) from None
        self.check_open()

    async def wait_until_connected(self) -> None:
        """Return once the broker is there. Raises: BrokerError after `publish_timeout_s`."""
        await self.wait_until_ready(self._settings.publish_timeout_s)

    def check_open(self) -> None:
        """Raises: BrokerError when the broker will never be there again, saying why."""
        if self._failed.done():
            self._failed.result()
        if self._closed:
            raise BrokerError("this broker connection was closed")

    def shut(self) -> bool:
        """Let nobody wait for the broker any more; what is on its way still goes out. False: it was shut before."""
        was_open = not self._closed
        self._closed = True
        self._ready.set()  # wake who waits; they see that it is closed
        return was_open

    async def close(self) -> None:
        """Flush and close both connections."""
        self.shut()
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        await asyncio.gather(self.data.close(), self.control.close())

    def _on_lost(self) -> None:
        self.num_losses += 1
        if not self._closed and not self._failed.done():
            if self._ready.is_set():
                self.lost_at = time.monotonic()
            self._ready.clear()

    def _on_closed(self, reason: str) -> None:
        if not self._closed and not self._failed.done():
            self._failed.set_exception(
                BrokerError(f"{self._settings.shown_url} closed the connection for good: {reason}")
            )
            self._failed.exception()  # seen: perhaps nobody waits for it
            self._ready.set()  # wake who waits; they see why

    def _has_come(self) -> None:
        self.back_at = time.time()
        self._ready.set()

    def _on_back(self) -> None:
        if self._closed or not (self.data.is_connected and self.control.is_connected):
            return
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore())

    async def _restore(self) -> None:
        try:
            await self._declare()
        except DeniedError as error:
            logger.error("streams not declared: %s", error, extra={"action": "declare_failed"})
        if not (self.data.is_connected and self.control.is_connected):
            return  # one of them broke meanwhile; when it is back, this begins anew
        self._has_come()
        logger.info("broker is back", extra={"action": "restored"})
        for callback in self.callbacks:
            try:
                await callback()
            except HeadraceError as error:
                logger.warning(
                    "after a reconnect: %s", error, extra={"action": "on_reconnect_failed"}
                )
