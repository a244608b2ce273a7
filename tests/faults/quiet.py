"""What must be true again once nothing is under way: blocks free, queues empty, results as they were."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError
from headrace.shared.messages import DeadLetter, RollCall
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from .check import FREE_S, Violation
from .nats_client import NatsClient
from .record import Record

POLL_S = 0.1
QUEUES = ("HR_REQ_RT", "HR_REQ", "HR_JOB_RT", "HR_JOB", "HR_PF")
STAGES = (Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER)


async def check_engines(
    broker: Broker, table: WorkerTable, *, num: int, lease_s: float, within_s: float = FREE_S
) -> tuple[float | None, list[Violation]]:
    """Wait until every worker is idle and all its blocks are free.

    Returns the seconds that it took (None: it did not come to that within a lease), and what was violated.
    """
    started = time.monotonic()
    waited = 0.0
    while waited < max(lease_s + 5.0, within_s):
        await broker.publish(subjects.roll_call(), wire.encode(RollCall()))
        await asyncio.sleep(POLL_S)
        waited = time.monotonic() - started
        busy = _busy(table, num)
        if not busy:
            if waited <= within_s:
                return waited, []
            text = f"all idle only after {waited:.1f} s"
            return waited, [Violation("leaked_for_a_while", "", text)]
    return None, [Violation("leaked", "", text) for text in busy]


def _busy(table: WorkerTable, num: int) -> list[str]:
    beats = [beat for beat in table.workers() if beat.role in STAGES and beat.state == "ready"]
    found = [
        f"{beat.instance}: {beat.num_running} running, {beat.kv_blocks_free} of "
        f"{beat.kv_blocks_total} blocks free"
        for beat in beats
        if beat.num_running or beat.kv_blocks_free != beat.kv_blocks_total
    ]
    if len(beats) < num:
        found.append(f"{len(beats)} of {num} workers are ready")
    return found


async def check_queues(broker: Broker, *, wait_s: float = 5.0) -> list[Violation]:
    """Return the work queues in which something is left."""
    started = time.monotonic()
    while True:
        left = {name: await _num_messages(broker, name) for name in QUEUES}
        full = {name: num for name, num in left.items() if num}
        if not full or time.monotonic() - started > wait_s:
            return [Violation("left_over", "", f"{num} in {name}") for name, num in full.items()]
        await asyncio.sleep(POLL_S)


async def check_dead_letters(broker: Broker, *, num_wanted: int) -> list[Violation]:
    """Return the dead letters beyond those that were poisoned on purpose."""
    state = await _state(broker, "HR_DLQ")
    seqs = range(state["first_seq"], state["last_seq"] + 1) if state["messages"] else ()
    letters = [await _letter(broker, seq) for seq in seqs]
    unwanted = [letter for letter in letters if letter and "poison" not in letter.subject]
    found = [
        Violation("dead_letter", "", f"{letter.stage} {letter.subject}: {letter.reason}")
        for letter in unwanted
    ]
    num = len(letters) - len(unwanted)
    if num < num_wanted:  # a worker that dies between the letter and the ack writes it again
        found.append(Violation("dead_letter", "", f"{num} of {num_wanted} poisoned ones are there"))
    return found


async def read_results(client: NatsClient, records: Iterable[Record]) -> dict[str, bytes | None]:
    """Read again every result that was read before."""
    again = {}
    for record in records:
        if record.result is not None:
            again[record.request_id] = await client.result(record.request_id)
    return again


async def _num_messages(broker: Broker, stream: str) -> int:
    return int((await _state(broker, stream))["messages"])


async def _state(broker: Broker, stream: str) -> dict[str, int]:
    answer = json.loads(await broker.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s=5.0))
    if "error" in answer:
        raise BrokerError(f"{stream}: {answer['error']}")
    state: dict[str, int] = answer["state"]
    return state


async def _letter(broker: Broker, seq: int) -> DeadLetter | None:
    ask = json.dumps({"seq": seq}).encode()
    payload = await broker.request("$JS.API.DIRECT.GET.HR_DLQ", ask, timeout_s=5.0)
    return wire.decode(payload, DeadLetter) if payload else None
