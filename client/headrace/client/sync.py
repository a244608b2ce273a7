"""The same client for code that does not run on an event loop: it brings one, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar

from headrace.client import client as asynchronous
from headrace.client.body import Body
from headrace.client.client import CANCELLED, DEFAULT_BROKER, EndpointName, LaneName
from headrace.client.results import Part, Result
from headrace.client.window import Window
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings

T = TypeVar("T")


class Client:
    """Blocking methods of the same names; any thread may call them.

    with Client("nats://127.0.0.1:4222") as client:
        result = client.result(client.submit({"model": "m", "messages": [...]}))
    """

    def __init__(
        self,
        broker: str | BrokerSettings = DEFAULT_BROKER,
        *,
        tenant: str = "default",
        connect_timeout_s: float = 10.0,
    ) -> None:
        """Connect. Raises: as the asynchronous client's constructor and `connect`."""
        self._client = asynchronous.Client(
            broker, tenant=tenant, connect_timeout_s=connect_timeout_s
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headrace-client", daemon=True
        )
        self._thread.start()
        try:
            self._call(self._client.connect())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect and end the thread; who waits in another one gets a BrokerError. What was submitted goes on."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._client.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(_end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(
        self,
        body: Body,
        *,
        lane: LaneName = "std",
        endpoint: EndpointName = "chat.completions",
        request_id: str | None = None,
        deadline_s: float | None = None,
        traceparent: str | None = None,
        reply_to: str | None = None,
    ) -> str:
        """As the asynchronous client's `submit`."""
        return self._call(
            self._client.submit(
                body,
                lane=lane,
                endpoint=endpoint,
                request_id=request_id,
                deadline_s=deadline_s,
                traceparent=traceparent,
                reply_to=reply_to,
            )
        )

    def result(self, request_id: str, timeout_s: float = 600.0) -> Result:
        """As the asynchronous client's `result`."""
        return self._call(self._client.result(request_id, timeout_s))

    def stream(
        self, request_id: str, from_seq: int = 0, *, timeout_s: float = 600.0
    ) -> Generator[Part | Result]:
        """As the asynchronous client's `stream`."""
        parts = self._client.stream(request_id, from_seq, timeout_s=timeout_s)
        try:
            while (part := self._call(_next(parts))) is not None:
                yield part
        finally:
            self._call(parts.aclose())

    def cancel(self, request_id: str, reason: str = CANCELLED) -> None:
        """As the asynchronous client's `cancel`."""
        self._call(self._client.cancel(request_id, reason))

    def run(
        self,
        body: Body,
        *,
        lane: LaneName = "std",
        endpoint: EndpointName = "chat.completions",
        request_id: str | None = None,
        deadline_s: float | None = None,
        cancel_reason: str = CANCELLED,
    ) -> Result:
        """As the asynchronous client's `run`; what interrupts it, as Ctrl-C, cancels the request."""
        return self._call(
            self._client.run(
                body,
                lane=lane,
                endpoint=endpoint,
                request_id=request_id,
                deadline_s=deadline_s,
                cancel_reason=cancel_reason,
            )
        )

    def map(
        self,
        bodies: Iterable[Body],
        *,
        concurrency: int = 16,
        ordered: bool = False,
        lane: LaneName = "bulk",
        endpoint: EndpointName = "chat.completions",
        deadline_s: float | None = None,
    ) -> Generator[tuple[int, Result]]:
        """As the asynchronous client's `map`; `bodies` is read in the caller's thread.

        So a result that is there waits until the next body is.
        """
        window = self._client.window(
            concurrency=concurrency,
            ordered=ordered,
            lane=lane,
            endpoint=endpoint,
            deadline_s=deadline_s,
        )
        try:
            for body in bodies:
                self._call(_start(window, body))
                while (indexed := self._call(_take(window))) is not None:
                    yield indexed
            while not window.is_empty:
                yield self._call(window.next())
        finally:
            self._call(window.aclose())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop's thread; what interrupts the wait, as Ctrl-C, cancels it."""
        if self._loop.is_closed():
            work.close()
            raise BrokerError("this client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise BrokerError("this client was closed") from None
        except BaseException:
            future.cancel()
            raise


async def _end_tasks() -> None:
    """End what other threads wait for: nothing runs on the loop after this."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next(parts: asynchronous.Parts) -> Part | Result | None:
    return await anext(parts, None)


async def _start(window: Window[Body], body: Body) -> None:
    window.start(body)


async def _take(window: Window[Body]) -> tuple[int, Result] | None:
    """Return a result that is there, and wait for one only when nothing more may start."""
    return await window.next() if window.is_full else window.take()
