"""What may stand in the body that creates a batch, and what a mistake in it is answered."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.batches_order import fields_of, order_of, window_s
from headrace.shared.errors import BadRequestError

RIGHT = {
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


def test_what_is_right_is_taken() -> None:
    order = order_of(
        {
            **RIGHT,
            "metadata": {"k" * 64: "v" * 512},
            "output_expires_after": {"anchor": "created_at", "seconds": 3_600},
            "something_new": 1,
        }
    )
    assert (order.input_file_id, order.endpoint) == ("file-1", "/v1/chat/completions")
    assert (order.completion_window, order.window_s) == ("24h", 86_400)
    assert (order.metadata, order.output_expires_after_s) == ({"k" * 64: "v" * 512}, 3_600)
    assert order_of(RIGHT).metadata is None


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("1s", 1), ("90s", 90), ("30m", 1_800), ("24h", 86_400), ("7d", 604_800), ("1h30m", 5_400)],
)
def test_the_completion_window_is_any_duration(window: str, seconds: int) -> None:
    assert window_s(window) == seconds


@pytest.mark.parametrize(
    "window", ["", "soon", "0s", "31d", "24", "h", "1h 30m", "-1h", "1.5h", "٣h", "1h\n"]
)
def test_a_completion_window_that_is_none_is_refused(window: str) -> None:
    with pytest.raises(BadRequestError, match="the completion window must be") as refused:
        window_s(window)
    assert refused.value.param == "completion_window"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"completion_window": 24}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {f"k{number}": "v" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": "k=v"}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"seconds": 3_600}}, "output_expires_after.anchor"),
        ({"output_expires_after": 5}, "output_expires_after"),
    ],
)
def test_a_mistake_is_refused_and_its_field_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        order_of({**RIGHT, **wrong})
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"[]", b"{", b'"x"', b"\xff", b"[" * 10_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="the body"):
        fields_of(body)


def test_an_empty_body_has_no_fields() -> None:
    assert fields_of(b" \n") == {}
