"""Checks of the workers of one model, by their heartbeats."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

from headrace.cli.doctor.finding import Finding, fail, ok, skip, warn
from headrace.shared.messages import Heartbeat
from headrace.shared.subjects import Role

REQUIRED = (Role.RENDER, Role.DECODE, Role.DERENDER)
MAX_SKEW_S = 1.0
FULL_KV = 0.98


def check_workers(
    beats: Sequence[Heartbeat], clock_offset: Callable[[str], float]
) -> list[Finding]:
    """Return every finding. `clock_offset`: what to add to a worker's times (seconds)."""
    return [
        stages(beats),
        contracts(beats),
        clocks(beats, clock_offset),
        side_channels(beats),
        pulls(beats),
        kv_room(beats),
    ]


def stages(beats: Sequence[Heartbeat]) -> Finding:
    """Whether every stage has a worker that takes work."""
    counts = {role: len(_of(beats, role, ready=True)) for role in (*REQUIRED, Role.PREFILL)}
    shown = ", ".join(f"{role} {num}" for role, num in counts.items())
    if missing := [str(role) for role in REQUIRED if not counts[role]]:
        return fail("stages", shown, f"a ready worker of {', '.join(missing)}", "headrace serve")
    colocated = [beat.is_colocated for beat in _of(beats, Role.DECODE, ready=True)]
    if all(colocated):
        return ok("stages", f"{shown}: every decode worker is colocated, and needs no prefill")
    if not counts[Role.PREFILL]:
        return warn(
            "stages", f"{shown}: decode computes every prompt", "a prefill worker", "up.prefill"
        )
    return ok("stages", shown)


def contracts(beats: Sequence[Heartbeat]) -> Finding:
    """Whether every worker has partners of its contract: others never share a request with it."""
    by_contract: dict[str, list[Heartbeat]] = {}
    for beat in beats:
        if beat.contract:
            by_contract.setdefault(beat.contract, []).append(beat)
    lonely = [
        beat.instance
        for some in by_contract.values()
        if not {beat.role for beat in some}.issuperset(REQUIRED)
        for beat in some
    ]
    right = "the same model, revision, block size, parsers and vLLM for every worker"
    if lonely:
        shown = f"no request reaches {', '.join(sorted(lonely))}: a contract of its own"
        return fail("contracts", shown, right, "[model] of those workers")
    if len(by_contract) > 1:
        return warn("contracts", f"{len(by_contract)} whole sets of workers", right, "[model]")
    return ok(
        "contracts", f"one, {next(iter(by_contract), 'none')[:8]}, for all {len(beats)} workers"
    )


def clocks(beats: Sequence[Heartbeat], clock_offset: Callable[[str], float]) -> Finding:
    """Whether the clocks agree: deadlines and leases are told as times."""
    offsets = {beat.instance: clock_offset(beat.instance) for beat in beats}
    wrong = [f"{name} by {-by:+.1f} s" for name, by in offsets.items() if abs(by) > MAX_SKEW_S]
    if wrong:
        return fail(
            "clocks",
            f"off against this machine's: {', '.join(wrong)}",
            f"within {MAX_SKEW_S:g} s",
            "NTP on those hosts",
        )
    worst = max(map(abs, offsets.values()), default=0.0)
    return ok("clocks", f"within {worst * 1000:.0f} ms of this machine's, delivery included")


def side_channels(beats: Sequence[Heartbeat]) -> Finding:
    """Whether the address that each prefill worker tells is one that decode's host can mean."""
    wrong = [
        f"{prefill.instance} ({_host(prefill)}) is to be reached at {prefill.kv_host} "
        f"by {decode.instance} ({_host(decode)})"
        for prefill in _of(beats, Role.PREFILL)
        for decode in _of(beats, Role.DECODE)
        if _host(prefill) != _host(decode) and is_local(prefill.kv_host)
    ]
    if wrong:
        return fail("side-channel", "; ".join(wrong), "an address of its host", "nixl.host")
    told = sorted({beat.kv_host for beat in _of(beats, Role.PREFILL) if beat.kv_host})
    return (
        ok("side-channel", ", ".join(told)) if told else skip("side-channel", "no prefill worker")
    )


def pulls(beats: Sequence[Heartbeat]) -> Finding:
    """What the decode workers say of whom they can pull from."""
    wrong = [
        f"{beat.instance} cannot pull from {name}"
        for beat in _of(beats, Role.DECODE)
        for name in beat.unreachable
    ]
    if wrong:
        right = "its port open to decode's host, one NIXL and one KV layout on both sides"
        return fail("pulls", "; ".join(wrong), right, "nixl.host, nixl.port")
    if not _of(beats, Role.PREFILL):
        return skip("pulls", "no prefill worker")
    return ok("pulls", "no decode worker says that it cannot pull")


def kv_room(beats: Sequence[Heartbeat]) -> Finding:
    """Whether idle engines have their KV cache free: what is held without a request is lost room."""
    held = [
        beat.instance
        for beat in beats
        if beat.kv_blocks_total
        and not beat.num_running
        and beat.kv_blocks_free < (1 - FULL_KV) * beat.kv_blocks_total
    ]
    if held:
        shown = f"full without a request: {', '.join(held)}"
        return warn(
            "kv-room", shown, "free blocks; leases that nobody pulls hold them", "nixl.lease_s"
        )
    return ok("kv-room", "no idle engine is full")


def is_local(host: str) -> bool:
    """Whether an address means the machine that uses it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _of(beats: Iterable[Heartbeat], role: Role, *, ready: bool = False) -> list[Heartbeat]:
    return [b for b in beats if b.role == role and (b.state == "ready" or not ready)]


def _host(beat: Heartbeat) -> str:
    return beat.process.rpartition(":")[0]
