"""Tells clients that keep their connection to go elsewhere, once the gateway is about to end."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSE = (b"connection", b"close")


class Goodbye:
    """Closes each connection after its answer while `is_draining`.

    Else a client would send its next request on a connection that is being closed, and not know
    whether it was accepted.
    """

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            await send(message)

        await self._app(scope, receive, send_last)
