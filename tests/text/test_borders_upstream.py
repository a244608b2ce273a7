"""Where vLLM's streamed and whole answers differ: shown with vLLM alone, then that both are passed on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from .border_kits import EOS, PARSERS, Kit, start
from .marked_model import make
from .test_derender import flat, join, play

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

STREAM = {"stream": True}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
NAMED = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An answer of which vLLM makes one thing in chunks and another in one piece."""

    parsers: str
    texts: tuple[str, ...]  #: each tokenized for itself
    end: str = "stop"
    more: dict[str, Any] = field(default_factory=dict)  #: of the body
    streamed: dict[str, Any]
    whole: dict[str, Any]


def call(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": arguments}


DIFFERENCES = {
    "a whole answer's words before a call are stripped": Difference(
        parsers="mistral",
        texts=(" One moment. [TOOL_CALLS]clock[ARGS]{}",),
        streamed={"content": " One moment. "},
        whole={"content": "One moment."},
    ),
    "a call that was cut off is text in a whole answer": Difference(
        parsers="hermes",
        texts=('<tool_call>\n{"name": "weather", "arguments": {"city": "Kö',),
        end="length",
        streamed={"content": "", "tool_calls": [call("weather", '{"city": "Kö')]},
        whole={
            "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Kö',
            "tool_calls": [],
        },
    ),
    "calls before one that was cut off are text in a whole answer": Difference(
        parsers="pythonic",
        texts=("[clock(), clo",),
        end="length",
        streamed={"content": "", "tool_calls": [call("clock", "{}")]},
        whole={"content": "[clock(), clo", "tool_calls": []},
    ),
    "a cut-off answer with a call ends with tool_calls where it is whole": Difference(
        parsers="hermes",
        texts=(CALL,),
        end="length",
        streamed={"finish_reason": "length"},
        whole={"finish_reason": "tool_calls"},
    ),
    "a cut-off call ends with tool_calls where it is whole": Difference(
        parsers="mistral",
        texts=('[TOOL_CALLS]weather[ARGS]{"city": "Kö',),
        end="length",
        streamed={"finish_reason": "length"},
        whole={"finish_reason": "tool_calls"},
    ),
    "an opener that nothing follows is dropped from a stream": Difference(
        parsers="hermes",
        texts=("<tool_c",),
        streamed={"content": ""},
        whole={"content": "<tool_c"},
    ),
    "a stream has no arguments of a call that has none": Difference(
        parsers="llama3_json",
        texts=('{"name": "clock", "parameters": {}}',),
        streamed={"tool_calls": [call("clock", "")]},
        whole={"tool_calls": [call("clock", "{}")]},
    ),
    "a required call that was not made counts in a whole answer": Difference(
        parsers="hermes",
        texts=("no call",),
        more={"tool_choice": "required"},
        streamed={"tool_calls": [], "finish_reason": "stop"},
        whole={"tool_calls": [], "finish_reason": "tool_calls"},
    ),
    "a marker that is spelled out is no marker in a stream": Difference(
        parsers="deepseek_r1",
        texts=("<think>a</thi", "nk>b"),
        streamed={"reasoning": "a</think>b", "content": ""},
        whole={"reasoning": "a", "content": "b"},
    ),
    "an opener that is spelled out is no opener in a stream": Difference(
        parsers="mistral",
        texts=("[TOOL_", "CALLS]clock[ARGS]{}"),
        streamed={"content": "[TOOL_CALLS]clock[ARGS]{}", "tool_calls": []},
        whole={"content": "", "tool_calls": [call("clock", "{}")]},
    ),
}

FINISH_REASONS = [
    # parsers, answer, body, why the engine ended, in chunks, in one piece
    ("hermes", CALL, {}, "stop", "tool_calls", "tool_calls"),
    ("hermes", "no call", {}, "stop", "stop", "stop"),
    ("hermes", "no call", {}, "length", "length", "length"),
    ("hermes", CALL[:-20], {}, "length", "length", "length"),
    ("hermes", CALL, {"tool_choice": "none"}, "stop", "stop", "stop"),
    ("hermes", CALL, NAMED, "stop", "stop", "stop"),
    ("hermes", CALL, {"tool_choice": "required"}, "stop", "tool_calls", "tool_calls"),
    ("qwen3, hermes", f"<think>hm</think>{CALL}", {}, "stop", "tool_calls", "tool_calls"),
    ("qwen3, hermes", "<think>hm", {}, "length", "length", "length"),
    ("pythonic", "[clock()]", {}, "stop", "tool_calls", "tool_calls"),
]


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


def ids_of(kit: Kit, end: str, *texts: str) -> list[int]:
    return kit.ids(*texts) + ([EOS] if end == "stop" else [])


def part_of(message: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return what of a message is expected; calls without their IDs."""
    calls = [call(one["name"], one["arguments"]) for one in message["tool_calls"]]
    return {key: {**message, "tool_calls": calls}[key] for key in expected}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_vllm_alone_answers_so(name: str, kits: Callable[[str], Kit]) -> None:
    difference = DIFFERENCES[name]
    kit = kits(difference.parsers)
    ids = ids_of(kit, difference.end, *difference.texts)
    more = difference.more
    streamed = join(kit.reference.chunks(kit.body(**STREAM, **more), ids, difference.end))
    whole = flat(kit.reference.whole(kit.body(**more), ids, difference.end)["choices"][0])
    assert part_of(streamed, difference.streamed) == difference.streamed
    assert part_of(whole, difference.whole) == difference.whole


@pytest.mark.parametrize("name", DIFFERENCES)
def test_derender_passes_on_what_vllm_answers(name: str, kits: Callable[[str], Kit]) -> None:
    difference = DIFFERENCES[name]
    kit, end = kits(difference.parsers), {"finish_reason": difference.end}
    ids = ids_of(kit, difference.end, *difference.texts)
    more = difference.more
    streamed = join(play(kit.derenderer.open(kit.job(**STREAM, **more)), [ids], **end).chunks)
    whole = flat(play(kit.derenderer.open(kit.job(**more)), [ids], **end).body["choices"][0])
    assert part_of(streamed, difference.streamed) == difference.streamed
    assert part_of(whole, difference.whole) == difference.whole


@pytest.mark.parametrize(("parsers", "text", "more", "end", "streamed", "whole"), FINISH_REASONS)
def test_finish_reasons_are_those_of_vllm_serve(
    parsers: str,
    text: str,
    more: dict[str, Any],
    end: str,
    streamed: str,
    whole: str,
    kits: Callable[[str], Kit],
) -> None:
    kit = kits(parsers)
    ids = ids_of(kit, end, text)
    chunks = play(kit.derenderer.open(kit.job(**STREAM, **more)), [ids], finish_reason=end).chunks
    body = play(kit.derenderer.open(kit.job(**more)), [ids], finish_reason=end).body
    assert join(chunks)["finish_reason"] == streamed
    assert body["choices"][0]["finish_reason"] == whole
    theirs = kit.reference.chunks(kit.body(**STREAM, **more), ids, end)
    assert join(theirs)["finish_reason"] == streamed
    served = kit.reference.whole(kit.body(**more), ids, end)
    assert served["choices"][0]["finish_reason"] == whole


def test_content_is_null_or_empty_as_vllm_has_it(kits: Callable[[str], Kit]) -> None:
    kit = kits("hermes")
    for text in (CALL, f"words {CALL}", ""):
        ids = ids_of(kit, "stop", text)
        ours = play(kit.derenderer.open(kit.job()), [ids]).body
        theirs = kit.reference.whole(kit.body(), ids, "stop")
        contents = [one["choices"][0]["message"]["content"] for one in (ours, theirs)]
        assert json.dumps(contents[0]) == json.dumps(contents[1])


def test_a_replay_has_the_tool_call_ids_that_the_client_already_has(
    kits: Callable[[str], Kit],
) -> None:
    for name, text in (("hermes", f"{CALL}\n{CALL}"), ("mistral", "[TOOL_CALLS]clock[ARGS]{}")):
        kit = kits(name)
        ids = ids_of(kit, "stop", text)
        answers = [
            join(play(kit.derenderer.open(kit.job(**STREAM)), [ids]).chunks)["tool_calls"]
            for _ in range(2)
        ]
        whole = flat(play(kit.derenderer.open(kit.job()), [ids]).body["choices"][0])["tool_calls"]
        assert answers[0] == answers[1] == whole
        assert len({one["id"] for one in whole}) == len(whole)
