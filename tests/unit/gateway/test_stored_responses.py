"""What a stored response is shown as, from its record and its end."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.errors import ResponseNotFoundError
from headrace.gateway.response_body import for_pipeline, listed_items, read
from headrace.gateway.response_object import StoredResponse, is_gone, response_of
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import Terminal, Timings

RECORD = StoredResponse(
    response_id="resp_1",
    model="m",
    created=1_000.0,
    deadline=1_600.0,
    background=True,
    stream=False,
)
FIELDS = {"input": "hi", "max_output_tokens": 5}


def terminal(status: str = "ok", http_status: int = 200, body: bytes = b"") -> Terminal:
    return Terminal(
        request_id="resp_1",
        seq=0,
        status=status,  # type: ignore[arg-type]
        http_status=http_status,
        body=body,
        timings=Timings(total_s=10.0),
    )


def shown(end: Terminal | None, now: float = 1_001.0, **changes: object) -> dict[str, object]:
    record = StoredResponse(**{n: getattr(RECORD, n) for n in RECORD.__struct_fields__} | changes)
    return response_of(record, FIELDS, end, now=now)


def test_without_an_end_it_is_queued_in_progress_cancelled_or_past_its_deadline() -> None:
    assert shown(None)["status"] == "queued"
    assert shown(None, has_started=True)["status"] == "in_progress"
    assert shown(None, is_cancelled=True)["status"] == "cancelled"
    late = shown(None, now=1_700.0)
    assert (late["status"], late["error"]["code"]) == ("failed", "server_error")  # type: ignore[index]


def test_its_end_says_what_it_is() -> None:
    whole = b'{"id":"resp_1","status":"completed","output":[1],"background":false}'
    done = shown(terminal(body=whole))
    assert (done["status"], done["output"], done["background"]) == ("completed", [1], True)
    assert done["completed_at"] == 1_010
    assert shown(terminal("cancelled", 499))["status"] == "cancelled"
    error = b'{"error":{"message":"too long"}}'
    failed = shown(terminal("error", 400, error))
    assert failed["error"] == {"code": "invalid_prompt", "message": "too long"}
    assert shown(terminal("expired", 504))["status"] == "failed"


def test_an_answer_of_which_nothing_is_left_is_no_success() -> None:
    assert shown(terminal())["status"] == "failed"


@pytest.mark.parametrize(
    ("end", "now", "gone"),
    [
        (terminal(), 1_109.0, False),
        (terminal(), 1_111.0, True),
        (None, 1_200.0, False),  # it may still run
        (None, 1_604.0, False),
        (None, 1_606.0, True),
    ],
)
def test_it_is_kept_for_a_time_from_its_end(end: Terminal | None, now: float, gone: bool) -> None:
    assert is_gone(RECORD, end, now=now, kept_s=100.0) is gone


def test_a_body_without_any_of_it_goes_on_as_it_came() -> None:
    assert read(b'{"input":"background, store"}') is None
    assert read(b'{"input":"x","store":false}') is None


def test_the_pipeline_gets_the_conversation_and_none_of_the_gateways_fields() -> None:
    body = b'{"input":"two","store":true,"previous_response_id":"resp_0","model":"m"}'
    request = read(body)
    assert request is not None
    assert not request.background
    sent = json.loads(for_pipeline(request, "resp_1", [{"role": "user", "content": "one"}]))
    assert sent == {
        "model": "m",
        "request_id": "resp_1",
        "input": [
            {"role": "user", "content": "one"},
            {"type": "message", "role": "user", "content": "two"},
        ],
    }


@pytest.mark.parametrize(
    "body",
    [
        b'{"background":true,"store":false}',
        b'{"background":1,"store":"no"}',
        b'{"previous_response_id":5}',
        b'{"store":"perhaps"}',
        b'{"background":[]}',
    ],
)
def test_what_can_not_be_stored_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        read(body)


@pytest.mark.parametrize("word", [b"true", b'"yes"', b"1"])
def test_a_boolean_is_what_vllm_takes_for_one(word: bytes) -> None:
    stored, background = (
        read(b'{"input":"x","%s":%s}' % (name, word)) for name in (b"store", b"background")
    )
    assert stored is not None
    assert (stored.store, stored.background) == (True, False)
    assert background is not None
    assert (background.store, background.background) == (True, True)


def test_an_error_repeats_little_of_a_long_id() -> None:
    assert len(ResponseNotFoundError("x" * 10_000).message) < 200


def test_input_is_listed_as_items_with_ids() -> None:
    (item,) = listed_items("hi", "resp_1")
    assert item["id"] == "msg_1_0"
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    call = {"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}"}
    assert listed_items([call], "resp_1") == [call]
