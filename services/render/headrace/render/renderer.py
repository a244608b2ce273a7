"""What the render service needs from a renderer. vLLM's own code implements it, and so does the fake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.shared.messages import Ask, Endpoint, Prompt
from headrace.shared.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A validated request: what goes into the job."""

    prompts: tuple[Prompt, ...]  #: one for a chat, one for each prompt of a completions call
    n: int  #: choices a prompt
    stream: bool  #: whether the answer goes out in chunks
    priority: int  #: lower runs earlier


class Renderer(Protocol):
    """Turns a request's body into token IDs and sampling parameters."""

    contract: str  #: `contract.contract` of the settings it was built with
    max_model_len: int  #: prompt and answer together, in token IDs; known after `start`
    served_name: str  #: what clients call the model

    async def start(self) -> None:
        """Load tokenizer and template. Raises: SettingsError when the model can't be loaded."""
        ...

    async def render(self, endpoint: Endpoint, body: bytes, tenant: str = "") -> Rendered:
        """Validate and tokenize one request; the event loop stays free meanwhile.

        `tenant`: what its earlier requests left in a cache may be used.

        Raises: a RequestError whose status, type, message and param are those of vLLM's own server.
        """
        ...

    async def ask(self, ask: Ask) -> bytes:
        """Answer one question; the event loop stays free meanwhile.

        Raises: a RequestError as `render`; BadRequestError for an endpoint that is not render's.
        """
        ...

    async def close(self) -> None:
        """Free what `start` made; safe to call without it."""
        ...


def build(settings: Settings, engine: Literal["vllm", "fake"]) -> Renderer:
    """Return the renderer that goes with an engine; only "vllm" imports vLLM.

    Raises: SettingsError when the model's files can't be found.
    """
    if engine == "fake":
        from headrace.render.renderer_fake import FakeRenderer

        return FakeRenderer(settings)
    from headrace.render.renderer_vllm import VllmRenderer

    return VllmRenderer(settings)
