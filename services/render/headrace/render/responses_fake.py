"""Requests of the Responses API as chats, for the renderer without vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from headrace.shared.errors import BadRequestError


class _Item(msgspec.Struct):
    role: str = ""
    content: str | list[dict[str, Any]] = ""
    type: str = "message"


class _Request(msgspec.Struct):
    input: str | list[_Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(_Request)


def chat_of(body: bytes) -> bytes:
    """Return the body of a chat with the same messages. Raises: BadRequestError."""
    try:
        request = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(str(error)) from None
    for name in ("background", "previous_response_id"):
        if getattr(request, name):
            raise BadRequestError(f"{name} is not supported", param=name)
    messages = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = request.input
    if isinstance(items, str):
        items = [_Item(role="user", content=items)]
    messages += [
        {"role": item.role, "content": _text(item.content)}
        for item in items
        if item.type == "message"
    ]
    chat = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "stream": request.stream,
    }
    return msgspec.json.encode(chat)


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)
