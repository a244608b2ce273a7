"""What the probes mean: how fast blocks move, and whether it pays to move them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.cli.doctor.finding import Finding, ok, warn
from headrace.cli.doctor.probe import WANTED, Length, Run

STEP = 64  # token IDs: a threshold is a multiple of it
NEAR = 0.95  # a measured length this close to one that is asked for stands for it
SLOW_SHARE = 0.2  # of the first token's time: above it, moving blocks is what to look at


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt of one length costs; times in seconds."""

    num_token_ids: int
    is_measured: bool
    """False: drawn on from the lengths that were."""
    kv_bytes: int
    kv_s: float
    prefill_s: float
    first_token_s: float
    """On a stack that is as busy as it was now."""

    @property
    def share(self) -> float:
        """Moving blocks, as a part of the time to the first token."""
        return self.kv_s / self.first_token_s if self.first_token_s else 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    gigabytes_per_s: float
    """NIXL's own rate at the longest prompt that was measured (10^9 bytes)."""
    rows: list[Row]
    threshold: int | None
    """From how many token IDs on a prefill worker pays. None: at no length that was measured."""
    sentence: str


def judge(lengths: Sequence[Length]) -> Verdict:
    """Return what these lengths, shortest first, say; at least one."""
    longest = lengths[-1]
    threshold = threshold_of(lengths)
    measured = {length.num_token_ids for length in lengths}
    scaled = {num for num in WANTED if not any(NEAR * num <= length <= num for length in measured)}
    return Verdict(
        gigabytes_per_s=longest.kv_bytes / longest.kv_s / 1e9,
        rows=[_row(lengths, num) for num in sorted(measured | scaled)],
        threshold=threshold,
        sentence=_sentence(lengths, threshold),
    )


def threshold_of(lengths: Sequence[Length]) -> int | None:
    """Return the shortest prompt that is cheaper to move than to compute on decode.

    Moving costs this request time; computing it on decode costs every answer there the same time, once.
    """
    if lengths[-1].prefill_s < lengths[-1].moved_s:
        return None
    shortest, longest = lengths[0].num_token_ids, lengths[-1].num_token_ids
    if lengths[0].prefill_s >= lengths[0].moved_s:
        return shortest  # shorter ones are not known
    for number in range(shortest - shortest % STEP + STEP, longest, STEP):
        if _at(lengths, number, _prefill) >= _at(lengths, number, _moved):
            return number
    return longest


def transfer(lengths: Sequence[Length], verdict: Verdict) -> Finding:
    """How fast blocks move, and what to change first where that is a large part of the first token's time."""
    longest = lengths[-1]
    share = longest.kv_s / longest.first_token_s if longest.first_token_s else 0.0
    shown = (
        f"{verdict.gigabytes_per_s:.2f} GB/s: {longest.kv_bytes / 1e6:.1f} MB of "
        f"{longest.num_token_ids} token IDs in {longest.kv_s * 1000:.1f} ms, "
        f"{share:.0%} of the first token's time"
    )
    if share <= SLOW_SHARE:
        return ok("kv-transfer", shown)
    return warn(
        "kv-transfer",
        shown,
        f"below {SLOW_SHARE:.0%}: larger blocks first, then a faster way for UCX",
        "model.block_size, UCX_TLS",
    )


def pairs(runs: Sequence[Run], expected: set[tuple[str, str]]) -> Finding:
    """Which pairs of workers moved blocks."""
    seen = {run.pair for run in runs if run.pair and run.timings.kv_transfer_bytes}
    shown = f"{len(seen)} of {len(expected)} pairs moved blocks"
    if missing := sorted(expected - seen):
        names = ", ".join(f"{prefill} → {decode}" for prefill, decode in missing)
        return warn("kv-pairs", f"{shown}; not seen: {names}", "each pair, on a stack at rest")
    return ok("kv-pairs", shown)


def threshold_fits(verdict: Verdict, configured: float) -> Finding:
    """Whether the threshold of these settings is near the one that was measured."""
    shown = f"decode.local_prefill_threshold = {configured:g}"
    if verdict.threshold is None:
        return warn(
            "threshold-fits", shown, "inf: no length pays here", "decode.local_prefill_threshold"
        )
    shortest = verdict.rows[0].num_token_ids
    lowest = 0.0 if verdict.threshold <= shortest else verdict.threshold / 2
    if lowest <= configured <= verdict.threshold * 2:
        return ok("threshold-fits", f"{shown}, measured {verdict.threshold}")
    return warn(
        "threshold-fits", shown, f"about {verdict.threshold}", "decode.local_prefill_threshold"
    )


def _sentence(lengths: Sequence[Length], threshold: int | None) -> str:
    longest = lengths[-1]
    saved, cost = longest.prefill_s * 1000, longest.moved_s * 1000
    num = longest.num_token_ids
    if threshold is None:
        return (
            f"P/D does not pay here: at {num} token IDs a prefill worker adds {cost:.1f} ms and "
            f"keeps only {saved:.1f} ms of computing away from decode."
        )
    least = "at the latest" if threshold == lengths[0].num_token_ids else "about"
    return (
        f"P/D pays here from {least} {threshold} token IDs on: at {num} a prefill worker adds {cost:.1f} ms to the "
        f"first token, and keeps {saved:.1f} ms of computing away from decode's other answers."
    )


def _row(lengths: Sequence[Length], num: int) -> Row:
    return Row(
        num_token_ids=num,
        is_measured=any(length.num_token_ids == num for length in lengths),
        kv_bytes=round(_at(lengths, num, lambda length: float(length.kv_bytes))),
        kv_s=_at(lengths, num, lambda length: length.kv_s),
        prefill_s=_at(lengths, num, _prefill),
        first_token_s=_at(lengths, num, lambda length: length.first_token_s),
    )


def _prefill(length: Length) -> float:
    return length.prefill_s


def _moved(length: Length) -> float:
    return length.moved_s


def _at(lengths: Sequence[Length], num: int, value: Callable[[Length], float]) -> float:
    """Return a value at any length: on the line through the two measured ones beside it, or the last two."""
    known = [(length.num_token_ids, value(length)) for length in lengths]
    if len(known) == 1:
        return known[0][1] * num / known[0][0]
    right = next((i for i, (at, _) in enumerate(known) if at >= num), len(known) - 1)
    (x0, y0), (x1, y1) = known[max(right, 1) - 1], known[max(right, 1)]
    return max(y0 + (y1 - y0) / (x1 - x0) * (num - x0), 0.0)
