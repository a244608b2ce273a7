"""Checks of the settings alone: what can't work, or not together, before anything is started."""

from __future__ import annotations

import math

from headrace.cli.doctor.finding import Finding, fail, ok, skip, warn
from headrace.shared.settings import Settings

GOOD_BLOCK_SIZE = 64


def check_plan(settings: Settings) -> list[Finding]:
    """Return every finding; of colocated engines no KV cache moves, so that nothing can be wrong with it."""
    if settings.decode.colocated:
        return [skip("kv-plan", "colocated engines compute every prompt themselves")]
    return [parallel(settings), block_size(settings), lease(settings), threshold(settings)]


def parallel(settings: Settings) -> Finding:
    """Whether decode's ranks can read the blocks of prefill's, which are split by head."""
    prefill, decode = (_ranks(of.engine) for of in (settings.prefill, settings.decode))
    shown = f"tensor_parallel_size {prefill} for prefill, {decode} for decode"
    if max(prefill, decode) % min(prefill, decode):
        right = "one of them a multiple of the other"
        return fail("tensor-parallel", shown, right, "decode.engine.tensor_parallel_size")
    if prefill > decode:
        right = "prefill's no more than decode's: each decode rank reads from several of prefill's"
        return warn("tensor-parallel", shown, right, "prefill.engine.tensor_parallel_size")
    return ok("tensor-parallel", shown)


def block_size(settings: Settings) -> Finding:
    """Small blocks are many reads: 128 instead of 16 made 448 MB move in 11 ms instead of 42."""
    shown = f"{settings.model.block_size} token IDs a block"
    if settings.model.block_size >= GOOD_BLOCK_SIZE:
        return ok("block-size", shown)
    return warn("block-size", shown, "128: fewer, larger reads", "model.block_size")


def lease(settings: Settings) -> Finding:
    """Whether a handoff lives long enough to be pulled."""
    decode, lease_s = settings.decode, settings.nixl.lease_s
    shown = f"lease {lease_s:g} s, margin {decode.handoff_margin_s:g} s, pull {decode.pull_timeout_s:g} s"
    if lease_s <= decode.handoff_margin_s:
        return fail(
            "lease", shown, "a lease longer than the margin: no handoff is pulled", "nixl.lease_s"
        )
    if lease_s < decode.handoff_margin_s + decode.pull_timeout_s:
        return warn("lease", shown, "a lease of margin and pull together, or more", "nixl.lease_s")
    return ok("lease", shown)


def threshold(settings: Settings) -> Finding:
    """Whether any prompt goes to prefill at all."""
    value = settings.decode.local_prefill_threshold
    shown = f"prompts from {value:g} uncached token IDs on go to prefill"
    max_len = settings.model.max_model_len or math.inf
    if not settings.up.prefill or value < max_len:
        return ok("threshold", shown)
    return warn(
        "threshold",
        f"{shown}, and none is as long"
        if value < math.inf
        else "every prompt is computed by decode",
        "a lower one, or no prefill worker",
        "decode.local_prefill_threshold",
    )


def _ranks(engine: dict[str, object]) -> int:
    value = engine.get("tensor_parallel_size", 1)
    return value if isinstance(value, int) and value > 0 else 1
