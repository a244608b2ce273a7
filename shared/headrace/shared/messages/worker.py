"""What processes say of themselves, and are told or asked by others."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.shared.subjects import Lane, Role
from headrace.shared.wire import Message

LevelName = Literal["debug", "info", "warning", "error"]


class Heartbeat(Message, frozen=True, tag="heartbeat.v1"):
    """A worker is alive: every worker → whoever keeps a table of workers."""

    role: Role
    """The part it plays."""
    instance: str
    """Its name, new with each start."""
    model: str
    """Served model name."""
    contract: str
    """Its contract. Empty: its role has none."""
    state: Literal["starting", "ready", "draining", "stopped"]
    """Only a ready one takes work."""
    slots: int
    """How many requests it runs at once."""
    num_running: int
    """How many it runs now."""
    max_model_len: int = 0
    """Prompt and answer together, in token IDs. 0: its role does not know it."""
    epoch: str = ""
    """Prefill and decode: vLLM's `engine_id`. Empty: no engine."""
    kv_blocks_total: int = 0
    """KV blocks of its engine. 0: no engine."""
    kv_blocks_free: int = 0
    """KV blocks not in use, leased ones counted as used."""
    num_external_cached_token_ids: int = 0
    """Decode: prompt token IDs that came over NIXL since its start."""
    sent: float = 0.0
    """When it was sent, by the worker's own clock (Unix seconds). 0: not said."""
    num_prefilled: int = 0
    """Prefill: prompts computed since its start. Decode: prompts computed locally."""
    process: str = ""
    """Where it runs, as `<host>:<process ID>`. Empty: unknown."""
    kv_host: str = ""
    """Prefill: the address at which decode reaches its NIXL side channel (`nixl.host`). Empty: it has none."""
    unreachable: tuple[str, ...] = ()
    """Decode: the prefill workers of its contract that it cannot pull from, as far as it has tried."""
    num_generated_token_ids: int = 0
    """Decode: token IDs of answers since its start."""
    is_colocated: bool = False
    """Decode: whether it is a plain engine that computes every prompt itself, by its own settings."""
    oldest_wait_s: dict[Lane, float] = msgspec.field(default_factory=dict)
    """How long the oldest message of each lane has waited to be taken by workers of its kind (seconds), as of a few
    seconds ago. A lane is missing where none waits, or where another worker of its kind tells it."""


class RollCall(Message, frozen=True, tag="roll_call.v1"):
    """Asks every worker for a heartbeat at once: a newcomer → all workers."""


class LogLevel(Message, frozen=True, tag="log_level.v1"):
    """How much to log from now on: an operator → every process of a role."""

    level: LevelName
    """The least that is written."""


class Ping(Message, frozen=True, tag="ping.v1"):
    """Is this process there? A request: whoever watches it → one worker or gateway."""


class Pong(Message, frozen=True, tag="pong.v1"):
    """It is: a worker or gateway → whoever asked, as the reply."""

    instance: str
    """Who."""
