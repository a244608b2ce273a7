"""The comparison itself: it sees every change of an answer but those that the masks are for."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from . import recorded
from .cases import CASES, Case
from .client import Answer, FramingError, events_of
from .compare import against_whole, differences
from .masks import Mask
from .mistakes import MISTAKES
from .verdict import judge

Path = tuple[str | int, ...]

ANSWERED = [case for case in recorded.stored_cases() if case in CASES]
REFUSED = [case for case in recorded.stored_cases() if case in MISTAKES]
RIGHT_FORMS = {
    "id": ["chatcmpl-0123456789abcdef", "cmpl-0123456789abcdef"],
    "created": [1_800_000_000],
    "system_fingerprint": ["headrace-0123456789ab"],
}


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of everything in a JSON value that holds no other."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))
    else:
        yield path


def changed(answer: Answer, path: Path, value: Any) -> Answer:
    """Return a copy with one leaf replaced."""
    copied = copy.deepcopy(answer)
    place: Any = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


def another(value: Any) -> Any:
    """Return a value of the same type that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value + "x" if isinstance(value, str) else "x"


def at(answer: Answer, path: Path) -> Any:
    for key in path:
        answer = answer[key]
    return answer


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("case", [*ANSWERED, *REFUSED], ids=recorded.key_of)
def test_every_change_of_a_stored_answer_is_seen(case: Case, mode: str) -> None:
    answer = recorded.load(case).get(mode)
    if answer is None:
        pytest.skip("has no streamed form")
    assert differences(answer, answer) == []
    unseen = []
    for path in leaves(answer):
        wrong = another(at(answer, path))
        is_whole_time = path == ("body", "created")  # any second is as good as another
        if not is_whole_time and not differences(answer, changed(answer, path, wrong)):
            unseen.append(path)
    assert unseen == []


@pytest.mark.parametrize("field", ["id", "created", "system_fingerprint"])
def test_a_masked_field_may_differ_in_its_right_form_alone(field: str) -> None:
    answer = recorded.load(next(case for case in ANSWERED if case.name == "plain"))["whole"]
    right = changed(answer, ("body", field), RIGHT_FORMS[field][0])
    assert differences(answer, right) == []
    for wrong in ("", "x-1", 5, None):
        assert differences(answer, changed(answer, ("body", field), wrong))


def test_a_stream_whose_chunks_have_several_ids_or_times_is_another_one() -> None:
    answer = recorded.load(next(case for case in ANSWERED if case.name == "plain"))["streamed"]
    for field in ("id", "created"):
        other = changed(answer, ("events", 1, field), RIGHT_FORMS[field][0])
        assert differences(answer, other)


def test_a_tool_call_id_of_another_form_is_seen() -> None:
    answer = recorded.load(next(c for c in ANSWERED if c.name == "tool_choice auto"))["whole"]
    path: Path = ("body", "choices", 0, "message", "tool_calls", 0, "id")
    assert differences(answer, changed(answer, path, f"chatcmpl-tool-{'a' * 16}")) == []
    assert differences(answer, changed(answer, path, "call-1"))


def test_the_same_value_is_masked_by_the_same_word_in_one_answer() -> None:
    mask = Mask()
    chunks = [{"object": "x", "id": f"cmpl-{digit * 16}", "choices": []} for digit in "aab"]
    words = [mask(chunk)["id"] for chunk in chunks]
    assert words[0] == words[1] != words[2]


def test_a_field_that_is_missing_or_added_is_seen() -> None:
    answer = recorded.load(ANSWERED[0])["whole"]
    added = copy.deepcopy(answer)
    added["body"]["choices"][0]["message"]["extra"] = None
    assert differences(answer, added)
    assert differences(added, answer)


def test_logprobs_may_differ_in_their_last_bits_alone() -> None:
    one = {"status": 200, "content_type": "", "body": {"logprob": -1.5}}
    near = changed(one, ("body", "logprob"), -1.5 * (1 + 0.9e-4))
    far = changed(one, ("body", "logprob"), -1.5 * (1 + 1.1e-4))
    assert differences(one, near) == []
    assert differences(one, far)


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
    return {"id": "i", "object": "o", "created": 1, "model": "m", "choices": [choice]}


def streamed(*chunks: dict[str, Any]) -> Answer:
    return {"status": 200, "content_type": "", "events": [*chunks, "[DONE]"]}


def test_text_that_vllm_put_into_one_chunk_is_the_same_text() -> None:
    one = streamed(chunk({"content": "ab"}, token_ids=[1, 2]))
    two = streamed(chunk({"content": "a"}, token_ids=[1]), chunk({"content": "b"}, token_ids=[2]))
    assert differences(one, two) == []
    assert differences(one, streamed(*two["events"][:1], chunk({"content": "c"}, token_ids=[2])))


@pytest.mark.parametrize(
    "parts",
    [
        [chunk({"content": "a"}), chunk({"reasoning": "b"})],
        [chunk({"content": "a"}, finish_reason="stop"), chunk({"content": "b"})],
        [chunk({"role": "assistant", "content": "a"}), chunk({"content": "b"})],
    ],
    ids=["another kind", "after the end", "the first"],
)
def test_chunks_that_are_more_than_text_stay_apart(parts: list[dict[str, Any]]) -> None:
    assert differences(streamed(chunk({"content": "ab"})), streamed(*parts))


def test_a_stream_that_does_not_make_the_whole_answer_is_seen() -> None:
    answers = recorded.load(next(case for case in ANSWERED if case.name == "plain"))
    assert against_whole(answers["whole"], answers["streamed"]) == []
    short = {**answers["streamed"], "events": answers["streamed"]["events"][3:]}
    assert against_whole(answers["whole"], short)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'data: {"a": 1}\n\n',
        "data: [DONE]\n",
        'data: {"a": 1}\ndata: [DONE]\n\n',
        "event: x\n\ndata: [DONE]\n\n",
        "data: [DONE]\n\ndata: [DONE]\n\n",
        'data: [DONE]\n\ndata: {"a": 1}\n\n',
    ],
)
def test_a_stream_that_is_framed_otherwise_is_refused(text: str) -> None:
    with pytest.raises(FramingError):
        events_of(text)


def test_events_are_read_in_their_order() -> None:
    assert events_of('data: {"a": 1}\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]


ERROR = {"error": {"message": "no", "type": "BadRequestError", "param": "echo", "code": 400}}
REFUSAL: Answer = {"status": 400, "content_type": "application/json", "body": ERROR}
ANSWER: Answer = {"status": 200, "content_type": "application/json", "body": {"object": "x"}}


def verdict(theirs: Answer, ours: Answer, **about: Any) -> bool:
    case = Case(name="x", path="completions", body={}, **about)
    return judge(case, {"whole": theirs}, {"whole": ours}, "whole").ok


def test_a_gap_must_be_refused_by_its_name() -> None:
    assert verdict(ANSWER, REFUSAL, gap="echo")
    assert not verdict(ANSWER, REFUSAL, gap="logprobs")
    assert not verdict(ANSWER, REFUSAL)


def test_a_gap_that_is_answered_must_be_answered_rightly() -> None:
    assert verdict(ANSWER, ANSWER, gap="echo")
    assert not verdict(ANSWER, {**ANSWER, "body": {"object": "y"}}, gap="echo")


def test_a_reason_to_differ_must_still_be_needed() -> None:
    assert verdict(ANSWER, REFUSAL, differs="why")
    assert not verdict(ANSWER, ANSWER, differs="why")


def test_another_answer_on_purpose_is_an_error_of_openais_form() -> None:
    assert not verdict(ANSWER, {**REFUSAL, "body": {"detail": "no"}}, differs="why")
    assert not verdict(ANSWER, {**REFUSAL, "status": 500}, differs="why")


def test_an_error_may_come_early_but_must_be_the_same() -> None:
    late = {"status": 200, "content_type": "text/event-stream", "events": [ERROR, "[DONE]"]}
    assert verdict(late, REFUSAL)
    other = json.loads(json.dumps(REFUSAL))
    other["body"]["error"]["message"] = "other"
    assert not verdict(late, other)
    assert not verdict(late, {**REFUSAL, "status": 500})
