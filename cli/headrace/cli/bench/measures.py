"""What was measured of each request, and what all of them say together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(kw_only=True, slots=True)
class Measured:
    """One request. Times are in seconds; the start is on the clock of `time.perf_counter`."""

    start: float
    ttft_s: float | None = None  #: until the first token ID; None: none came
    itls_s: list[float] = field(
        default_factory=list
    )  #: between chunks, the first one's wait left out
    e2e_s: float = 0.0  #: until the last chunk
    num_prompt_token_ids: int = 0
    num_output_token_ids: int = 0  #: as the server counts them
    error: str = ""  #: what went wrong; empty: nothing
    request_id: str = ""  #: the server's, where it tells one
    stages: dict[str, Any] | None = None  #: headrace's own times of it; None: no record

    @property
    def tpot_s(self) -> float | None:
        """Time a token ID after the first one; None for an answer of one."""
        if self.ttft_s is None or self.num_output_token_ids < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_token_ids - 1)

    @property
    def itl_p99_s(self) -> float | None:
        """The longest waits between two chunks of this one answer; None for an answer in one chunk."""
        return percentile(self.itls_s, 99) if self.itls_s else None


def goodput_limits(text: str) -> dict[str, float]:
    """Return the limits of `ttft:2000 tpot:30`, in ms; `itl` is the p99 of each request's own.

    Raises: ValueError for a measure that there is not, a limit that is no number above 0, or a text without any.
    """
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, limit = part.partition(":")
        if name not in ("ttft", "tpot", "itl", "e2e"):
            raise ValueError(
                f"{name!r} is no measure of goodput; there are ttft, tpot, itl and e2e"
            )
        limits[name] = _limit_ms(part, limit)
    if text and not limits:
        raise ValueError(f"{text!r} has no limit: expected one or more, as ttft:2000")
    return limits


def _limit_ms(part: str, limit: str) -> float:
    try:
        number = float(limit)
    except ValueError:
        number = 0.0
    if not number > 0:  # nor is nan
        raise ValueError(f"{part!r}: expected a number of ms above 0, as ttft:2000")
    return number


def is_good(one: Measured, limits_ms: dict[str, float]) -> bool:
    """Return whether a request was answered within every limit; a measure that it has not passes."""
    if one.error:
        return False
    times = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2e": one.e2e_s}
    if "itl" in limits_ms:
        times["itl"] = one.itl_p99_s
    return all((times[name] or 0.0) * 1e3 <= limit for name, limit in limits_ms.items())


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile as numpy does, between two values where it falls between them."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, percentiles and largest of times, in ms; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    row = {"mean": sum(known) / len(known)}
    row |= {f"p{percent}": percentile(known, percent) for percent in PERCENTILES}
    row["max"] = max(known)
    return {name: round(value * 1e3, 3) for name, value in row.items()}


def summary(all_: Sequence[Measured], limits_ms: dict[str, float]) -> dict[str, Any]:
    """Return what a run says: times in ms, rates a second."""
    answered = [one for one in all_ if not one.error]
    begin = min((one.start for one in all_), default=0.0)
    end = max((one.start + one.e2e_s for one in all_), default=0.0)
    duration_s = max(end - begin, 1e-9)
    num_output = sum(one.num_output_token_ids for one in answered)
    found: dict[str, Any] = {
        "num_requests": len(all_),
        "num_errors": len(all_) - len(answered),
        "errors": sorted({one.error for one in all_ if one.error})[:5],
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(len(answered) / duration_s, 4),
        "output_token_ids_per_s": round(num_output / duration_s, 2),
        "num_prompt_token_ids": sum(one.num_prompt_token_ids for one in answered),
        "num_output_token_ids": num_output,
        "ttft_ms": distribution(one.ttft_s for one in answered),
        "itl_ms": distribution(itl for one in answered for itl in one.itls_s),
        "tpot_ms": distribution(one.tpot_s for one in answered),
        "e2e_ms": distribution(one.e2e_s for one in answered),
    }
    if limits_ms:
        found["goodput"] = goodput(all_, limits_ms, duration_s)
    stages = [one.stages for one in answered if one.stages]
    return found | ({"stages": stage_split(stages)} if stages else {})


def goodput(
    all_: Sequence[Measured], limits_ms: dict[str, float], duration_s: float
) -> dict[str, Any]:
    """Return how many requests were answered within the limits, of all and a second."""
    good = sum(is_good(one, limits_ms) for one in all_)
    return {
        "limits_ms": limits_ms,
        "num_good": good,
        "share": round(good / len(all_), 4) if all_ else None,
        "requests_per_s": round(good / duration_s, 4),
    }


def stage_split(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return where headrace's requests spent their time (ms), and how fast the KV cache moved (GB/s)."""
    names = sorted({name for record in records for name in record if name.endswith("_s")})
    split: dict[str, Any] = {
        f"{name[:-2]}_ms": distribution(record.get(name) for record in records) for name in names
    }
    pulled = [r for r in records if r.get("kv_transfer_s") and r.get("kv_transfer_bytes")]
    if pulled:
        num_bytes = sum(record["kv_transfer_bytes"] for record in pulled)
        time_s = sum(record["kv_transfer_s"] for record in pulled)
        split["kv_gb_per_s"] = round(num_bytes / time_s / 1e9, 3)
    modes = [record.get("prefill_mode") for record in records]
    split["prefill_modes"] = {str(mode): modes.count(mode) for mode in sorted(set(modes), key=str)}
    return split
