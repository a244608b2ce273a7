"""The content of a file as an HTTP response, part by part as the client takes it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.shared.batches import FileRecord
from headrace.shared.errors import BrokerError, FileGoneError
from headrace.shared.files import FileStore, Part

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/octet-stream"

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class ContentResponse(Response):
    """A whole file or a range of it, or what there is of one that is still written."""

    media_type = MEDIA_TYPE

    def __init__(
        self, store: FileStore, tenant: str, record: FileRecord, range_header: str | None
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._record = record
        self._first: Part | None = None
        is_whole = record.state == "whole"
        self._parts = store.parts(
            tenant, record.id, num_parts=record.num_parts if is_whole else None
        )
        self._start = 0
        self._end: int | None = None
        if not is_whole:
            return  # how long it is, nobody knows yet
        start, end = 0, record.num_bytes
        self.headers["accept-ranges"] = "bytes"
        wanted = range_of(range_header, end)
        if wanted is not None:
            start, end = wanted
            if start >= end:
                self.status_code = 416
                self.headers["content-range"] = f"bytes */{record.num_bytes}"
                start = end = 0
            else:
                self.status_code = 206
                self.headers["content-range"] = f"bytes {start}-{end - 1}/{record.num_bytes}"
        self.headers["content-length"] = str(end - start)
        self._start, self._end = start, end

    async def begin(self) -> None:
        """Read the first part: what is missing at once is still a status. Raises: FileGoneError, BrokerError."""
        if self._end != self._start:
            self._first = await anext(self._parts, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that leaves lets `send` do nothing: so the broker is asked no further."""
        left = asyncio.create_task(_until_left(receive))
        try:
            await self._send(send, left)
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)

    async def _send(self, send: Send, left: asyncio.Task[None]) -> None:
        async with aclosing(self._parts) as parts:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                await self._send_parts(parts, send, left)
            except (FileGoneError, BrokerError) as error:
                logger.warning(
                    "the content of %s breaks off: %s",
                    self._record.id,
                    error,
                    extra={"action": "content_broken", "file_id": self._record.id},
                )
                return  # without an end: the server closes the connection, so that the client notices
        await send({"type": "http.response.body", "body": b""})

    async def _send_parts(
        self, parts: AsyncGenerator[Part], send: Send, left: asyncio.Task[None]
    ) -> None:
        position, part = 0, self._first
        while part is not None and not left.done():
            data = part.data[max(0, self._start - position) :]
            if self._end is not None:
                data = data[: max(0, self._end - max(position, self._start))]
            position += len(part.data)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if self._end is not None and position >= self._end:
                return
            part = await anext(parts, None)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def range_of(header: str | None, num_bytes: int) -> tuple[int, int] | None:
    """Return start and end of one range, the end not included; an empty one can't be satisfied. None: all of it."""
    match = _RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return None
    start, end = match.groups()
    if not start:
        return max(0, num_bytes - int(end)), num_bytes
    if end and int(end) < int(start):
        return None  # no range at all
    return int(start), min(num_bytes, int(end) + 1 if end else num_bytes)
