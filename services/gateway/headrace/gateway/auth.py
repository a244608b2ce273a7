"""Who asks: each request's tenant, by its API key."""

from __future__ import annotations

from collections.abc import Set

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.gateway.answering import error_response
from headrace.gateway.errors import UnauthorizedError
from headrace.gateway.keyring import Keyring
from headrace.gateway.refusing import note_refusal
from headrace.gateway.request_headers import request_id_of

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What load balancers and supervisors ask; it tells nothing of any request."""


class Gate:
    """Lets in requests with a good key, before anything of them is read, and notes whose they are.

    It stands before the routes: without a key, nobody learns even which paths there are.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring,
        tenant: str,
        operators: Set[str] = frozenset(),
        open_paths: Set[str] = OPEN_PATHS,
    ) -> None:
        """`tenant` is whose the requests are while no key is needed; then everybody is an operator.

        `operators`: tenants that may know where the workers run. `open_paths` need no key.
        """
        self._app = app
        self._keyring = keyring
        self._tenant = tenant
        self._operators = operators
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its tenant, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = self._tenant
        if self._keyring.is_on and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            try:
                tenant = self._tenant_of(headers)
            except UnauthorizedError as error:
                request_id, _ = request_id_of(scope)
                note_refusal(request_id, error.code, error.http_status, action="unauthorized")
                response = error_response(error, request_id)
                response.headers["WWW-Authenticate"] = error.challenge
                await response(scope, receive, send)
                return
        state = scope.setdefault("state", {})
        state["tenant"] = tenant
        state["is_operator"] = not self._keyring.is_on or tenant in self._operators
        await self._app(scope, receive, send)

    def _tenant_of(self, headers: Headers) -> str:
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("send your API key in the header Authorization: Bearer <key>")
        owner = self._keyring.owner_of(key.strip())
        if owner is None:
            raise UnauthorizedError(
                "the API key is not known here, or has expired", challenge='error="invalid_token"'
            )
        return owner.tenant


def tenant_of(request: Request) -> str:
    """Return whose request it is, as the gate noted it."""
    tenant: str = request.state.tenant
    return tenant


def is_operator(request: Request) -> bool:
    """Return whether whoever asks may know where the workers run, as the gate noted it."""
    found: bool = request.state.is_operator
    return found
