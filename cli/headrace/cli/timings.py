"""The table "where the time went" of one request."""

from __future__ import annotations

from headrace.shared.messages import Timings

Row = tuple[str, str, str]
MISSING = "-"


def table(timings: Timings) -> str:
    """Return the table, a line a stage: what, how long, and what to know about it."""
    rows = [
        _queue(timings),
        ("render", seconds(timings.render_s), _ids(timings.num_prompt_token_ids, "prompt")),
        ("prefill", seconds(timings.prefill_s), _prefill(timings)),
        ("KV transfer", seconds(timings.kv_transfer_s), megabytes(timings.kv_transfer_bytes)),
        ("first token", seconds(timings.first_token_s), "from acceptance"),
        ("decode", seconds(timings.decode_s), _decode(timings)),
        ("derender", seconds(timings.derender_s), "CPU time"),
        ("total", seconds(timings.total_s), ""),
    ]
    return "\n".join(f"{what:<12} {time:>10}  {note}".rstrip() for what, time, note in rows)


def where_prefilled(timings: Timings) -> str:
    """Say which worker computed the prompt."""
    prefill = timings.workers.get("prefill", "a prefill worker")
    decode = timings.workers.get("decode", "the decode worker")
    if timings.prefill_mode == "remote":
        return (
            f"The prefill was remote: {prefill} computed the prompt, {decode} pulled its KV cache."
        )
    if timings.prefill_mode == "local":
        return f"The prefill was local: {decode} computed the prompt itself."
    return "Where the prompt was computed is not known."


def seconds(value: float | None) -> str:
    """Return a duration as a person reads it."""
    if value is None:
        return MISSING
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def megabytes(num_bytes: int | None) -> str:
    """Return a size in MB (10^6 bytes)."""
    return "" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"


def tokens_per_second(timings: Timings) -> float | None:
    """Return decode's speed after its first token. None: not measured, or a single token."""
    num, time_s = timings.num_output_token_ids, timings.decode_s
    if num is None or num < 2 or not time_s:
        return None
    return (num - 1) / time_s


def _queue(timings: Timings) -> Row:
    waits = {
        "render": timings.render_queue_s,
        "decode": timings.decode_queue_s,
        "prefill": timings.prefill_queue_s,
    }
    known = {role: wait for role, wait in waits.items() if wait is not None}
    note = ", ".join(f"{role} {seconds(wait)}" for role, wait in known.items())
    return "queue", seconds(sum(known.values()) if known else None), note


def _prefill(timings: Timings) -> str:
    cached = _ids(timings.num_cached_token_ids, "not computed by decode")
    return ", ".join(note for note in (timings.prefill_mode or "", cached) if note)


def _decode(timings: Timings) -> str:
    speed = tokens_per_second(timings)
    parts = [
        _ids(timings.num_output_token_ids, "answer"),
        "" if speed is None else f"{speed:.1f} tokens/s",
    ]
    return ", ".join(part for part in parts if part)


def _ids(num: int | None, of: str) -> str:
    return "" if num is None else f"{num} token IDs ({of})"
