"""One request over HTTP, by a client that may leave, cancel, or stop reading for a while."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from .answers import Streamed, problems_of_body
from .orders import PATHS, Order
from .record import Record

HANG_S = 40.0  # this long past its deadline a request is given up: longer than any ack_wait
NOT_ACCEPTED = ("not accepted", "not connected", "shutting down", "no model is served")

Cancel = Callable[[Record], Awaitable[None]]


class _Left(Exception):
    """The client goes away, as its order says."""


def new_client() -> httpx.AsyncClient:
    """Return what all requests go through; each has a connection of its own, which a dead gateway can't spoil."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(None, connect=5.0)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)


async def send(
    http: httpx.AsyncClient, order: Order, record: Record, url: str, cancel: Cancel
) -> None:
    """Send an order to the gateway at `url`, and note what comes of it. `cancel` cancels it."""
    record.deadline = record.sent + order.timeout_s
    leaves = order.acts_by_time and order.ending == "leave"
    patience = asyncio.timeout(order.after_s if leaves else order.timeout_s + HANG_S)
    cancelling = None
    try:
        async with patience:
            if order.acts_by_time and not leaves:
                cancelling = asyncio.create_task(_cancel_later(order, record, cancel))
            await _ask(http, order, record, url, cancel)
    except _Left:
        record.end = "left"
    except (httpx.ConnectError, httpx.ConnectTimeout):
        record.end = "refused"
    except httpx.TransportError as error:
        record.end, record.message = "cut", repr(error)
    except TimeoutError:
        record.end = "left" if leaves else "none"
        if not leaves:
            return
    finally:
        if cancelling is not None:
            cancelling.cancel()
            await asyncio.gather(cancelling, return_exceptions=True)
    record.ended = time.time()


async def _ask(
    http: httpx.AsyncClient, order: Order, record: Record, url: str, cancel: Cancel
) -> None:
    headers = {
        "X-Request-Id": record.request_id,
        "X-Request-Timeout": f"{order.timeout_s:.3f}",
    }
    request = http.build_request(
        "POST", url + PATHS[order.endpoint], json=order.body, headers=headers
    )
    response = await http.send(request, stream=True)
    try:
        record.http_status = response.status_code
        if response.status_code != 200:
            _note_error(record, await response.aread())
        elif order.stream:
            record.accepted = time.time()
            await _read_events(order, record, response, cancel)
        else:
            body = await response.aread()
            record.accepted = time.time()
            record.end, record.problems = "ok", problems_of_body(order, body)
    finally:
        await response.aclose()


async def _cancel_later(order: Order, record: Record, cancel: Cancel) -> None:
    await asyncio.sleep(order.after_s)
    await cancel(record)


async def _read_events(
    order: Order, record: Record, response: httpx.Response, cancel: Cancel
) -> None:
    streamed = Streamed(order)
    acted = False
    try:
        async for data in _events(response):
            streamed.event(data)
            if order.after_events is None or acted:
                continue
            if streamed.num_events >= order.after_events:
                acted = True
                if order.ending == "leave":
                    raise _Left
                if order.ending == "cancel":
                    await cancel(record)
                if order.ending == "stall":
                    await asyncio.sleep(order.after_s)
    except BaseException:
        record.problems = streamed.check_so_far()
        record.num_events = streamed.num_events
        raise
    record.num_events = streamed.num_events
    if streamed.error is not None:
        record.problems = streamed.check_so_far()
        if not streamed.is_done:
            record.problems.append("no [DONE] behind the error event")
        _note(record, streamed.error)
    else:
        record.end, record.problems = "ok", streamed.check()


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _note_error(record: Record, body: bytes) -> None:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        record.end = "error"
        record.problems.append(f"an error without OpenAI's body: {body[:100]!r}")
        return
    _note(record, error)


def _note(record: Record, error: dict[str, object]) -> None:
    record.message = str(error.get("message"))
    code = error.get("code")
    if not isinstance(code, int) or not error.get("type"):
        record.problems.append(f"an error that is not typed: {error}")
    if record.http_status is not None and record.http_status != 200 and code != record.http_status:
        record.problems.append(f"HTTP {record.http_status}, but the body says {code}")
    record.http_status = code if isinstance(code, int) else None
    refused = record.num_events == 0 and any(text in record.message for text in NOT_ACCEPTED)
    record.end = "refused" if refused or code == 429 else "error"


async def cancel(http: httpx.AsyncClient, record: Record, url: str) -> None:
    """Cancel a request at the gateway at `url`; one that is away can't be asked."""
    try:
        answer = await http.post(f"{url}/requests/{record.request_id}/cancel", timeout=5.0)
    except httpx.TransportError:
        return
    if answer.status_code >= 500 and answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        record.problems.append(f"cancel was answered {answer.status_code}: {answer.text[:100]}")
