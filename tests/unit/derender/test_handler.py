"""What one stream makes of its entries, and what becomes of an answer that no message can carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.derender import handler as handlers
from headrace.derender.handler import StreamHandler
from headrace.derender.renderer import Closed, Fed
from headrace.shared import token_ids
from headrace.shared.errors import PayloadTooLargeError
from headrace.shared.messages import Job, OpenStream, Prompt, StreamEnd, Tokens
from headrace.shared.subjects import Lane

JOB = Job(
    request_id="r1",
    tenant="t",
    model="m",
    lane=Lane.RT,
    endpoint="completions",
    created=7,
    published=0.0,
    deadline=1.0,
    contract="c",
    body=b"{}",
    stream=False,
    prompts=(Prompt(token_ids=token_ids.pack([97]), sampling_params=b""),),
)
END = StreamEnd(stream_id=1, num_entries=0)


class Finished:
    """An answer of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def close(self) -> Closed:
        return Closed(body=b"x" * self._num_bytes)


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], StreamHandler]:
    monkeypatch.setattr(handlers, "MAX_BODY_BYTES", 1000)

    def make(num_bytes: int) -> StreamHandler:
        answer = Finished(num_bytes)
        return StreamHandler(JOB, answer, instance="d")  # type: ignore[arg-type] - only `close` is called

    return make


def test_a_whole_answer_too_large_for_a_message_is_an_error_that_says_so(
    handler: Callable[[int], StreamHandler],
) -> None:
    with pytest.raises(PayloadTooLargeError, match=r"1,001 bytes, and at most 1,000") as caught:
        handler(1001).close(END)
    assert handler(1001).fail(END, caught.value).http_status == 413


def test_a_whole_answer_that_fits_is_the_terminals_body(
    handler: Callable[[int], StreamHandler],
) -> None:
    assert handler(1000).close(END)[1].body == b"x" * 1000


class Echo:
    """An answer that makes a chunk of every other token ID."""

    def feed(self, choice: int, ids: list[int], **more: object) -> Fed:
        return Fed(chunks=tuple(b"%d" % token_id for token_id in ids if token_id % 2))

    def close(self) -> Closed:
        return Closed(chunks=(b"usage",))


def entry(index: int, token_id: int) -> Tokens:
    return Tokens(stream_id=3, index=index, choice=0, token_ids=token_ids.pack([token_id]))


def claimed(**fields: Any) -> StreamHandler:
    claim = OpenStream(stream_id=3, attempt=1, decode_instance="decode-1", job=JOB, **fields)
    return StreamHandler(JOB, Echo(), instance="d", claim=claim)  # type: ignore[arg-type] - what is called is there


def test_each_chunk_carries_the_entries_that_were_fed_since_the_one_before() -> None:
    stream = claimed(keeps_entries=True)
    entries = [entry(index, token_id) for index, token_id in enumerate((2, 3, 5, 8, 4))]
    chunks = [step.chunk for step in stream.work_off(entries).steps if step.chunk]
    assert [(chunk.seq, chunk.entries) for chunk in chunks] == [
        (0, tuple(entries[:2])),
        (1, tuple(entries[2:3])),
    ]
    last, terminal = stream.close(END)
    assert last is not None
    assert (last.seq, last.entries) == (2, tuple(entries[3:]))
    assert terminal.seq == 3


def test_chunks_carry_nothing_where_nobody_could_go_on() -> None:
    (step,) = claimed().work_off([entry(0, 3)]).steps
    assert step.chunk is not None
    assert step.chunk.entries == ()


def test_messages_of_an_earlier_owner_are_made_again_and_not_published() -> None:
    stream = claimed(epoch=2, first_seq=2)
    steps = stream.work_off([entry(index, 1 + 2 * index) for index in range(3)]).steps
    published = [step.chunk for step in steps if step.chunk]
    assert [(chunk.epoch, chunk.seq, chunk.chunks) for chunk in published] == [(2, 2, (b"5",))]
    assert stream.close(END)[1].seq == 4
