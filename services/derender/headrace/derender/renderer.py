"""What the derender service needs to turn token IDs into an answer; vLLM's own code implements it, and a fake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from headrace.shared.messages import Ask, FinishReason, Job, PromptLogprobs
from headrace.shared.settings import Settings

Logprobs = list[list[tuple[int, float, int | None]]]
"""A token ID each: `(token_id, logprob, rank)`, the sampled one first."""


class Fed(msgspec.Struct, frozen=True, kw_only=True):
    """What one feed of token IDs gave."""

    chunks: tuple[bytes, ...] = ()  #: OpenAI chunk objects as JSON; none for an answer in one piece
    stopped: bool = (
        False  #: a stop string was found: abort this choice; what it still sends is ignored
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The end of an answer."""

    chunks: tuple[bytes, ...] = ()  #: the last chunks of a streamed answer (usage)
    body: bytes = b""  #: the whole answer, where it was not streamed
    result: bytes = b""  #: the response that a stream of the Responses API ended with


class AnswerStream(Protocol):
    """One answer in the making. Not thread-safe; each call works off what it is given and returns."""

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish reason."""
        ...

    def feed(
        self,
        choice: int,
        token_ids: list[int],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Logprobs | None = None,
        num_cached_token_ids: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Fed:
        """Add token IDs to choice `p * n + i`. How they are cut makes no difference to what comes out.

        `finish_reason` belongs to the last ID: it must come with it, and not in a later feed of its own,
        when it is "stop" (the ID is then EOS or a stop token). Feeds of a finished choice are ignored.
        `prompt_logprobs` are those of the choice's prompt, with the first IDs of its first choice.
        Raises: EngineRequestError for finish reason "error", and when a parser failed; BadRequestError
        for a choice that the request does not have, or logprobs that don't fit the IDs.
        """
        ...

    def close(self) -> Closed:
        """Return the end of the answer, once `is_finished`. Raises: EngineRequestError as `feed`."""
        ...


class Derenderer(Protocol):
    """Opens answers."""

    contract: str  #: `contract.contract` of the settings it was built with

    async def start(self) -> None:
        """Load tokenizer and parsers. Raises: SettingsError when the model can't be loaded."""
        ...

    def open(self, job: Job) -> AnswerStream:
        """Return a new answer for this job; opening one job twice gives two equal answers.

        Raises: BadRequestError when the job's body or parameters can't be read.
        """
        ...

    async def ask(self, ask: Ask) -> bytes:
        """Answer one question; the event loop stays free meanwhile.

        Raises: a RequestError in vLLM's words; BadRequestError for an endpoint that is not derender's.
        """
        ...

    async def close(self) -> None:
        """Free what `start` made; safe to call without it."""
        ...


def build(settings: Settings, engine: Literal["vllm", "fake"]) -> Derenderer:
    """Return the derenderer that goes with an engine; only "vllm" imports vLLM.

    Raises: SettingsError when the model's files can't be found.
    """
    if engine == "fake":
        from headrace.derender.renderer_fake import FakeDerenderer

        return FakeDerenderer(settings)
    from headrace.derender.renderer_vllm import VllmDerenderer

    return VllmDerenderer(settings)
