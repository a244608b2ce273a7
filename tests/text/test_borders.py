"""Borders: wherever an answer is cut, whichever parser reads it, clients get what `vllm serve` would send them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .border_kits import EOS, PARSERS, Calls, Kit, Parsers, start
from .marked_model import MARKERS, make
from .test_derender import cut, flat, join, play

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
WORDS = ("Hello", " 你好世界", " 🎉👩‍🚀", "naïve", " done.", " a < b")
HALF_OPEN = ("<thi", "</thi", "<tool_c", "</tool_", "[TOOL_", "<|python", "<arg_k", "{", "[", "\n")
CITIES = ("Köln", "東京", "Paris 🎉", "a<b")


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory, _vllm: None) -> Iterator[Callable[[str], Kit]]:
    folder = make(tmp_path_factory.mktemp("marked"))
    started: dict[str, Kit] = {}

    def kit(name: str) -> Kit:
        if name not in started:
            started[name] = start(PARSERS[name], folder)
        return started[name]

    yield kit
    for one in started.values():
        asyncio.run(one.renderer.close())


def calls_of(parsers: Parsers) -> st.SearchStrategy[Calls]:
    weather = st.builds(
        lambda city, days: ("weather", {"city": city, "days": days}),
        st.sampled_from(CITIES),
        st.integers(0, 30),
    )
    clock = st.just(("clock", dict[str, Any]()))
    call = st.one_of(weather, clock) if parsers.empty_arguments else weather
    return st.lists(call, min_size=1, max_size=3)


@st.composite
def answers(draw: st.DrawFn, parsers: Parsers) -> str:
    """An answer as a model means it: reasoning, words, calls, all of them complete."""
    words = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
    text = ""
    if parsers.reasoning and draw(st.booleans()):
        text += f"<think>{draw(words)}</think>"
    has_calls = parsers.calls is not None and draw(st.booleans())
    if not (has_calls and parsers.only_calls):
        text += draw(words)
    if has_calls and parsers.calls is not None:
        text += parsers.calls(draw(calls_of(parsers)))
    return text


@st.composite
def soups(draw: st.DrawFn, parsers: Parsers) -> list[str]:
    """Anything at all: markers in the wrong place, half-open ones, calls cut off, pieces cut anywhere."""
    calls = calls_of(parsers).map(parsers.calls) if parsers.calls else st.just("")
    part = st.one_of(st.sampled_from(WORDS + HALF_OPEN + MARKERS), answers(parsers), calls)
    text = "".join(draw(st.lists(part, min_size=1, max_size=5)))
    marks = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=4))})
    return [text[start:end] for start, end in pairwise(marks)]


def soup_tests(max_examples: int) -> Callable[..., Any]:
    return settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def ending(kit: Kit, texts: list[str], keep: int | None) -> tuple[list[int], str]:
    """Return token IDs and why they end: EOS after all of them, or a limit after `keep`, inside a character even."""
    ids = kit.ids(*texts)
    if keep is None or not ids:
        return [*ids, EOS], "stop"
    return ids[: 1 + keep % len(ids)], "length"


KEEP = st.one_of(st.none(), st.integers(0, 200))


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data(), keep=KEEP, borders=st.lists(st.integers(0, 500), max_size=8))
@soup_tests(40)
def test_every_way_of_cutting_gives_the_same_bytes(
    name: str,
    kits: Callable[[str], Kit],
    data: st.DataObject,
    keep: int | None,
    borders: list[int],
) -> None:
    kit = kits(name)
    ids, end = ending(kit, data.draw(soups(kit.parsers)), keep)
    for job in (kit.job(**STREAM), kit.job()):
        once = play(kit.derenderer.open(job), [ids], finish_reason=end)
        some = play(kit.derenderer.open(job), cut(ids, borders), finish_reason=end)
        each = play(kit.derenderer.open(job), [[one] for one in ids], finish_reason=end)
        assert some.raw == each.raw == once.raw
        assert some.closed.body == each.closed.body == once.closed.body
        assert bool(once.raw) == job.stream


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data(), keep=KEEP)
@soup_tests(40)
def test_chunks_and_bodies_are_those_of_vllm_serve(
    name: str, kits: Callable[[str], Kit], data: st.DataObject, keep: int | None
) -> None:
    kit = kits(name)
    ids, end = ending(kit, data.draw(soups(kit.parsers)), keep)
    got = play(kit.derenderer.open(kit.job(**STREAM)), [ids], finish_reason=end)
    theirs = kit.reference.chunks(kit.body(**STREAM), ids, end)
    assert [comparable(one, "delta") for one in got.chunks] == [
        comparable(one, "delta") for one in theirs
    ]
    whole = play(kit.derenderer.open(kit.job()), [ids], finish_reason=end).body
    assert comparable(whole, "message") == comparable(
        kit.reference.whole(kit.body(), ids, end), "message"
    )


def comparable(answer: dict[str, Any], part: str) -> dict[str, Any]:
    """Return an answer without what is random in it: a call's ID is its form."""
    answer = json.loads(json.dumps(answer))
    for key in ("id", "created", "system_fingerprint"):
        answer.pop(key, None)
    for choice in answer["choices"]:
        for call in choice[part].get("tool_calls") or ():
            if call.get("id"):
                call["id"] = re.sub(r"[0-9a-f]{16,32}\Z|\A[A-Za-z0-9]{9}\Z", "random", call["id"])
    return answer


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
@soup_tests(40)
def test_the_joined_stream_is_the_whole_answer(
    name: str, kits: Callable[[str], Kit], data: st.DataObject
) -> None:
    kit = kits(name)
    ids = [*kit.ids(data.draw(answers(kit.parsers))), EOS]
    joined = join(play(kit.derenderer.open(kit.job(**STREAM)), [ids]).chunks)
    whole = flat(play(kit.derenderer.open(kit.job()), [ids]).body["choices"][0])
    if kit.parsers.strips and whole["tool_calls"]:
        joined["content"] = joined["content"].strip()
    assert joined == whole
    assert joined["finish_reason"] == ("tool_calls" if whole["tool_calls"] else "stop")
