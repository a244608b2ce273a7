"""A rendered request, on its way from render to decode."""

from __future__ import annotations

from typing import Literal

from headrace.shared.messages.outcome import Timings
from headrace.shared.messages.prompt import Prompt
from headrace.shared.subjects import Lane
from headrace.shared.wire import Message

Endpoint = Literal["chat.completions", "completions", "responses", "generate"]


class Job(Message, frozen=True, tag="job.v1"):
    """A rendered request: render → decode. Decode owns it to its end."""

    request_id: str
    """Names the request everywhere; a subject token of 1 to 128 characters. Set at submission."""
    tenant: str
    """Whose request it is. Taken from the submission's subject."""
    model: str
    """Served model name, as the client sees it."""
    lane: Lane
    """How urgent it is."""
    endpoint: Endpoint
    """Which OpenAI endpoint the body is for."""
    created: int
    """OpenAI's `created` (Unix seconds). Set by render."""
    published: float
    """When render published the job (Unix seconds)."""
    deadline: float
    """After this the request ends `expired` (Unix seconds)."""
    contract: str
    """Hash of all that prefill, decode and derender must share with render (`contract.py`)."""
    body: bytes
    """The client's own JSON, untouched: rendering changes the request, and derender needs the original."""
    stream: bool
    """Whether the answer goes out in chunks."""
    prompts: tuple[Prompt, ...]
    """At least one."""
    n: int = 1
    """Choices a prompt. Choice `i` of prompt `p` has the index `p * n + i`."""
    priority: int = 0
    """The client's own priority within its lane: lower runs earlier."""
    traceparent: str | None = None
    """W3C trace context. None: not traced."""
    reader: str | None = None
    """The process that waits for the answer: an `rt` request ends when its heartbeat is gone. None: nobody says."""
    is_own_id: bool = False
    """Whether its caller chose `request_id`: the answer's `id` is then made of it, not of the body's `request_id`."""
    timings: Timings = Timings()
    """What render knows."""
    reply_to: str | None = None
    """Where the terminal is published once more: `reply.<tenant>.<token>`. None: nowhere. Set at submission."""
    keeps_result: bool = False
    """Its terminal is kept on `res` in lane `rt` too. Set at submission."""

    @property
    def is_kept(self) -> bool:
        """Whether its terminal is kept on `res`."""
        return self.lane is not Lane.RT or self.keeps_result
