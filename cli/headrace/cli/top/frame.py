"""What `headrace top` shows at one moment, made of heartbeats and of what the broker says of its queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.shared import wire
from headrace.shared.errors import WireError
from headrace.shared.messages import Heartbeat, Job
from headrace.shared.queue_look import STAGES, Queue, tokens_of
from headrace.shared.subjects import Lane, Role

NUM_RUNNING = 10


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, by its last heartbeat."""

    role: str
    instance: str
    model: str
    state: str
    num_running: int
    slots: int
    """0: as many as come."""
    kv_blocks_used: int | None
    """None: no engine."""
    kv_blocks_total: int | None
    num_prefilled: int | None
    """Prompts computed since its start: on prefill for others, on decode its own. None: its role computes none."""
    prefilled_per_s: float | None
    """None: not known yet, or as above."""
    pulled_token_ids_per_s: float | None
    """Decode: prompt token IDs that came over NIXL."""
    generated_token_ids_per_s: float | None = None
    """Decode: token IDs of answers."""
    is_colocated: bool = False
    """Decode: a plain engine, whose prompts are all its own."""


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One queue: what one stage has to do of one model and lane."""

    stage: str
    model: str
    """The token in the subject: a model, or a model and the contract that its workers share."""
    lane: str
    """Or the one worker that it is for."""
    num_waiting: int
    num_taken: int
    oldest_s: float | None
    """How long the oldest one waits. None: none does, or this user may not look and no worker tells."""
    taken_per_s: float | None
    """None: not known yet."""


class RunningRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request that decode has taken."""

    request_id: str | None
    """None: too large to be looked at."""
    tenant: str
    lane: str
    model: str
    age_s: float
    """Since it was accepted."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    time: float
    """Unix seconds."""
    workers: list[WorkerRow]
    queues: list[QueueRow] | None
    """None: this user may not know."""
    running: list[RunningRow] | None
    """Those that were accepted first. None: this user may not know."""
    num_dead_letters: int | None
    """None: this user may not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at the stack."""

    time: float  #: Unix seconds
    beats: Sequence[Heartbeat]
    queues: Sequence[Queue] | None  #: None: denied
    sees_messages: bool  #: whether this user may look at what waits and what is taken
    num_dead_letters: int | None  #: None: denied


class Rates:
    """Counters over time: what each grew by in a second, between the last two times at which it was read."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float, float | None]] = {}

    def of(self, name: str, count: float, time: float) -> float | None:
        """Return the rate of a counter that stood at `count` at `time` (seconds). None: its first reading."""
        before, at, rate = self._last.get(name, (count, time, None))
        if time > at:
            rate = (count - before) / (time - at) if count >= before else None
        elif name in self._last:
            return rate  # the same reading
        self._last[name] = (count, time, rate)
        return rate


def frame(look: Look, rates: Rates) -> Frame:
    """Return what to show of a look; `rates` keeps the counters of those before."""
    roles = list(Role)
    beats = sorted(look.beats, key=lambda beat: (roles.index(beat.role), beat.instance))
    rows = [_queue_row(queue, look.time, rates) for queue in look.queues or ()]
    running = [row for queue in look.queues or () for row in _running(queue, look.time)]
    running.sort(key=lambda row: -row.age_s)
    return Frame(
        time=look.time,
        workers=[_worker_row(beat, rates) for beat in beats],
        queues=None if look.queues is None else _shown(rows, beats),
        running=running[:NUM_RUNNING] if look.sees_messages else None,
        num_dead_letters=look.num_dead_letters,
    )


def _worker_row(beat: Heartbeat, rates: Rates) -> WorkerRow:
    has_engine = beat.role in (Role.PREFILL, Role.DECODE)
    prefilled = rates.of(f"{beat.instance} prefilled", beat.num_prefilled, beat.sent)
    pulled = rates.of(f"{beat.instance} pulled", beat.num_external_cached_token_ids, beat.sent)
    generated = rates.of(f"{beat.instance} generated", beat.num_generated_token_ids, beat.sent)
    return WorkerRow(
        role=beat.role,
        instance=beat.instance,
        model=beat.model,
        state=beat.state,
        num_running=beat.num_running,
        slots=beat.slots,
        kv_blocks_used=beat.kv_blocks_total - beat.kv_blocks_free if has_engine else None,
        kv_blocks_total=beat.kv_blocks_total if has_engine else None,
        num_prefilled=beat.num_prefilled if has_engine else None,
        prefilled_per_s=prefilled if has_engine else None,
        pulled_token_ids_per_s=pulled if beat.role is Role.DECODE else None,
        generated_token_ids_per_s=generated if beat.role is Role.DECODE else None,
        is_colocated=beat.is_colocated,
    )


def _queue_row(queue: Queue, now: float, rates: Rates) -> QueueRow:
    info = queue.info
    return QueueRow(
        stage=queue.stage,
        model=queue.model,
        lane=queue.lane,
        num_waiting=info.num_waiting,
        num_taken=info.num_taken,
        oldest_s=queue.oldest_s,
        taken_per_s=rates.of(info.filter_subject, info.num_deliveries, now),
    )


def _running(queue: Queue, now: float) -> Iterable[RunningRow]:
    for kept in queue.first_taken:
        parts = kept.received.subject.split(".")
        request_id, since = None, kept.stored
        try:
            job = wire.decode(kept.received.payload, Job)
            request_id, since = job.request_id, job.timings.accepted or job.published
        except WireError:  # its payload is elsewhere, or it is none
            pass
        age = max(0.0, now - since)
        yield RunningRow(
            request_id=request_id, tenant=parts[4], lane=parts[5], model=parts[3], age_s=age
        )


def _shown(rows: list[QueueRow], beats: Sequence[Heartbeat]) -> list[QueueRow]:
    """Return the queues in the order of a request, without the empty ones that nobody serves."""
    served = {(str(beat.role), token) for beat in beats for token in tokens_of(beat)}
    lanes = [str(lane) for lane in Lane]

    def order(row: QueueRow) -> tuple[int, str, int, str]:
        lane = lanes.index(row.lane) if row.lane in lanes else len(lanes)
        return list(STAGES.values()).index(Role(row.stage)), row.model, lane, row.lane

    def is_shown(row: QueueRow) -> bool:
        is_lane = row.lane in lanes and (row.stage, row.model) in served
        return is_lane or row.num_waiting > 0 or row.num_taken > 0

    return sorted((row for row in rows if is_shown(row)), key=order)
