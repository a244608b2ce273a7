"""What became of one request: equal, a gap that is named, a difference that has its reason, or a failure."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Case
from .client import Answer
from .compare import against_whole, differences

EARLY = "HTTP 4xx before the first byte, where vLLM sends 200 and the same error as an event"
TWO_ANSWERS = "vLLM's own stream and whole answer differ here, and so do headrace's"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row's cell."""

    ok: bool
    equal: bool  #: not only accepted
    note: str = ""


def judge(case: Case, theirs: dict[str, Answer], ours: dict[str, Answer], mode: str) -> Verdict:
    """Judge a case's answers in one mode, `whole` or `streamed`."""
    one, two = theirs[mode], ours[mode]
    if case.gap and two["status"] == 400:
        param = ((two.get("body") or {}).get("error") or {}).get("param")
        named = param == case.gap
        note = f"not supported: refused with 400, param `{case.gap}`"
        return Verdict(ok=named, equal=False, note=note if named else f"400 names {param!r}")
    found = differences(one, two)
    if found and is_early(one, two):
        return Verdict(ok=True, equal=True, note=EARLY)
    if found and case.differs and is_refusal(two):
        return Verdict(ok=True, equal=False, note=case.differs)
    if case.differs and not found:
        found = ["it is equal, but a reason to differ is given"]
    if found:
        return Verdict(ok=False, equal=False, note="; ".join(found[:3]))
    if mode == "streamed" and (apart := against_whole(ours["whole"], two)):
        same = apart == against_whole(theirs["whole"], one)
        return Verdict(ok=same, equal=same, note=TWO_ANSWERS if same else "; ".join(apart[:3]))
    return Verdict(ok=True, equal=True)


def is_early(theirs: Answer, ours: Answer) -> bool:
    """Whether the error that vLLM sends as the first event of a 200 is headrace's whole answer."""
    events = theirs.get("events") or []
    if theirs["status"] != 200 or "events" in ours or len(events) != 2:
        return False
    error = events[0].get("error") if isinstance(events[0], dict) else None
    return (
        error is not None
        and events[0] == ours["body"]
        and error["code"] == ours["status"]
        and ours["content_type"] == "application/json"
    )


def is_refusal(ours: Answer) -> bool:
    """Whether an answer is an error of OpenAI's form, with a status that says so."""
    error = (ours.get("body") or {}).get("error") or {}
    return set(error) == {"message", "type", "param", "code"} and (
        400 <= ours["status"] < 500 and error["code"] == ours["status"] and bool(error["message"])
    )
