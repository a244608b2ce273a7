"""A frame of `headrace top` for a person: tables on a terminal, or the same as plain text."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headrace.cli.dlq.run import printable
from headrace.cli.top.frame import Frame, QueueRow, RunningRow, WorkerRow

NOT_ALLOWED = "only the broker's user admin may see this (broker.user, broker.password)"
STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow"}
LATE_S = 30.0  # a request that waits so long is worth a look


def view(frame: Frame, trouble: str = "") -> Group:
    """Return what to print; `trouble` is why the frame is an old one."""
    parts: list[Text | Table] = [_headline(frame)]
    if trouble:
        parts.append(Text(printable(trouble), style="bold red"))
    parts += [Text(), _workers(frame.workers), Text()]
    parts.append(_section("QUEUES", None if frame.queues is None else _queues(frame.queues)))
    parts.append(Text())
    running = None if frame.running is None else _running(frame.running)
    parts.append(_section("LONGEST-RUNNING REQUESTS", running))
    return Group(*parts)


def _headline(frame: Frame) -> Text:
    remote = sum(w.num_prefilled or 0 for w in frame.workers if w.role == "prefill")
    decode = [w for w in frame.workers if w.role == "decode"]
    local = sum(w.num_prefilled or 0 for w in decode if not w.is_colocated)
    colocated = sum(w.num_prefilled or 0 for w in decode if w.is_colocated)
    prefills = f"{remote} remote, {local} local"
    if any(w.is_colocated for w in decode):
        prefills += f", {colocated} colocated"
    running = sum(w.num_running for w in decode)
    rates = [w.generated_token_ids_per_s for w in frame.workers]
    tokens = sum(rate for rate in rates if rate is not None)
    letters = "unknown" if frame.num_dead_letters is None else str(frame.num_dead_letters)
    return Text(
        f"headrace top  {datetime.fromtimestamp(frame.time):%H:%M:%S}   "
        f"workers {len(frame.workers)}   running {running}   "
        f"{tokens:,.0f} tokens/s   "
        f"prefills {prefills}   dead letters {letters}"
    )


def _section(title: str, table: Table | None) -> Table | Text:
    return Text(f"{title}: {NOT_ALLOWED}") if table is None else table


def _workers(rows: Iterable[WorkerRow]) -> Table:
    table = _table("WORKER", "MODEL", "STATE", right=("RUNNING", "SLOTS", "KV", "PREFILLS", "/S"))
    for heading in ("PULLED TOKENS/S", "TOKENS/S"):
        table.add_column(heading, justify="right")
    for row in rows:
        kv = None
        if row.kv_blocks_total and row.kv_blocks_used is not None:
            kv = f"{100 * row.kv_blocks_used / row.kv_blocks_total:.0f}%"
        table.add_row(
            _cell(f"{row.instance} colocated" if row.is_colocated else row.instance),
            _cell(row.model or None),
            Text(row.state, style=STATE_STYLES.get(row.state, "red")),
            _cell(row.num_running),
            _cell(row.slots or None),
            _cell(kv),
            _cell(row.num_prefilled),
            _rate(row.prefilled_per_s),
            _rate(row.pulled_token_ids_per_s),
            _rate(row.generated_token_ids_per_s),
        )
    return table


def _queues(rows: Iterable[QueueRow]) -> Table:
    table = _table(
        *("QUEUE", "MODEL", "LANE"), right=("WAITING", "TAKEN", "OLDEST WAITS", "TAKEN/S")
    )
    for row in rows:
        table.add_row(
            *(_cell(row.stage), _cell(row.model), _cell(row.lane)),
            *(_cell(row.num_waiting), _cell(row.num_taken)),
            _age(row.oldest_s),
            _rate(row.taken_per_s),
        )
    return table


def _running(rows: Iterable[RunningRow]) -> Table:
    table = _table("LONGEST-RUNNING REQUEST", "TENANT", "LANE", "MODEL", right=("AGE",))
    for row in rows:
        table.add_row(
            *(_cell(row.request_id), _cell(row.tenant), _cell(row.lane), _cell(row.model)),
            _age(row.age_s),
        )
    return table


def _table(*left: str, right: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in left:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cell(value: object) -> Text:
    return Text("-" if value is None else printable(str(value)))  # Text: no markup in others' words


def _rate(value: float | None) -> Text:
    return _cell(None if value is None else f"{value:.1f}")


def _age(seconds: float | None) -> Text:
    if seconds is None:
        return _cell(None)
    minutes, rest = divmod(int(seconds), 60)
    text = f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes else f"{seconds:.1f} s"
    return Text(text, style="red" if seconds >= LATE_S else "")
