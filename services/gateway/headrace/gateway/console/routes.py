"""The page's routes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.gateway.answering import JSON
from headrace.gateway.auth import is_operator, tenant_of
from headrace.gateway.console import assets
from headrace.gateway.console.state import Console
from headrace.gateway.handler import Handler
from headrace.gateway.link import Link


def add_console(
    app: FastAPI,
    link: Link,
    handler: Handler,
    *,
    version: str,
    needs_key: Callable[[], bool],
    files: dict[str, assets.Asset],
) -> None:
    """Add the page's `files`, and `/console/state`."""
    console = Console(link, handler.recent)

    async def asset(request: Request) -> Response:
        found = files[request.url.path]
        headers = assets.HEADERS | {"ETag": found.etag}
        if found.etag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)

    for path in files:
        app.get(path)(asset)

    @app.get(f"{assets.ROOT}/state")
    async def state(request: Request) -> Response:
        shown = await console.state(
            tenant_of(request),
            version=version,
            needs_key=needs_key(),
            is_operator=is_operator(request),
            is_draining=handler.is_draining,
            num_running=handler.num_running,
        )
        return Response(
            msgspec.json.encode(shown), media_type=JSON, headers={"Cache-Control": "no-store"}
        )
