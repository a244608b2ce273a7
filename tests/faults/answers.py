"""Compares what came with what must have come: whole answers, and streamed ones event by event."""

from __future__ import annotations

import json
from typing import Any

from .orders import Choice, Order

DONE = "[DONE]"


def problems_of_body(order: Order, body: bytes) -> list[str]:
    """Return what is wrong with a whole answer that claims to be right."""
    try:
        answer = json.loads(body)
        choices = {choice["index"]: choice for choice in answer["choices"]}
    except (ValueError, KeyError, TypeError) as error:
        return [f"no answer: {error!r} in {body[:200]!r}"]
    if len(choices) != len(order.choices):
        return [f"{len(choices)} choices instead of {len(order.choices)}"]
    found = []
    for index, wanted in enumerate(order.choices):
        choice = choices[index]
        found += _compare(index, wanted, _text(choice), _ids(choice), choice["finish_reason"])
        found += _compare_logprobs(order, index, wanted, choice.get("logprobs"))
    total = sum(choice.num_token_ids for choice in order.choices)
    usage = answer["usage"]["completion_tokens"]
    if usage != total:
        found.append(f"usage says {usage} token IDs instead of {total}")
    return found


class Streamed:
    """The events of one streamed answer, as they come."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._texts = ["" for _ in order.choices]
        self._ids: list[list[int]] = [[] for _ in order.choices]
        self._reasons: list[str | None] = [None for _ in order.choices]
        self._rows = ["" for _ in order.choices]
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.num_events = 0
        self.problems: list[str] = []

    def event(self, data: str) -> None:
        """Take the data of one event."""
        if self.is_done:
            self.problems.append(f"an event after {DONE}: {data[:100]}")
        if data == DONE:
            self.is_done = True
            return
        self.num_events += 1
        try:
            event = json.loads(data)
        except ValueError:
            self.problems.append(f"an event that is no JSON: {data[:100]}")
            return
        if self.error is not None:
            self.problems.append("an event after the error event")
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            self._choice(choice)

    def check_so_far(self) -> list[str]:
        """Return what is wrong with what came, be it all or not."""
        found = list(self.problems)
        for index, wanted in enumerate(self._order.choices):
            if not wanted.text.startswith(self._texts[index]):
                found.append(
                    f"choice {index} goes wrong: {_where(wanted.text, self._texts[index])}"
                )
        return found

    def check(self) -> list[str]:
        """Return what is wrong with an answer that ended without an error."""
        found = list(self.problems)
        if not self.is_done:
            found.append(f"no {DONE}")
        for index, wanted in enumerate(self._order.choices):
            ids = tuple(self._ids[index]) if self._order.endpoint == "generate" else None
            found += _compare(index, wanted, self._texts[index], ids, self._reasons[index])
            if self._order.body.get("logprobs") is not None and self._rows[index] != wanted.text:
                found.append(f"choice {index}: logprobs of other token IDs than the text's")
        return found

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        if not 0 <= index < len(self._texts):
            self.problems.append(f"a choice {index} that nobody asked for")
            return
        if self._reasons[index] is not None:
            self.problems.append(f"choice {index} goes on behind its finish_reason")
        self._texts[index] += _text(choice)
        self._ids[index] += _ids(choice) or ()
        self._rows[index] += "".join((choice.get("logprobs") or {}).get("tokens", ()))
        self._reasons[index] = choice.get("finish_reason")


def _text(choice: dict[str, Any]) -> str:
    if "token_ids" in choice:
        return bytes(i for i in choice["token_ids"] if i < 256).decode()
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""


def _ids(choice: dict[str, Any]) -> tuple[int, ...] | None:
    return tuple(choice["token_ids"]) if "token_ids" in choice else None


def _compare(
    index: int, wanted: Choice, text: str, ids: tuple[int, ...] | None, reason: str | None
) -> list[str]:
    found = []
    if text != wanted.text:
        found.append(f"choice {index} is wrong: {_where(wanted.text, text)}")
    if ids is not None and ids != wanted.token_ids:
        found.append(f"choice {index} has wrong token IDs")
    if reason != wanted.finish_reason:
        found.append(f"choice {index} ended with {reason!r} instead of {wanted.finish_reason!r}")
    return found


def _compare_logprobs(
    order: Order, index: int, wanted: Choice, logprobs: dict[str, Any] | None
) -> list[str]:
    if order.body.get("logprobs") is None:
        return []
    if logprobs is None or "".join(logprobs["tokens"]) != wanted.text:
        return [f"choice {index}: logprobs of other token IDs than the text's"]
    return []


def _where(wanted: str, found: str) -> str:
    """Say where two texts part, with a few characters of both."""
    pairs = enumerate(zip(wanted, found, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(found)))
    return (
        f"{len(found)} characters instead of {len(wanted)}, other from {at} on: "
        f"{found[at : at + 12]!r} instead of {wanted[at : at + 12]!r}"
    )
