"""The client: submits, waits, reads, cancels. One connection pair for any number of requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from types import TracebackType
from typing import Literal, Self

from headrace.client.answers import Answers
from headrace.client.body import Body, encoded, model_of
from headrace.client.errors import NoResultError
from headrace.client.results import Part, Result
from headrace.client.window import Window, through
from headrace.shared import subjects, wire
from headrace.shared.broker import CLIENT, Broker, DeniedError
from headrace.shared.deadlines import timeout_of_body
from headrace.shared.errors import (
    BadRequestError,
    BrokerError,
    ExpiredError,
    MalformedMessageError,
    QueueFullError,
    RequestError,
)
from headrace.shared.messages import Cancel, Endpoint, Terminal
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane
from headrace.shared.submission import (
    ACCEPTED,
    DEADLINE,
    DEFAULT_DEADLINE_S,
    Submission,
    check_reply_to,
    valid_traceparent,
)

LaneName = Literal["rt", "std", "bulk"]
EndpointName = Endpoint
DEFAULT_BROKER = BrokerSettings()
Parts = AsyncGenerator[Part | Result]

GRACE_S = 5.0  # past its deadline, for the pipeline to say that a request has expired
CANCELLED = "cancelled by its caller"
AGAIN_S = 1.0  # between two attempts to submit to a broker that is away


class Client:
    """Another service's way into the pipeline, for one tenant.

        async with Client("nats://127.0.0.1:4222") as client:
            request_id = await client.submit({"model": "m", "messages": [...]})
            result = await client.result(request_id)

    What was submitted is not lost with the client: any other one of the same tenant may ask for it by its ID.
    """

    def __init__(
        self,
        broker: str | BrokerSettings = DEFAULT_BROKER,
        *,
        tenant: str = "default",
        connect_timeout_s: float = 10.0,
    ) -> None:
        """`broker` is a URL, or settings where there is more to say, as a user and password.

        Raises: BadRequestError for a tenant that can't stand in a subject.
        """
        self._settings = BrokerSettings(url=broker) if isinstance(broker, str) else broker
        self._tenant = _token(tenant, "tenant")
        self._connect_timeout_s = connect_timeout_s
        self._broker: Broker | None = None
        self._answers: Answers | None = None

    async def connect(self) -> None:
        """Connect to the broker. Raises: BrokerError when there is none in time, or it refuses this user."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                self._broker = await Broker.connect(
                    self._settings, role=CLIENT, name=uuid.uuid4().hex[:8]
                )
        except TimeoutError:
            raise BrokerError(f"no broker within {self._connect_timeout_s:g} s") from None
        self._answers = Answers(self._broker, self._tenant)

    async def aclose(self) -> None:
        """Disconnect. What was submitted goes on."""
        if self._answers is not None:
            await self._answers.aclose()
        if self._broker is not None:
            await self._broker.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def submit(
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
        """Submit one request and return its ID; it is accepted, and kept, when this returns.

        `request_id`: 1 to 128 of A-Z a-z 0-9 _ -; None: a new one. The same ID again is the same request, whatever
        its body: for 2 minutes the broker drops a second one. Later, one whose result is stored (lanes std and
        bulk, 3 days) is answered from there; one that still waits or runs may be computed twice, and has one end.
        `deadline_s`: in so many seconds it ends `expired`; None: the body's `request_timeout`, or its lane's default.
        `reply_to`: a subject `hr.v1.reply.<tenant>.<token>` to which the end is published as well.

        Raises: BadRequestError, PayloadTooLargeError, QueueFullError; BrokerError when it is unknown whether
        the request was accepted: submitting it again with the same ID is safe.
        """
        submission = self._submission(
            encoded(body),
            lane=lane,
            endpoint=endpoint,
            request_id=request_id,
            deadline_s=deadline_s,
            traceparent=traceparent,
            reply_to=reply_to,
        )
        await self._publish(submission, names_deadline=deadline_s is not None)
        return submission.request_id

    async def result(self, request_id: str, timeout_s: float = 600.0) -> Result:
        """Wait until a request has ended and return how; one that has ended already is returned at once.

        Results are kept for 3 days (lanes std and bulk) or 15 minutes (rt). Survives broker restarts.
        Raises: NoResultError after `timeout_s`, also for an ID that was never submitted; BadRequestError.
        """
        _token(request_id, "request_id")
        async with self._open.reading(request_id, from_seq=None) as answer:
            return Result.of_terminal(await answer.end(_in(timeout_s), timeout_s))

    async def stream(
        self, request_id: str, from_seq: int = 0, *, timeout_s: float = 600.0
    ) -> Parts:
        """Yield the parts of a streamed answer in order, each once, from `from_seq` on, and at last its result.

        To go on later, or elsewhere: `from_seq` is the `seq` of the last part plus 1. Parts are kept 15 minutes.
        Raises: NoResultError when nothing came for `timeout_s`, AnswerLostError when parts are gone,
        BadRequestError.
        """
        _token(request_id, "request_id")
        if from_seq < 0:
            raise BadRequestError(f"from_seq must be 0 or more, got {from_seq}")
        async with self._open.reading(request_id, from_seq=from_seq) as answer:
            while True:
                for message in await answer.next(_in(timeout_s), timeout_s):
                    if isinstance(message, Terminal):
                        yield Result.of_terminal(message)
                        return
                    yield Part.of_chunk(message)

    async def cancel(self, request_id: str, reason: str = CANCELLED) -> None:
        """Ask for a request to be stopped, wherever it is; `result` tells how it ended.

        It may have ended well meanwhile. Raises: BadRequestError, BrokerError.
        """
        _token(request_id, "request_id")
        cancel = Cancel(request_id=request_id, tenant=self._tenant, reason=reason)
        await self._connected.publish(
            subjects.cancel(self._tenant, request_id), wire.encode(cancel)
        )

    async def run(
        self,
        body: Body,
        *,
        lane: LaneName = "std",
        endpoint: EndpointName = "chat.completions",
        request_id: str | None = None,
        deadline_s: float | None = None,
        traceparent: str | None = None,
        cancel_reason: str = CANCELLED,
    ) -> Result:
        """Submit one request and return how it ended, through full queues and a broker that is away.

        The arguments are those of `submit`. A body that is refused gives a result with status `error`. When the
        task that waits is cancelled, so is the request, with `cancel_reason`.

        Raises: BrokerError when trying again is no use.
        """
        request_id = uuid.uuid4().hex if request_id is None else request_id
        try:
            submission = self._submission(
                encoded(body),
                lane=lane,
                endpoint=endpoint,
                request_id=request_id,
                deadline_s=deadline_s,
                traceparent=traceparent,
            )
            return await self._bring_to_its_end(submission)
        except RequestError as error:
            return Result.of_error(request_id, error)
        except asyncio.CancelledError:
            with contextlib.suppress(BrokerError):
                await self.cancel(request_id, cancel_reason)
            raise

    async def map(
        self,
        bodies: Iterable[Body] | AsyncIterable[Body],
        *,
        concurrency: int = 16,
        ordered: bool = False,
        lane: LaneName = "bulk",
        endpoint: EndpointName = "chat.completions",
        deadline_s: float | None = None,
    ) -> AsyncGenerator[tuple[int, Result]]:
        """Yield the result of each body with its index, as they come, or in order.

        At most `concurrency` requests are under way, and no more bodies and results are held than that (in order:
        four times as many). A body that is refused gives a result with status `error`. A queue that is full, or a
        broker that is away, is waited for until the deadline, which counts from when a body is read. Closing
        this generator, or an exception, cancels what is under way.

        Raises: what `bodies` raises, ValueError, BrokerError when trying again is no use.
        """
        window = self.window(
            concurrency=concurrency,
            ordered=ordered,
            lane=lane,
            endpoint=endpoint,
            deadline_s=deadline_s,
        )
        async for indexed in through(window, bodies):
            yield indexed

    def window(
        self,
        *,
        concurrency: int,
        ordered: bool,
        lane: LaneName,
        endpoint: EndpointName,
        deadline_s: float | None,
    ) -> Window[Body]:
        """Return what `map` puts its bodies through. Raises: ValueError."""

        async def run(body: Body) -> Result:
            return await self.run(body, lane=lane, endpoint=endpoint, deadline_s=deadline_s)

        return Window(run, concurrency=concurrency, ordered=ordered)

    async def _bring_to_its_end(self, submission: Submission) -> Result:
        """Submit and wait, through full queues and a broker that is away, until the deadline.

        Raises: ExpiredError, RequestError for a body that is refused, BrokerError when trying again is no use.
        """
        is_accepted = False
        while True:
            try:
                if not is_accepted:
                    await self._publish(submission, names_deadline=True)
                    is_accepted = True
                remaining = max(0.0, submission.deadline - time.time())
                return await self.result(submission.request_id, remaining + GRACE_S)
            except (QueueFullError, BrokerError) as error:
                wait_s = error.retry_after_s if isinstance(error, QueueFullError) else AGAIN_S
                if isinstance(error, DeniedError) or self._connected.is_closed:
                    raise
                if time.time() + wait_s > submission.deadline:
                    raise ExpiredError(f"the deadline is over, and {error}") from error
            except NoResultError as error:
                raise ExpiredError(f"the deadline is over, and {error}") from error
            await asyncio.sleep(wait_s)

    async def _publish(self, submission: Submission, *, names_deadline: bool) -> None:
        """Publish; what only this machine's clock says is left to the broker's."""
        headers = submission.to_headers()
        del headers[ACCEPTED]
        if not names_deadline:
            del headers[DEADLINE]
        await self._connected.publish_durable(
            submission.subject, submission.body, message_id=submission.message_id, headers=headers
        )

    def _submission(
        self,
        body: bytes,
        *,
        lane: LaneName,
        endpoint: EndpointName,
        request_id: str | None,
        deadline_s: float | None,
        traceparent: str | None = None,
        reply_to: str | None = None,
    ) -> Submission:
        now = time.time()
        try:
            urgency = Lane(lane)
            if deadline_s is None:
                deadline_s = timeout_of_body(body) or DEFAULT_DEADLINE_S[urgency]
            return Submission(
                request_id=subjects.check_token(request_id or uuid.uuid4().hex, "request_id"),
                tenant=self._tenant,
                slug=subjects.model_slug(model_of(body)),
                lane=urgency,
                endpoint=endpoint,
                deadline=now + deadline_s,
                accepted=now,
                body=body,
                traceparent=valid_traceparent(traceparent),
                reply_to=check_reply_to(reply_to, self._tenant),
                is_own_id=request_id is not None,
            )
        except (MalformedMessageError, ValueError) as error:
            raise BadRequestError(str(error)) from None

    @property
    def _connected(self) -> Broker:
        if self._broker is None:
            raise BrokerError("this client is not connected: use `async with`, or call connect()")
        return self._broker

    @property
    def _open(self) -> Answers:
        if self._answers is None:
            raise BrokerError("this client is not connected: use `async with`, or call connect()")
        return self._answers


def _token(value: str, what: str) -> str:
    try:
        return subjects.check_token(value, what)
    except MalformedMessageError as error:
        raise BadRequestError(str(error)) from None


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
