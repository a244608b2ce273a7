"""Dead letters as an operator looks at them: who put what aside, and why; the caller's words only on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headrace.shared import token_ids, wire
from headrace.shared.broker import Broker, Kept
from headrace.shared.errors import WireError
from headrace.shared.messages import DeadLetter, Job, PrefillTask
from headrace.shared.subjects import ROOT
from headrace.shared.submission import Submission

STREAM = "HR_DLQ"
Request = Submission | Job | PrefillTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    """One dead letter."""

    id: int  #: its sequence in the stream
    stored: float  #: when it was put aside (Unix seconds)
    stage: str  #: by the subject, to which the broker holds each stage
    content: DeadLetter | None  #: None: it can't be read
    request: Request | None  #: None: what was put aside can't be read
    size_bytes: int  #: of what was put aside
    reason: str

    def row(self) -> dict[str, Any]:
        """Return what a list says of it, as JSON takes it."""
        return {
            "id": self.id,
            "time": _time(self.stored),
            "stage": self.stage,
            "subject": None if self.content is None else self.content.subject,
            "reason": self.reason,
            "num_delivered": None if self.content is None else self.content.num_delivered,
            "request_id": None if self.request is None else self.request.request_id,
            "size_bytes": self.size_bytes,
        }

    def details(self, *, with_payload: bool) -> dict[str, Any]:
        """Return all of it, as JSON takes it; prompts, answers asked for and token IDs only `with_payload`."""
        shown = self.row()
        shown["headers"] = None if self.content is None else self.content.headers
        shown["request"] = None if self.request is None else _fields(self.request)
        if with_payload:
            shown["payload"] = self._payload()
        return shown

    def _payload(self) -> Any:
        if isinstance(self.request, Submission):
            return {"body": _text(self.request.body)}
        if isinstance(self.request, Job):
            prompts = [_token_ids(prompt.token_ids) for prompt in self.request.prompts]
            return {"body": _text(self.request.body), "prompt_token_ids": prompts}
        if isinstance(self.request, PrefillTask):
            return {"prompt_token_ids": [_token_ids(self.request.token_ids)]}
        return None if self.content is None else {"bytes": _text(self.content.payload)}


async def letters(broker: Broker, stage: str | None = None) -> AsyncIterator[Letter]:
    """Yield the dead letters of a stage, or of all, oldest first. Raises: DeniedError, BrokerError."""
    pattern = f"{ROOT}.dlq.{stage or '*'}.*"
    async for kept in broker.admin.messages(STREAM, pattern):
        yield read(kept)


async def letter(broker: Broker, number: int) -> Letter | None:
    """Return one dead letter, or None: there is none of this ID. Raises: DeniedError, BrokerError."""
    kept = await broker.admin.message(STREAM, number)
    return None if kept is None else read(kept)


def read(kept: Kept) -> Letter:
    """Return the letter in a message of the stream; one that can't be read says so, too."""
    content, request = None, None
    size, payload = len(kept.received.payload), b""
    try:
        content = wire.decode(kept.received.payload, DeadLetter)
        reason, payload = content.reason, content.payload
        size = len(payload)
    except WireError as error:
        reason = f"unreadable: {error}"
    if content is not None:
        request = _request(content, kept.stored)
    return Letter(
        id=kept.sequence,
        stored=kept.stored,
        stage=kept.received.subject.split(".")[3],
        content=content,
        request=request,
        size_bytes=size,
        reason=reason,
    )


def _request(content: DeadLetter, stored: float) -> Request | None:
    try:
        if content.subject.startswith(f"{ROOT}.req."):
            return Submission.from_received(
                content.subject, content.headers, content.payload, stored
            )
        return wire.decode(content.payload, Job, PrefillTask)
    except WireError:
        return None


def _fields(request: Request) -> dict[str, Any]:
    """Return what tells requests apart, and nothing that a caller wrote."""
    if isinstance(request, PrefillTask):
        return {
            "kind": "prefill task",
            "request_id": request.request_id,
            "tenant": request.tenant,
            "lane": str(request.lane),
            "decode_instance": request.decode_instance,
            "published": _time(request.published),
            "expires": _time(request.expires),
            "contract": request.contract,
            "num_prompt_token_ids": [token_ids.count(request.token_ids)],
        }
    shown: dict[str, Any] = {
        "kind": "job" if isinstance(request, Job) else "submission",
        "request_id": request.request_id,
        "tenant": request.tenant,
        "lane": str(request.lane),
        "endpoint": request.endpoint,
        "deadline": _time(request.deadline),
        "reader": request.reader,
        "reply_to": request.reply_to,
        "traceparent": request.traceparent,
        "body_bytes": len(request.body),
    }
    if isinstance(request, Job):
        shown |= {
            "model": request.model,
            "published": _time(request.published),
            "contract": request.contract,
            "stream": request.stream,
            "n": request.n,
            "num_prompt_token_ids": [token_ids.count(p.token_ids) for p in request.prompts],
        }
    else:
        shown["accepted"] = _time(request.accepted)
    return shown


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError):  # what was put aside may say anything
        return None


def _token_ids(packed: bytes) -> list[int]:
    whole = token_ids.count(packed) * token_ids.TOKEN_ID_BYTES  # half an ID may be what is wrong
    return token_ids.unpack(packed[:whole])


def _text(payload: bytes) -> str:
    return payload.decode(errors="backslashreplace")
