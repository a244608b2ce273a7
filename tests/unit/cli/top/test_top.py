from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from headrace.cli.top.frame import Frame, Look, Queue, Rates, frame
from headrace.cli.top.view import view
from headrace.shared import subjects, wire
from headrace.shared.broker import Kept, QueueInfo, Received
from headrace.shared.messages import Heartbeat, Job, Prompt, Timings
from headrace.shared.subjects import Lane, Role

NOW = 1_000_000.0
POOL = subjects.pool("m", "c0ffee00")


def beat(role: Role, number: int = 1, **more: Any) -> Heartbeat:
    base: dict[str, Any] = {
        "role": role,
        "instance": f"{role}-{number}",
        "model": "" if role is Role.GATEWAY else "m",
        "contract": "" if role is Role.GATEWAY else "c0ffee00",
        "state": "ready",
        "slots": 8,
        "num_running": 3,
        "sent": NOW,
    }
    return Heartbeat(**(base | more))


def info(filter_subject: str, waiting: int = 0, taken: int = 0, deliveries: int = 0) -> QueueInfo:
    return QueueInfo(
        filter_subject=filter_subject,
        num_waiting=waiting,
        num_taken=taken,
        num_deliveries=deliveries,
        last_delivered=deliveries,
    )


def kept(subject: str, stored: float, payload: bytes = b"") -> Kept:
    return Kept(sequence=1, stored=stored, received=Received(subject, payload, {}, ""))


def look(*beats: Heartbeat, **more: Any) -> Look:
    base: dict[str, Any] = {
        "time": NOW,
        "beats": beats,
        "queues": (),
        "num_dead_letters": 0,
        "sees_messages": True,
    }
    return Look(**(base | more))


def job(request_id: str, accepted: float) -> bytes:
    return wire.encode(
        Job(
            request_id=request_id,
            tenant="acme",
            model="m",
            lane=Lane.RT,
            endpoint="completions",
            created=0,
            published=accepted + 1,
            deadline=NOW + 60,
            contract="c0ffee00",
            body=b"{}",
            stream=False,
            prompts=(Prompt(token_ids=b"", sampling_params=b""),),
            timings=Timings(accepted=accepted),
        )
    )


def text_of(shown: Frame, trouble: str = "") -> str:
    written = io.StringIO()
    Console(file=written, width=160, color_system=None).print(view(shown, trouble))
    return written.getvalue()


def test_workers_stand_in_the_order_of_a_request_with_what_each_has() -> None:
    decode = beat(Role.DECODE, kv_blocks_total=100, kv_blocks_free=25, num_prefilled=4)
    shown = frame(look(decode, beat(Role.RENDER), beat(Role.GATEWAY, slots=0)), Rates())
    assert [w.role for w in shown.workers] == ["gateway", "render", "decode"]
    gateway, render, last = shown.workers
    assert (last.kv_blocks_used, last.kv_blocks_total, last.num_prefilled) == (75, 100, 4)
    assert (render.kv_blocks_used, render.num_prefilled) == (None, None)
    (line,) = [line for line in text_of(shown).splitlines() if line.startswith("decode-1")]
    assert line.split() == ["decode-1", "m", "ready", "3", "8", "75%", "4", "-", "-", "-"]
    assert "0 remote, 4 local" in text_of(shown)
    assert gateway.slots == 0


def test_what_a_colocated_engine_computes_is_no_prefill_that_another_should_have_done() -> None:
    plain = beat(Role.DECODE, num_prefilled=4, is_colocated=True)
    shown = text_of(frame(look(plain), Rates()))
    assert "0 remote, 0 local, 4 colocated" in shown
    assert "decode-1 colocated" in shown


def test_rates_are_of_the_time_between_two_heartbeats_and_of_one_process() -> None:
    rates = Rates()

    def looked(sent: float, prefilled: int, pulled: int) -> tuple[float | None, float | None]:
        decode = beat(
            Role.DECODE,
            sent=sent,
            num_prefilled=prefilled,
            num_external_cached_token_ids=pulled,
            num_generated_token_ids=2 * pulled,
        )
        shown = frame(look(decode), rates)
        (worker,) = shown.workers
        if worker.pulled_token_ids_per_s:
            assert worker.generated_token_ids_per_s == 2 * worker.pulled_token_ids_per_s
            assert "4,000 tokens/s" in text_of(shown)
        return worker.prefilled_per_s, worker.pulled_token_ids_per_s

    assert looked(10.0, 100, 0) == (None, None)
    assert looked(12.0, 110, 4_000) == (5.0, 2_000.0)
    assert looked(12.0, 110, 4_000) == (5.0, 2_000.0)  # no new heartbeat yet
    assert looked(14.0, 110, 4_000) == (0.0, 0.0)
    assert looked(16.0, 3, 4_000) == (None, 0.0)  # it counts from the start again


def test_queues_stand_in_the_order_of_a_request_and_of_the_lanes() -> None:
    queues = [
        Queue(info=info(subjects.prefill(POOL, Lane.RT))),
        Queue(info=info(subjects.job_filter(POOL, Lane.BULK), waiting=5)),
        Queue(info=info(subjects.job_filter(POOL, Lane.RT), taken=2)),
        Queue(
            info=info(subjects.req_filter("m", Lane.RT), waiting=1),
            oldest_s=90.0,
        ),
    ]
    beats = [beat(role) for role in Role]
    shown = frame(look(*beats, queues=queues), Rates())
    assert shown.queues is not None
    assert [(q.stage, q.model, q.lane) for q in shown.queues] == [
        ("render", "m", "rt"),
        ("decode", POOL, "rt"),
        ("decode", POOL, "bulk"),
        ("prefill", POOL, "rt"),
    ]
    assert [(q.num_waiting, q.num_taken) for q in shown.queues] == [(1, 0), (0, 2), (5, 0), (0, 0)]
    assert shown.queues[0].oldest_s == 90
    assert "0:01:30" in text_of(shown)


def test_an_empty_queue_without_workers_is_left_out_and_a_full_one_is_not() -> None:
    gone = subjects.pool("m", "00c0ffee")
    queues = [
        Queue(info=info(subjects.job_filter(gone, Lane.RT))),
        Queue(info=info(subjects.job_filter(gone, Lane.STD), waiting=1)),
        Queue(info=info(subjects.prefill_worker(POOL, "prefill-1"))),
        Queue(info=info(subjects.prefill_worker(POOL, "prefill-2"), taken=1)),
    ]
    shown = frame(look(beat(Role.PREFILL), beat(Role.DECODE), queues=queues), Rates())
    assert shown.queues is not None
    assert [(q.model, q.lane) for q in shown.queues] == [(gone, "std"), (POOL, "prefill-2")]


def test_what_a_queue_gives_in_a_second_is_counted_by_its_deliveries() -> None:
    rates = Rates()

    def looked(time: float, deliveries: int) -> float | None:
        queue = Queue(info=info(subjects.req_filter("m", Lane.RT), 1, 0, deliveries))
        shown = frame(look(time=time, queues=[queue]), rates)
        assert shown.queues is not None
        return shown.queues[0].taken_per_s

    assert [looked(1.0, 7), looked(3.0, 27), looked(3.5, 27)] == [None, 10.0, 0.0]


def test_the_requests_that_were_accepted_first_come_first() -> None:
    rt, bulk = subjects.job(POOL, "acme", Lane.RT), subjects.job(POOL, "umbrella", Lane.BULK)
    queues = [
        Queue(
            info=info(subjects.job_filter(POOL, Lane.RT), taken=2),
            first_taken=[kept(rt, NOW, job("r1", NOW - 5)), kept(rt, NOW, job("r2", NOW - 50))],
        ),
        Queue(
            info=info(subjects.job_filter(POOL, Lane.BULK), taken=1),
            first_taken=[kept(bulk, NOW - 20)],  # its payload is stored elsewhere
        ),
    ]
    shown = frame(look(queues=queues), Rates())
    assert shown.running is not None
    assert [(r.request_id, r.tenant, r.lane, r.age_s) for r in shown.running] == [
        ("r2", "acme", "rt", 50.0),
        (None, "umbrella", "bulk", 20.0),
        ("r1", "acme", "rt", 5.0),
    ]


def test_what_this_user_may_not_see_is_named_and_not_shown_as_nothing() -> None:
    denied = look(beat(Role.DECODE), queues=None, sees_messages=False, num_dead_letters=None)
    shown = frame(denied, Rates())
    assert (shown.queues, shown.running, shown.num_dead_letters) == (None, None, None)
    text = text_of(shown)
    assert text.count("only the broker's user admin may see this") == 2
    assert "dead letters unknown" in text


def test_names_of_others_do_nothing_to_the_terminal() -> None:
    shown = frame(look(beat(Role.DECODE, instance="\x1b[2J", model="[red]m[/red]")), Rates())
    text = text_of(shown, trouble="\x07gone")
    assert "\x1b" not in text
    assert "\\x1b[2J" in text
    assert "[red]m[/red]" in text
    assert "\\x07gone" in text
