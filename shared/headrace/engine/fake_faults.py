"""Faults that a fake engine is told to inject."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.subjects import Role

VARIABLE = "HEADRACE_FAKE_FAULTS"


class FaultPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong. May be changed while the engine runs; countdowns count themselves down."""

    fail_next: int = 0  #: this many requests end with EngineRequestError
    die_next: bool = False  #: the next request ends the engine
    die_after_token_ids: int | None = None  #: decode: ends the engine after so many. None: never
    hold: bool = False  #: requests wait, blocks in hand, until the fake's `release()`
    hold_from: int = 0  #: only those with so many prompt token IDs or more are held
    stall: bool = False  #: no step is made any more, though the engine's health says nothing of it
    extra_s: float = 0.0  #: added to each prefill, in seconds
    expire_early: bool = False  #: prefill: frees the blocks at once, though it promises the lease
    hang_pulls: bool = False  #: prefill: a pull gets no answer, as from a stopped process
    drop_pulls: bool = False  #: prefill: a pull's connection is cut, as by a killed process


class _Plans(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    prefill: FaultPlan = msgspec.field(default_factory=FaultPlan)
    decode: FaultPlan = msgspec.field(default_factory=FaultPlan)


def from_env(role: Role, env: Mapping[str, str] | None = None) -> FaultPlan:
    """Return the role's part of `HEADRACE_FAKE_FAULTS`, as `{"prefill": {"hang_pulls": true}}`.

    Raises: SettingsError naming the variable.
    """
    text = (os.environ if env is None else env).get(VARIABLE)
    if not text:
        return FaultPlan()
    try:
        plans = msgspec.json.decode(text.encode(), type=_Plans)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{VARIABLE}={text!r}: {error}") from None
    return plans.prefill if role is Role.PREFILL else plans.decode
