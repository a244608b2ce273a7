"""Every checker of the fault harness goes red on a planted violation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker
from headrace.shared.errors import AnswerLostError
from headrace.shared.messages import Takeover, Terminal
from headrace.shared.subjects import Lane

from . import check, logs
from .answers import Streamed, problems_of_body
from .inject import Fault
from .member import Exit, Life
from .nats_client import NatsClient
from .nats_reader import Reader
from .orders import Order, make
from .record import Record
from .terminals import Terminals

SENT = 1_000.0


def order_of(kind: str, **fields: Any) -> Order:
    """Return the first order of a kind that is read to its end."""
    wanted = {"ending": "read", **fields}
    for number in range(5_000):
        order = make(0, number)
        if order.kind == kind and all(getattr(order, k) == v for k, v in wanted.items()):
            return order
    raise AssertionError(f"no order of kind {kind}")


def record_of(order: Order, **fields: Any) -> Record:
    record = Record(order, order.request_id, sent=SENT, gateway="gateway-0")
    record.accepted, record.deadline, record.ended = SENT, SENT + 30.0, SENT + 1.0
    record.end, record.http_status = "ok", 200
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def fault(kind: str, target: str, started: float = SENT, healed: float = SENT + 1.0) -> Fault:
    return Fault(0, kind, target, "", started, healed)


def kinds(records: list[Record], faults: list[Fault] | None = None) -> list[str]:
    return [violation.kind for violation in check.check_requests(records, faults or [])]


PLAIN = order_of("plain", stream=False, way="http")


def test_a_request_that_ended_well_is_no_violation() -> None:
    assert kinds([record_of(PLAIN)]) == []


def test_a_request_without_an_end_is_lost() -> None:
    assert kinds([record_of(PLAIN, end="none", ended=None)]) == ["lost"]


def test_an_end_past_the_deadline_is_late() -> None:
    late = record_of(PLAIN, ended=SENT + 32.5)
    assert kinds([late]) == ["late"]
    assert kinds([late], [fault("stop", "gateway-1", healed=SENT + 31.0)]) == ["late"]
    assert kinds([late], [fault("stop", "gateway-0", healed=SENT + 31.0)]) == []


def test_a_deadline_begins_when_a_stopped_gateway_reads_the_request() -> None:
    late = record_of(PLAIN, ended=SENT + 51.5)
    stopped_before = fault("stop", "gateway-0", started=SENT - 5.0, healed=SENT + 20.0)
    assert kinds([late], [stopped_before]) == []
    assert kinds([record_of(PLAIN, ended=SENT + 52.5)], [stopped_before]) == ["late"]
    stopped_after = fault("stop", "gateway-0", started=SENT + 0.1, healed=SENT + 20.0)
    assert kinds([late], [stopped_after]) == ["late"]


def test_what_came_before_a_reader_gave_up_is_counted() -> None:
    class Torn:
        streamed = Streamed(PLAIN)

        async def terminal(self, until: float) -> Terminal:
            self.streamed.event('{"choices": []}')
            raise AnswerLostError("two workers answered this request")

    order = order_of("plain", stream=True, way="nats", lane=Lane.RT)
    record = record_of(order, gateway="", ended=None)
    asyncio.run(NatsClient(cast("Broker", None))._read(order, record, cast("Reader", Torn())))
    assert (record.num_events, record.end, record.http_status) == (1, "error", 500)
    others = [
        fault("kill", "decode-1", healed=SENT + 2.0),
        fault("broker_kill", "broker", started=SENT + 3.0, healed=SENT + 5.0),
    ]
    record.ended = SENT + 6.0
    assert kinds([record], others) == []
    assert kinds([record], others[:1]) == ["failed"]


def test_on_a_slow_machine_an_end_may_be_later() -> None:
    late = record_of(PLAIN, ended=SENT + 36.0)
    assert [v.kind for v in check.check_requests([late], [], patience=2.0)] == ["late"]
    assert check.check_requests([late], [], patience=5.0) == []
    assert make(0, PLAIN.number, patience=5.0).timeout_s == 5 * PLAIN.timeout_s


def test_a_failure_that_no_fault_explains_is_a_violation() -> None:
    failed = record_of(PLAIN, end="error", http_status=500)
    assert kinds([failed]) == ["failed"]
    assert kinds([failed], [fault("kill", "decode-0")]) == ["failed"]


def test_only_an_answer_that_can_t_be_continued_may_fail_with_its_decode_worker() -> None:
    lost = {"end": "error", "http_status": 500, "num_events": 3}
    two = order_of("n2", stream=True)
    assert kinds([record_of(two, **lost)], [fault("kill", "decode-0")]) == []
    assert kinds([record_of(two, **lost)], [fault("cut", "decode-1")]) == []
    assert kinds([record_of(two, **lost)], [fault("kill", "prefill-0")]) == ["failed"]
    assert kinds([record_of(PLAIN, **lost)], [fault("kill", "decode-0")]) == ["failed"]


def test_an_answer_is_lost_only_with_its_worker_and_the_broker_s_memory() -> None:
    mixed = record_of(PLAIN, end="error", http_status=500, num_events=3)
    forgets = fault("broker_kill", "broker")
    assert kinds([mixed], [fault("stop", "decode-0", healed=SENT + 13.0), forgets]) == []
    assert kinds([mixed], [fault("stop", "prefill-0", healed=SENT + 13.0), forgets]) == ["failed"]
    assert kinds([mixed], [forgets]) == ["failed"]
    assert kinds([mixed], [fault("broker_stop", "broker", healed=SENT + 13.0), forgets]) == []
    assert kinds([mixed], [fault("broker_stop", "broker", healed=SENT + 3.0), forgets]) == [
        "failed"
    ]


def test_a_machine_that_stood_still_excuses_what_it_broke() -> None:
    stall = fault("stall", "machine", healed=SENT + 31.0)
    cut = record_of(PLAIN, end="cut", http_status=None)
    late = record_of(PLAIN, ended=SENT + 32.5)
    assert kinds([cut, late], [stall]) == []
    assert kinds([cut, late]) == ["failed", "late"]


def test_std_and_bulk_may_wait_for_what_a_lost_worker_had_in_hand() -> None:
    kept = order_of("plain", way="nats", lane="std")
    late = record_of(kept, gateway="", ended=SENT + 32.5)
    assert kinds([late], [fault("kill", "decode-0", started=SENT + 21.0, healed=SENT + 23.0)]) == []
    assert kinds([late], [fault("kill", "decode-0", started=SENT, healed=SENT + 2.0)]) == ["late"]
    assert kinds([late], [fault("stop", "decode-0", started=SENT, healed=SENT + 21.0)]) == []


def test_a_connection_may_break_only_with_its_own_gateway() -> None:
    cut = record_of(PLAIN, end="cut", http_status=None)
    assert kinds([cut], [fault("kill", "gateway-0")]) == []
    assert kinds([cut], [fault("kill", "gateway-1")]) == ["failed"]
    assert kinds([cut], [fault("term", "gateway-0")]) == ["failed"]


def test_a_refusal_with_the_wrong_status_is_a_violation() -> None:
    too_long = order_of("too_long")
    assert kinds([record_of(too_long, end="error", http_status=400)]) == []
    assert kinds([record_of(too_long, end="error", http_status=500)]) == ["failed"]
    assert kinds([record_of(too_long)]) == ["wrong_answer"]


def test_a_fault_long_before_a_request_excuses_nothing() -> None:
    refused = record_of(PLAIN, end="refused", http_status=503)
    before = fault("broker_kill", "broker", started=SENT - 20.0, healed=SENT - 10.0)
    assert kinds([refused], [before]) == ["failed"]
    assert kinds([refused], [fault("broker_kill", "broker")]) == []


def test_a_kept_result_that_changes_or_goes_away_is_a_violation() -> None:
    records = [record_of(PLAIN, result=b"the first")]
    again = {PLAIN.request_id: b"the first"}
    assert check.check_results(records, again) == []
    for other in (b"another", None):
        (violation,) = check.check_results(records, {PLAIN.request_id: other})
        assert violation.kind == "result_changed"


def test_two_different_terminals_are_a_violation() -> None:
    assert check.check_terminals({"a": {b"ok 200 "}}) == []
    (violation,) = check.check_terminals({"a": {b"ok 200 ", b"error 500 {}"}})
    assert violation.kind == "double_terminal"


@pytest.mark.parametrize("is_taken_over", [True, False])
async def test_an_end_that_a_takeover_has_made_void_is_none(
    broker: Broker, is_taken_over: bool
) -> None:
    request_id = f"r-{is_taken_over}"
    subject = subjects.out("default", request_id)
    terminals = Terminals()
    await terminals.start(broker)
    came = asyncio.Event()
    await broker.subscribe("hr.v1.frames.somebody", lambda _: came.set())
    takeover = Takeover(
        request_id=request_id, tenant="default", epoch=2, seq=0, decode_instance="d-2"
    )
    ends = [
        Terminal(request_id=request_id, seq=0, status="error", http_status=500, epoch=1),
        Terminal(request_id=request_id, seq=0, status="ok", http_status=200, body=b"{}", epoch=2),
    ]
    if is_taken_over:
        await broker.publish_durable(subject, wire.encode(takeover), message_id=f"{request_id}.t")
    for end in ends:
        message_id = f"{request_id}.{end.epoch}"
        await broker.publish_durable(subject, wire.encode(end), message_id=message_id)
    await broker.publish("hr.v1.frames.somebody", b"")
    await came.wait()
    await terminals.settle()
    assert len(terminals.ends[request_id]) == (1 if is_taken_over else 2)
    assert terminals.num_void == is_taken_over


def test_a_process_that_ends_by_itself_is_a_violation() -> None:
    killed = Exit("decode-0", -9, wanted=True, ended=SENT, life_s=5.0)
    assert check.check_exits([killed], {"decode-0": 0}) == []
    for end in (
        dataclasses.replace(killed, wanted=False),
        dataclasses.replace(killed, code=1),
    ):
        assert [v.kind for v in check.check_exits([end], {})] == ["died"]
    assert [v.kind for v in check.check_exits([], {"decode-0": 1})] == ["died"]


def test_growing_memory_and_ever_more_files_are_a_leak() -> None:
    mib = 2**20
    steady = Life("decode-0", SENT, [(SENT + 30.0 * i, 90 * mib, 20) for i in range(9)])
    growing = Life("decode-0", SENT, [(SENT + 30.0 * i, (90 + 40 * i) * mib, 20) for i in range(9)])
    files = Life("decode-0", SENT, [(SENT + 30.0 * i, 90 * mib, 20 + 50 * i) for i in range(9)])
    assert check.check_growth([steady]) == []
    assert [v.kind for v in check.check_growth([growing, files])] == ["leak", "leak"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"level": "warning", "action": "disconnected", "message": "connection lost"}, 0),
        ({"level": "error", "action": "unexpected_error", "message": "failed"}, 1),
        ({"level": "error", "message": "never retrieved", "exception": "T\nValueError: x"}, 1),
    ],
)
def test_what_no_process_may_say_is_a_violation(
    tmp_path: Path, line: dict[str, str], found: int
) -> None:
    log = tmp_path / "decode-0.log"
    log.write_text(json.dumps(line) + "\n")
    assert len(logs.read([log])[1]) == found


def test_a_log_line_that_is_no_json_is_a_violation(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    log.write_text("Traceback (most recent call last):\n")
    assert len(logs.read([log])[1]) == 1


def body_of(order: Order, **change: Any) -> bytes:
    (wanted,) = order.choices
    choice = {"index": 0, "text": wanted.text, "finish_reason": wanted.finish_reason, **change}
    usage = {"completion_tokens": wanted.num_token_ids}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def test_a_whole_answer_is_compared_to_the_character() -> None:
    assert problems_of_body(PLAIN, body_of(PLAIN)) == []
    assert problems_of_body(PLAIN, body_of(PLAIN, text=PLAIN.choices[0].text[:-1]))
    assert problems_of_body(PLAIN, body_of(PLAIN, finish_reason="abort"))
    assert problems_of_body(PLAIN, b"")
    assert problems_of_body(PLAIN, b'{"choices": [], "usage": {}}')


STREAMED = order_of("plain", stream=True)


def events_of(order: Order) -> list[str]:
    (wanted,) = order.choices
    parts = [{"index": 0, "text": character, "finish_reason": None} for character in wanted.text]
    parts[-1]["finish_reason"] = wanted.finish_reason
    return [*(json.dumps({"choices": [part]}) for part in parts), "[DONE]"]


def problems_of_events(events: list[str]) -> list[str]:
    streamed = Streamed(STREAMED)
    for event in events:
        streamed.event(event)
    return streamed.check()


def test_a_streamed_answer_has_no_holes_and_no_doubles() -> None:
    events = events_of(STREAMED)
    assert problems_of_events(events) == []
    assert problems_of_events(events[:3] + events[4:])
    assert problems_of_events(events[:3] + events[2:])
    assert problems_of_events(events[:-1])
    assert problems_of_events([*events, events[0]])
    assert problems_of_events([*events[:-1], events[-2], events[-1]])


def test_what_came_before_an_error_event_must_be_right_as_well() -> None:
    error = json.dumps({"error": {"message": "m", "type": "t", "code": 500}})
    good, bad = Streamed(STREAMED), Streamed(STREAMED)
    for event in [*events_of(STREAMED)[:3], error]:
        good.event(event)
    for event in [*events_of(STREAMED)[1:3], error]:
        bad.event(event)
    assert good.check_so_far() == []
    assert bad.check_so_far()


def test_orders_depend_on_the_seed_alone() -> None:
    assert [make(3, number) for number in range(50)] == [make(3, number) for number in range(50)]
    assert [make(3, number) for number in range(50)] != [make(4, number) for number in range(50)]
