"""What must differ between two answers, and nothing else: IDs, the time, the fingerprint of a server."""

from __future__ import annotations

import re
from typing import Any

_ID = re.compile(r"(chatcmpl|cmpl)-[0-9a-f]{16,32}")
_TOOL_CALL_ID = re.compile(r"chatcmpl-tool-[0-9a-f]{16,32}")
_FINGERPRINT = re.compile(r"vllm-[0-9.]+-[0-9a-f]{8}|headrace-[0-9a-f]{12}")
_FIRST_SECOND = 1_700_000_000  # a `created` that is no time stays, and differs


class Mask:
    """Masks the answers of one request: the same value always becomes the same word.

    So a stream whose chunks have several IDs still differs from one whose chunks have one. A value of another form
    than it should have stays as it is.
    """

    def __init__(self) -> None:
        self._words: dict[str, dict[Any, str]] = {}

    def __call__(self, value: Any) -> Any:
        """Return a body or a chunk with its random values masked."""
        if not isinstance(value, dict) or "object" not in value:
            return value
        masked = dict(value)
        if isinstance(value.get("id"), str) and (found := _ID.fullmatch(value["id"])):
            masked["id"] = self._word(f"{found[1]}-id", value["id"])
        if isinstance(value.get("created"), int) and value["created"] > _FIRST_SECOND:
            masked["created"] = self._word("time", value["created"])
        print_ = value.get("system_fingerprint")
        if isinstance(print_, str) and _FINGERPRINT.fullmatch(print_):
            masked["system_fingerprint"] = self._word("fingerprint", print_)
        if isinstance(value.get("choices"), list):
            masked["choices"] = [self._choice(choice) for choice in value["choices"]]
        return masked

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        masked = dict(choice)
        for part in ("message", "delta"):
            message = choice.get(part)
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            if isinstance(calls, list):
                fixed = [self._call(call, choice["index"]) for call in calls]
                masked[part] = {**choice[part], "tool_calls": fixed}
        return masked

    def _call(self, call: dict[str, Any], choice: int) -> dict[str, Any]:
        if isinstance(call.get("id"), str) and _TOOL_CALL_ID.fullmatch(call["id"]):
            return {**call, "id": self._word(f"tool-call-id of choice {choice}", call["id"])}
        return call

    def _word(self, kind: str, value: Any) -> str:
        words = self._words.setdefault(kind, {})
        return words.setdefault(value, f"<{kind} {len(words)}>")
