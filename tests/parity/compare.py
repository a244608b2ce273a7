"""Two answers to the same question: every way in which they differ, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .client import DONE, Answer
from .masks import Mask

RELATIVE = 1e-4  # the KV cache of another batch shape changes the last bits of a logprob
ABSOLUTE = 1e-5  # of logprobs near 0, where a relative bound means nothing


def differences(theirs: Answer, ours: Answer) -> list[str]:
    """Return how our answer differs from theirs; empty: it does not."""
    found = list(_unequal("status", theirs["status"], ours["status"]))
    found += _unequal("content-type", theirs["content_type"], ours["content_type"])
    if ("events" in theirs) != ("events" in ours):
        return [*found, "one is a stream of events and the other is not"]
    if "events" not in theirs:
        return found + list(_unequal("body", Mask()(theirs["body"]), Mask()(ours["body"])))
    one, two = theirs["events"], ours["events"]
    # vLLM puts several token IDs into one chunk when its reader is slow.
    merge = len(one) != len(two)
    return found + list(_unequal("stream", sequence(one, merge=merge), sequence(two, merge=merge)))


def against_whole(whole: Answer, streamed: Answer) -> list[str]:
    """Return how what a client puts together from a stream differs from the whole answer."""
    if "events" not in streamed or "choices" not in (whole["body"] or {}):
        return []
    chat = whole["body"]["object"] == "chat.completion"
    joined: dict[int, dict[str, Any]] = {}
    for chunk in (event for event in streamed["events"] if event != DONE):
        for part in chunk.get("choices", ()):
            into = joined.setdefault(part["index"], _nothing())
            _join(into, part["delta"] if chat else {"content": part["text"]}, part)
    expected = {choice["index"]: _flat(choice, chat) for choice in whole["body"]["choices"]}
    return list(_unequal("joined stream against whole", expected, joined))


def sequence(events: list[Any], *, merge: bool) -> dict[str, Any]:
    """Return a stream in the form that two are compared in.

    A choice's chunks stay in their order; the order between choices depends on the engine's steps. `merge` makes
    adjacent chunks one where they only go on with the same text.
    """
    mask = Mask()
    masked = [mask(event) for event in events if event != DONE]
    of_choices: dict[int, list[dict[str, Any]]] = {}
    others: list[Any] = []
    for chunk in masked:
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not isinstance(choices, list) or not choices:
            others.append(chunk)
            continue
        for choice in choices:
            alone = {**chunk, "choices": [choice]}
            line = of_choices.setdefault(choice["index"], [])
            if merge and line and goes_on(line[-1], alone):
                line[-1] = merged(line[-1], alone)
            else:
                line.append(alone)
    return {"choices": of_choices, "without choices": others}


def goes_on(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two chunks of a choice could have been one: only text, tokens, logprobs and usage grow."""
    first, second = one["choices"][0], two["choices"][0]
    if first.get("finish_reason") is not None:
        return False
    if any(one.get(name) != two.get(name) for name in ("id", "object", "created", "model")):
        return False
    if "delta" not in first:
        return "delta" not in second
    kind = _kind(first["delta"])
    return kind is not None and kind == _kind(second["delta"])


def merged(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Return two chunks as one; what is not text, tokens or logprobs is that of the second."""
    first, second = one["choices"][0], two["choices"][0]
    choice = {**first, **second}
    if "delta" in first:
        choice["delta"] = _grown(first["delta"], second["delta"])
    else:
        choice["text"] = first["text"] + second["text"]
    if first.get("token_ids") is not None:
        choice["token_ids"] = first["token_ids"] + (second.get("token_ids") or [])
    if first.get("logprobs") is not None and second.get("logprobs") is not None:
        choice["logprobs"] = {
            name: values + second["logprobs"][name] for name, values in first["logprobs"].items()
        }
    for name in ("prompt_token_ids", "prompt_logprobs"):
        if first.get(name) is not None and second.get(name) is None:
            choice[name] = first[name]
    outer = {**one, **two, "choices": [choice]}
    return outer


def _kind(delta: dict[str, Any]) -> Any:
    """Return what a delta goes on with. None: it begins or carries something."""
    filled = {name: value for name, value in delta.items() if value is not None}
    if set(filled) in ({"content"}, {"reasoning"}):
        return next(iter(filled))
    calls = filled.get("tool_calls") or []
    if set(filled) == {"tool_calls"} and len(calls) == 1 and not calls[0].get("id"):
        return ("tool_calls", calls[0]["index"])
    return None


def _grown(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    grown = {**one, **two}
    for name in ("content", "reasoning"):
        if isinstance(one.get(name), str):
            grown[name] = one[name] + two[name]
    if one.get("tool_calls"):
        first, second = one["tool_calls"][0], two["tool_calls"][0]
        arguments = (first["function"].get("arguments") or "") + (
            second["function"].get("arguments") or ""
        )
        function = {**first["function"], **second["function"], "arguments": arguments}
        grown["tool_calls"] = [{**first, **second, "function": function}]
    return grown


def _nothing() -> dict[str, Any]:
    return {"content": "", "reasoning": "", "calls": [], "finish_reason": None, "stop_reason": None}


def _join(into: dict[str, Any], delta: dict[str, Any], part: dict[str, Any]) -> None:
    into["content"] += delta.get("content") or ""
    into["reasoning"] += delta.get("reasoning") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if call["index"] == len(into["calls"]):
            into["calls"].append([function.get("name"), ""])
        into["calls"][call["index"]][1] += function.get("arguments") or ""
    for name in ("finish_reason", "stop_reason"):
        if part.get(name) is not None:
            into[name] = part[name]


def _flat(choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    message = choice["message"] if chat else {"content": choice["text"]}
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
    }


def _unequal(where: str, theirs: Any, ours: Any) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if key not in theirs or key not in ours:
                side, value = (
                    ("vLLM", theirs.get(key)) if key in theirs else ("headrace", ours[key])
                )
                yield f"{where}.{key} is in {side}'s answer alone: {_short(value)}"
            else:
                yield from _unequal(f"{where}.{key}", theirs[key], ours[key])
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            yield f"{where}: {len(theirs)} of vLLM, {len(ours)} of headrace"
        for index, (one, two) in enumerate(zip(theirs, ours, strict=False)):
            yield from _unequal(f"{where}[{index}]", one, two)
    elif isinstance(theirs, float) and isinstance(ours, float):
        if not math.isclose(theirs, ours, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            yield f"{where}: vLLM {theirs}, headrace {ours}"
    elif type(theirs) is not type(ours) or theirs != ours:
        yield f"{where}: vLLM {_short(theirs)}, headrace {_short(ours)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:297]}…"
