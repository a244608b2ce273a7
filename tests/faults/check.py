"""The invariants, as pure functions over what was recorded: each returns its violations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .inject import Fault
from .member import Exit, Life
from .record import Record

LATE_S = 2.0
SETTLE_S = 2.0  # for so long after its end a fault still counts as one that touched a request
FREE_S = 2.0
MAX_FILES = 300
MAX_GROWTH_BYTES = 120 * 2**20
WARM_S = 20.0  # of a process's life, before its memory is looked at

ACK_WAIT_S = 10.0  # what a lost worker had in hand comes again after it

DISRUPTIVE = ("kill", "stop", "term")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    kind: str
    request_id: str  #: empty: of no single request
    text: str


def touching(record: Record, faults: Iterable[Fault], *, patience: float = 1.0) -> list[Fault]:
    """Return the faults that overlapped a request's life."""
    ended = record.deadline + LATE_S if record.ended is None else record.ended
    return [
        fault
        for fault in faults
        if fault.started <= ended
        and (fault.healed is None or fault.healed + SETTLE_S * patience >= record.sent)
    ]


def check_requests(
    records: Iterable[Record], faults: list[Fault], *, patience: float = 1.0
) -> list[Violation]:
    """Return every request that broke an invariant on its own.

    `patience`: how many times longer than on an idle machine things may take.
    """
    found: list[Violation] = []
    for record in records:
        around = touching(record, faults, patience=patience)
        found += _lost(record, around)
        found += _late(record, around, LATE_S * patience)
        found += [Violation("wrong_answer", record.request_id, text) for text in record.problems]
        if record.end in ("error", "cut", "refused"):
            if excuse(record, around) is None:
                found.append(Violation("failed", record.request_id, _what(record, around)))
        elif record.end == "ok" and record.order.refusal is not None:
            text = f"answered, and should be refused with {record.order.refusal}"
            found.append(Violation("wrong_answer", record.request_id, text))
    return found


def excuse(record: Record, around: list[Fault]) -> str | None:
    """Return why a request may have failed as it did. None: it may not."""
    order, status = record.order, record.http_status
    kinds = {fault.kind for fault in around}
    if "stall" in kinds:
        return "the whole machine stood still"
    if record.end == "refused" and (
        kinds & {"broker_kill", "broker_stop"} or record.gateway in {f.target for f in around}
    ):
        return "its gateway, or the broker, was away"
    if record.end == "cut":
        own = [fault.kind for fault in around if fault.target == record.gateway]
        return "its gateway was killed" if "kill" in own else None
    if order.refusal is not None and status == order.refusal:
        return "it is refused as it should be"
    if status == 499 and order.ending == "cancel":
        return "it was cancelled"
    if status == 504:
        if order.ending == "deadline":
            return "its deadline is short"
        if sum(f.kind in DISRUPTIVE and _is_stage(f) for f in around) >= 2:
            return "several of its workers were lost one after the other"
    if status == 503 and kinds & {"broker_kill", "broker_stop"} and order.lane == "rt":
        return "the broker was away"
    if status == 500 and not order.continuable and record.num_events > 0:
        if any(f.target.startswith("decode") and _hands_over(f) for f in around):
            return "its decode worker was lost in the middle of an answer that can't be continued"
    if status == 500 and record.num_events > 0 and "broker_kill" in kinds:
        if any(_loses_job(f) for f in around):
            return (
                "its job had another owner, and a killed broker forgot what the first one answered"
            )
    return None


def check_results(records: Iterable[Record], again: Mapping[str, bytes | None]) -> list[Violation]:
    """Return the results that are not the same, byte for byte, when they are read again."""
    return [
        Violation("result_changed", record.request_id, "its kept result is another one now")
        for record in records
        if record.result is not None and again.get(record.request_id) != record.result
    ]


def check_terminals(seen: Mapping[str, set[bytes]]) -> list[Violation]:
    """Return the requests for which two different terminals went out."""
    return [
        Violation("double_terminal", request_id, " / ".join(map(repr, sorted(ends))))
        for request_id, ends in seen.items()
        if len(ends) > 1
    ]


def check_exits(exits: Iterable[Exit], codes_of_end: Mapping[str, int]) -> list[Violation]:
    """Return the processes that ended though nobody had told them to, and those that did not drain."""
    found = []
    for end in exits:
        if not end.wanted:
            found.append(Violation("died", "", f"{end.name} ended with {end.code} by itself"))
        elif end.code not in (0, -9):
            found.append(Violation("died", "", f"{end.name} drained with exit code {end.code}"))
    for name, code in codes_of_end.items():
        if code != 0:
            found.append(Violation("died", "", f"{name} drained with exit code {code} at the end"))
    return found


def check_growth(lives: Iterable[Life]) -> list[Violation]:
    """Return the lives that used ever more memory, or too many files."""
    found = []
    for life in lives:
        files = max((sample[2] for sample in life.samples), default=0)
        if files > MAX_FILES:
            found.append(Violation("leak", "", f"{life.name} had {files} files open"))
        warm = [rss for at, rss, _ in life.samples if at - life.started >= WARM_S]
        if warm and warm[-1] - warm[0] > MAX_GROWTH_BYTES:
            grown = (warm[-1] - warm[0]) / 2**20
            found.append(Violation("leak", "", f"{life.name} grew by {grown:.0f} MiB"))
    return found


def _lost(record: Record, around: list[Fault]) -> list[Violation]:
    if record.end != "none":
        return []
    return [Violation("lost", record.request_id, f"no end {_what(record, around)}")]


def _late(record: Record, around: list[Fault], late_s: float) -> list[Violation]:
    if record.ended is None or record.end in ("left", "refused", "cut"):
        return []
    held = [
        fault.healed or record.ended
        for fault in around
        if fault.kind == "stall"
        or _holds_gateway(fault, record)
        or (not record.gateway and (fault.kind in ("broker_kill", "broker_stop", "stop", "kill")))
    ]
    held += [
        # A gateway counts from when it reads a request.
        fault.healed + record.deadline - record.sent
        for fault in around
        if _holds_gateway(fault, record) and fault.started <= record.sent and fault.healed
    ]
    if record.order.lane != "rt":
        held += [
            # Until the end of the others something may be delivered that nobody takes.
            (fault.started if fault.kind == "kill" else fault.healed or record.ended) + ACK_WAIT_S
            for fault in around
            if _loses_deliveries(fault)
        ]
    if record.ended <= max([record.deadline, *held]) + late_s:
        return []
    text = f"{record.late_s:.2f} s past its deadline; {_what(record, around)}"
    return [Violation("late", record.request_id, text)]


def _holds_gateway(fault: Fault, record: Record) -> bool:
    return fault.kind == "stop" and fault.target == record.gateway


def _is_stage(fault: Fault) -> bool:
    return fault.target.split("-")[0] in ("render", "decode", "derender", "prefill")


def _loses_deliveries(fault: Fault) -> bool:
    """Whether what a worker was about to take, or had taken, may come again after `ack_wait` only."""
    return fault.kind in ("broker_kill", "broker_stop") or (
        fault.kind in ("kill", "stop") and _is_stage(fault)
    )


def _loses_job(fault: Fault) -> bool:
    """Whether a running job may get another owner: its worker is lost, or the broker heard nothing of it."""
    if fault.kind == "broker_stop":
        # A sign of life comes every third of `ack_wait`.
        return (fault.healed or float("inf")) - fault.started > ACK_WAIT_S * 2 / 3
    return fault.target.startswith("decode") and _hands_over(fault)


def _hands_over(fault: Fault) -> bool:
    """Whether the worker is taken for lost: it died, has no connection, or was away too long."""
    if fault.kind in ("kill", "cut"):
        return True
    lasted = (fault.healed or float("inf")) - fault.started
    return fault.kind == "stop" and lasted > 8.0


def _what(record: Record, around: list[Fault]) -> str:
    order = record.order
    life = (record.ended or record.deadline) - record.sent
    faults = ", ".join(f"{f.kind} {f.target} {f.started - record.sent:+.1f}" for f in around)
    return (
        f"{order.kind} {order.lane} {order.way}{' stream' if order.stream else ''} {order.ending}: "
        f"{record.end} {record.http_status} after {life:.2f} s, {record.num_events} events, "
        f"{record.message!r}; via {record.gateway or '-'}; faults: {faults or 'none'}"
    )
