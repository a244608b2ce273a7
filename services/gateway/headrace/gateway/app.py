"""The ASGI application: who may ask, which routes there are, and how their errors are answered."""

from __future__ import annotations

from collections.abc import Set
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from headrace.gateway.ask import Asker
from headrace.gateway.auth import OPEN_PATHS, Gate
from headrace.gateway.call_routes import add_call_routes
from headrace.gateway.console import assets
from headrace.gateway.console.routes import add_console
from headrace.gateway.handler import Handler
from headrace.gateway.keyring import Keyring
from headrace.gateway.lasting import Lasting, Terms
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.gateway.refusing import answer_errors
from headrace.gateway.response_routes import add_response_routes
from headrace.gateway.status_routes import add_status_routes


def create_app(
    link: Link,
    handler: Handler,
    asker: Asker,
    *,
    keyring: Keyring,
    tenant: str,
    operators: Set[str] = frozenset(),
    max_body_bytes: int,
    pace: Pace,
    lasting: Lasting | None = None,
) -> FastAPI:
    """Return the ASGI application; `tenant` is whose the requests are while no key is needed.

    `operators`: tenants whose keys also see where the workers run.
    """
    app = FastAPI(title="headrace", openapi_url=None)
    lasting = lasting or Lasting(link, handler, Terms())
    page = assets.load()
    answer_errors(app)
    app.add_middleware(
        Gate,
        keyring=keyring,
        tenant=tenant,
        operators=operators,
        open_paths=OPEN_PATHS | page.keys(),
    )
    add_call_routes(
        app, handler, asker, lasting.creations, max_body_bytes=max_body_bytes, pace=pace
    )
    add_response_routes(app, lasting.responses, lasting.readings, handler, pace=pace)
    add_status_routes(app, link, handler, lasting.readings, version=headrace_version())
    add_console(
        app,
        link,
        handler,
        version=headrace_version(),
        needs_key=lambda: keyring.is_on,
        files=page,
    )
    return app


def headrace_version() -> str:
    """Return the installed version."""
    try:
        return version("headrace")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
