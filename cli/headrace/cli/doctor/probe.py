"""Requests that move real KV blocks through the stack that runs, and what they say of themselves.

A probe is an ordinary `generate` request: random token IDs that no cache holds, and a few answered. Its timings are
what every request's are: NIXL's own bytes and time, prefill's time, the first token's.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from headrace.client import Client
from headrace.shared.errors import HeadraceError
from headrace.shared.messages import Heartbeat, Timings
from headrace.shared.subjects import Role

TOKEN_IDS = range(32, 127)  # in every vocabulary, the fake engine's too
NUM_ANSWERED = 4
WANTED = (1_024, 8_192, 32_768)
SHORT = (128, 512)  # to find the threshold; below the one in force, decode computes them itself
KV_SHARE = 0.5  # of the smallest engine's KV cache: requests of others need room too
ROUNDS = 3
LONG_S = 10.0  # a length that takes so long is not tried again
MAX_EXTRA_ROUNDS = 12  # to hear of every pair of workers
TIMEOUT_S = 300.0


class ProbeError(HeadraceError):
    """A probe did not end well; the message says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One probe."""

    num_token_ids: int
    timings: Timings

    @property
    def pair(self) -> tuple[str, str] | None:
        """Who computed and who pulled. None: decode computed it itself."""
        workers = self.timings.workers
        if self.timings.prefill_mode != "remote":
            return None
        return workers.get("prefill", "?"), workers.get("decode", "?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """What prompts of one length took: medians, in seconds."""

    num_token_ids: int
    prefill_s: float
    kv_s: float
    kv_bytes: int
    first_token_s: float
    way_s: float  #: to prefill and back, its queue among it
    first_step_s: float  #: the blocks, and decode's first step
    step_s: float

    @property
    def moved_s(self) -> float:
        """What the prompt cost beside its computation: the way to prefill, the handoff, the blocks."""
        return max(self.way_s + self.first_step_s - self.step_s, self.kv_s)


def lengths_of(beats: Sequence[Heartbeat], block_size: int) -> list[int]:
    """Return the prompt lengths that fit these workers' contexts and KV caches, shortest first."""
    engines = [beat for beat in beats if beat.role in (Role.PREFILL, Role.DECODE)]
    room = [int(beat.kv_blocks_total * block_size * KV_SHARE) for beat in engines]
    contexts = [beat.max_model_len for beat in beats if beat.max_model_len]
    limit = min([*room, *contexts], default=0) - NUM_ANSWERED
    longest = [] if limit >= WANTED[-1] else [limit]
    return sorted({length for length in (*SHORT, *WANTED, *longest) if SHORT[0] <= length <= limit})


async def probe(client: Client, model: str, lengths: Sequence[int], num_pairs: int) -> list[Run]:
    """Run the probes one after another, the first of them to warm up; more, until each pair was seen.

    Raises: ProbeError, BrokerError.
    """
    await _run(client, model, lengths[0])
    runs = []
    for length in lengths:
        since = time.monotonic()
        for _ in range(ROUNDS):
            runs.append(await _run(client, model, length))
            if time.monotonic() - since > LONG_S:
                break
    for _ in range(MAX_EXTRA_ROUNDS):
        if len({run.pair for run in runs} - {None}) >= num_pairs or not any(r.pair for r in runs):
            break
        runs.append(await _run(client, model, lengths[-1]))
    return runs


def by_length(runs: Sequence[Run]) -> Iterator[Length]:
    """Yield what the remote prefills of each length took, shortest first."""
    for length in sorted({run.num_token_ids for run in runs}):
        known = [run.timings for run in runs if run.num_token_ids == length and run.pair]
        moved = [t for t in known if t.kv_transfer_s and t.kv_transfer_bytes]
        if moved:
            yield Length(
                num_token_ids=length,
                prefill_s=median(t.prefill_s or 0.0 for t in moved),
                kv_s=median(t.kv_transfer_s or 0.0 for t in moved),
                kv_bytes=int(median(t.kv_transfer_bytes or 0 for t in moved)),
                first_token_s=median(t.first_token_s or 0.0 for t in moved),
                way_s=median(
                    max(0.0, (t.prefill_wait_s or 0.0) - (t.prefill_s or 0.0)) for t in moved
                ),
                first_step_s=median(t.first_step_s or 0.0 for t in moved),
                step_s=median((t.decode_s or 0.0) / (NUM_ANSWERED - 1) for t in moved),
            )


async def _run(client: Client, model: str, length: int) -> Run:
    body = {
        "model": model,
        "token_ids": random.choices(TOKEN_IDS, k=length),
        "cache_salt": uuid.uuid4().hex,
        "sampling_params": {
            "max_tokens": NUM_ANSWERED,
            "min_tokens": NUM_ANSWERED,
            "temperature": 0,
            "ignore_eos": True,
        },
    }
    result = await client.run(body, lane="rt", endpoint="generate", deadline_s=TIMEOUT_S)
    if not result.is_ok:
        raise ProbeError(f"a prompt of {length} token IDs: {result.error}")
    return Run(num_token_ids=length, timings=result.timings)
