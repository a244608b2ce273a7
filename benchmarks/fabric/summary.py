"""What a case of `run.py` comes to: plain numbers of what both sides read."""

from __future__ import annotations

from typing import Any


def quantile(values: list[float], q: float) -> float | None:
    """Return the value below which a share `q` of the values lies; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def row(
    *,
    streams: int,
    step_s: float,
    token_ids: int,
    stack: dict[str, Any],
    cpu_s: dict[str, float],
    alone: dict[str, Any],
) -> dict[str, Any]:
    """Return one case's numbers: latencies in ms, CPU in µs a token ID, `rest` in cores."""
    num = stack["num_token_ids"]
    rest_s = cpu_s["rest"]
    services = {name: seconds for name, seconds in cpu_s.items() if name not in ("rest", "other")}
    return {
        "streams": streams,
        "step_ms": step_s * 1e3,
        "token_ids": token_ids,
        "answers": stack["num_answers"],
        "token_ids_per_s": _rounded(num / stack["window_s"]),
        "alone_token_ids_per_s": _rounded(alone["num_token_ids"] / alone["window_s"]),
        "ttft_ms": _both(stack["ttft_s"], alone["ttft_s"], (0.5, 0.99)),
        "gap_ms": _both(stack["gaps_s"], alone["gaps_s"], (0.5, 0.99)),
        "token_ids_per_read": _rounded(num / max(1, len(stack["gaps_s"]) + len(stack["ttft_s"]))),
        "cpu_us_per_token_id": {
            **{name: _rounded(seconds / num * 1e6) for name, seconds in services.items()},
            "all": _rounded(sum(services.values()) / num * 1e6),
        },
        "alone_cpu_us_per_token_id": _rounded(alone["cpu_s"] / alone["num_token_ids"] * 1e6),
        "reader_cpu_us_per_token_id": _rounded(stack["cpu_s"] / num * 1e6),
        "rest_of_the_machine_cores": _rounded(rest_s / stack["window_s"]),
    }


def line(numbers: dict[str, Any]) -> str:
    """Return a case on one line, for whoever waits."""
    cpu = numbers["cpu_us_per_token_id"]
    return (
        f"{numbers['streams']:>5} streams, {numbers['step_ms']:g} ms a step:"
        f" {numbers['token_ids_per_s']:,.0f}/s (alone {numbers['alone_token_ids_per_s']:,.0f}),"
        f" TTFT {numbers['ttft_ms']}, gaps {numbers['gap_ms']},"
        f" x{numbers['token_ids_per_read']:g}, µs {cpu},"
        f" alone {numbers['alone_cpu_us_per_token_id']}, reader {numbers['reader_cpu_us_per_token_id']},"
        f" rest {numbers['rest_of_the_machine_cores']} cores"
    )


def _both(stack: list[float], alone: list[float], quantiles: tuple[float, ...]) -> dict[str, Any]:
    """Return quantiles of both sides and what the stack adds, in ms, and how often it was looked."""
    found: dict[str, Any] = {"num": len(stack)}
    for q in quantiles:
        name = f"p{q * 100:g}"
        with_stack, without = quantile(stack, q), quantile(alone, q)
        if with_stack is None or without is None:
            continue
        found[name] = _rounded(with_stack * 1e3)
        found[f"{name}_alone"] = _rounded(without * 1e3)
        found[f"{name}_added"] = _rounded((with_stack - without) * 1e3)
        found[f"{name}_ratio"] = _rounded(with_stack / without) if without else None
    return found


def _rounded(value: float) -> float:
    return round(value, 3 if abs(value) < 100 else 1)
