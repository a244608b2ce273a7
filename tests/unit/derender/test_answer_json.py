"""Answers hold nothing random."""

from __future__ import annotations

import json

from headrace.derender.answer_json import ToolCallIds, with_created

RANDOM = "chatcmpl-tool-0123456789abcdef0123456789abcdef"


def chunk(tool_id: str, choice: int = 0) -> bytes:
    calls = [{"index": 0, "id": tool_id, "function": {"name": "f"}}]
    return json.dumps(
        {"choices": [{"index": choice, "delta": {"tool_calls": calls}}]}, separators=(",", ":")
    ).encode()


def id_of(data: bytes) -> str:
    found: str = json.loads(data)["choices"][0]["delta"]["tool_calls"][0]["id"]
    return found


def test_created_is_the_jobs() -> None:
    made = with_created(
        '{"id":"chatcmpl-r","object":"chat.completion.chunk","created":99,"x":1}', 7
    )
    assert json.loads(made)["created"] == 7


def test_created_within_the_text_stays() -> None:
    text = r'{"id":"r","object":"o","created":99,"content":"\"object\":\"o\",\"created\":99"}'
    assert json.loads(with_created(text, 7))["content"] == '"object":"o","created":99'


def test_random_tool_call_ids_are_the_same_on_every_worker() -> None:
    other = RANDOM.replace("0123", "4567")
    first = id_of(ToolCallIds("r").in_chunk(chunk(RANDOM)))
    assert first == id_of(ToolCallIds("r").in_chunk(chunk(other)))
    assert first.startswith("chatcmpl-tool-")
    assert len(first) == len(RANDOM)


def test_each_tool_call_choice_and_request_has_its_own_id() -> None:
    ids = ToolCallIds("r")
    made = {
        id_of(ids.in_chunk(chunk(RANDOM))),
        id_of(ids.in_chunk(chunk(RANDOM.replace("0123", "4567")))),
        id_of(ids.in_chunk(chunk(RANDOM, choice=1))),
        id_of(ToolCallIds("s").in_chunk(chunk(RANDOM))),
    }
    assert len(made) == 4
    assert id_of(ids.in_chunk(chunk(RANDOM))) in made


def test_an_id_with_a_meaning_stays() -> None:
    assert id_of(ToolCallIds("r").in_chunk(chunk("functions.f:0"))) == "functions.f:0"


def test_an_answer_without_tool_calls_is_not_touched() -> None:
    data = b'{"choices":[{"index":0,"delta":{"content":"\\"tool_calls\\":[{"}}]}'
    assert ToolCallIds("r").in_chunk(data) is data
