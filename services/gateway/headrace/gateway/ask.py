"""A question that one worker answers at once: no submission, no stream, one answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from headrace.gateway.errors import UnavailableError
from headrace.gateway.link import Link
from headrace.gateway.models import resolve_model
from headrace.shared import subjects, wire
from headrace.shared.errors import (
    BrokerError,
    EngineRequestError,
    ExpiredError,
    NoWorkerError,
    WireError,
)
from headrace.shared.messages import Ask, AskAnswer, DerenderAsk, RenderAsk

ON_TIME_S = 1.0  # past the deadline, for the worker's own word that it passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a client asks."""

    request_id: str  #: names it in logs
    tenant: str  #: whose question it is
    is_own_id: bool  #: the client chose `request_id`
    endpoint: RenderAsk | DerenderAsk  #: which endpoint the body is for
    model: str | None  #: served model name; None: the only one
    body: bytes  #: the client's own JSON
    timeout_s: float | None = None  #: until the deadline; None: the longest there is


class Asker:
    """Asks the stage that holds the code. Knows nothing of HTTP."""

    def __init__(
        self,
        link: Link,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._clock = clock

    async def ask(self, question: Question) -> AskAnswer:
        """Return the worker's answer, which may be an error too.

        Raises: ModelNotFoundError, BadRequestError; NoWorkerError when nobody listens; ExpiredError; UnavailableError
        without a broker.
        """
        timeout_s = min(question.timeout_s or self._timeout_s, self._timeout_s)
        try:
            model = resolve_model(self._link.workers, question.model)
            async with asyncio.timeout(timeout_s + ON_TIME_S):
                answer = await self._request(question, model, timeout_s)
        except TimeoutError:
            raise ExpiredError(
                f"{question.endpoint} was not answered within {timeout_s:g} s"
            ) from None
        except BrokerError as error:
            raise UnavailableError(f"the question was not asked: {error}") from error
        try:
            return wire.decode(answer, AskAnswer)
        except WireError as error:
            raise EngineRequestError(f"the answer can't be read: {error}") from error

    async def _request(self, question: Question, model: str, timeout_s: float) -> bytes:
        slug = subjects.model_slug(model)
        is_for_render = question.endpoint in get_args(RenderAsk)
        subject = subjects.render_ask(slug) if is_for_render else subjects.derender_ask(slug)
        ask = Ask(
            request_id=question.request_id,
            tenant=question.tenant,
            is_own_id=question.is_own_id,
            endpoint=question.endpoint,
            deadline=self._clock() + timeout_s,
            body=question.body,
        )
        try:
            # The time limit is the caller's: the broker layer's own has no error of its own.
            return await self._link.broker.request(
                subject, wire.encode(ask), timeout_s=timeout_s + 2 * ON_TIME_S
            )
        except NoWorkerError:
            stage = "render" if is_for_render else "derender"
            raise NoWorkerError(f"no {stage} worker of `{model}` answers at the moment") from None
