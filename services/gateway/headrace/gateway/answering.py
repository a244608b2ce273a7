"""The HTTP response of a call: one JSON body, or server-sent events as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.gateway.bounded_send import bounded
from headrace.gateway.call import Call, status_of
from headrace.gateway.errors import retry_after_header, retry_after_of
from headrace.gateway.events import Events, events_of
from headrace.gateway.handler import Handler
from headrace.shared.errors import EngineRequestError, RequestError
from headrace.shared.messages import Chunk, Failure, Status, Terminal
from headrace.shared.openai_errors import error_body

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


NOT_AGAIN = frozenset({409, 501, 504})
"""Statuses after which the same request would fare no better, and OpenAI's SDK would send it again by itself: an
ID that was used, something that isn't there, a deadline that has passed."""


def headers_of(
    request_id: str, retry_after_s: float | None = None, *, http_status: int = 200
) -> dict[str, str]:
    """Return the headers of every answer to a call, and of every error."""
    headers = {
        "X-Request-Id": request_id,
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
    }
    if http_status in NOT_AGAIN and retry_after_s is None:
        headers["x-should-retry"] = "false"
    if retry_after_s is not None:
        headers["Retry-After"] = retry_after_header(retry_after_s)
    return headers


def json_response(value: object, http_status: int = 200) -> Response:
    """Return a value as JSON that nobody keeps: the next call may find another one."""
    return Response(
        msgspec.json.encode(value),
        status_code=http_status,
        media_type=JSON,
        headers={"Cache-Control": "no-cache"},
    )


def error_response(error: RequestError, request_id: str) -> Response:
    """Return the response of a request that failed before anything of its answer was sent."""
    return Response(
        error_body(error),
        status_code=error.http_status,
        media_type=JSON,
        headers=headers_of(request_id, retry_after_of(error), http_status=error.http_status),
    )


def terminal_response(terminal: Terminal, request_id: str) -> Response:
    """Return the response that is all in the terminal.

    Raises: EngineRequestError when there is nothing in it, which must never be a 200.
    """
    if terminal.status != "ok":
        status, body = _failed_terminal(terminal)
    elif terminal.body:
        status, body = terminal.http_status, terminal.body
    else:
        raise EngineRequestError("the pipeline ended the request with an empty answer")
    return Response(
        body,
        status_code=status,
        media_type=JSON,
        headers=headers_of(request_id, terminal.retry_after_s, http_status=status),
    )


def sent(messages: list[Chunk | Terminal], events: Events) -> bytes:
    """Return the messages as server-sent events, to be sent in one write."""
    parts: list[bytes] = []
    for message in messages:
        if isinstance(message, Chunk):
            parts.append(events.chunk(message))
            continue
        if message.status != "ok":
            parts.append(events.error(_failed_terminal(message)[1]))
        parts.append(events.end())
    return b"".join(parts)


def _failed_terminal(terminal: Terminal) -> tuple[int, bytes]:
    """Return HTTP status and body; an error is never a 200, and never without a word."""
    status = terminal.http_status if terminal.http_status >= 400 else 500
    if terminal.body:
        return status, terminal.body
    unsaid = Failure(
        code="internal_error",
        message=f"the request ended ({terminal.status}) without a reason",
        http_status=status,
        error_type="InternalServerError",
    )
    return status, error_body(unsaid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What an answer looks like, where that is not all in the endpoint."""

    events: Events  #: of a stream
    body: Callable[[bytes], bytes] = lambda body: body  #: of a whole answer that is good
    headers: Mapping[str, str] = field(default_factory=dict)  #: beside those of every answer
    starts_at_once: bool = False  #: a stream begins before its first message, and with it the 200
    may_be_over: bool = False  #: of a stream its end may be all that is left


class CallResponse(Response):
    """Answers an open call, and closes it however it ends."""

    def __init__(self, call: Call, handler: Handler, form: Form | None = None) -> None:
        super().__init__()
        self._form = form or Form(events=events_of(call.record.endpoint))
        self._call = call
        self._handler = handler
        self._status: Status = "error"
        self._http_status: int | None = None
        self._reason: str | None = "the gateway failed"

    def with_headers(self, headers: Mapping[str, str]) -> CallResponse:
        """Return itself, with more headers."""
        self._form = replace(self._form, headers={**self._form.headers, **headers})
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. The first message decides the status; a client that leaves ends it."""
        watch = asyncio.create_task(_watch(receive, self._call))
        try:
            async with bounded(send, self._call.send_until) as send_within:
                await self._answer(scope, receive, send_within)
        except TimeoutError:  # a client that does not read; the server drops the connection
            self._end("expired", self._http_status, "the client does not read its answer")
        finally:
            watch.cancel()
            self._handler.close(self._call, self._status, self._http_status, self._reason)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._call.record
        try:
            if record.stream and self._form.starts_at_once:
                await self._stream([], send)
                return
            if record.stream:
                first = await self._call.next()
            else:
                first = [await self._call.terminal()]
            is_over = isinstance(first[0], Terminal) and first[0].status == "ok"
            if isinstance(first[0], Terminal) and not (is_over and self._form.may_be_over):
                response = terminal_response(self._whole(first[0]), record.request_id)
                self._end(first[0].status, response.status_code, None)
            else:
                await self._stream(first, send)
                return
        except RequestError as error:
            response = error_response(error, record.request_id)
            self._fail(error, response.status_code)
        response.headers.update(self._form.headers)
        await response(scope, receive, send)

    async def _stream(self, messages: list[Chunk | Terminal], send: Send) -> None:
        self._http_status = 200
        headers = headers_of(self._call.record.request_id) | {"Content-Type": EVENT_STREAM}
        headers |= self._form.headers
        events = self._form.events
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        opening = events.opening()
        while True:
            await send(_part(opening + sent(messages, events)))
            opening = b""
            if messages and isinstance(last := messages[-1], Terminal):
                self._end(last.status, 200, None)
                break
            try:
                messages = await self._call.next()
            except RequestError as error:
                self._fail(error, 200)
                await send(_part(events.error(error_body(error)) + events.end()))
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _whole(self, terminal: Terminal) -> Terminal:
        if terminal.status != "ok" or not terminal.body:
            return terminal
        return msgspec.structs.replace(terminal, body=self._form.body(terminal.body))

    def _fail(self, error: RequestError, http_status: int) -> None:
        self._end(status_of(error), http_status, error.message)

    def _end(self, status: Status, http_status: int | None, reason: str | None) -> None:
        self._status, self._http_status, self._reason = status, http_status, reason


def _part(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _watch(receive: Receive, call: Call) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    call.disconnect()
