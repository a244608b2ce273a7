"""Which engine this worker runs."""

from __future__ import annotations

from typing import Literal

from headrace.engine import fake_faults
from headrace.engine.interface import DecodeEngine
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role


def build(settings: Settings, engine: Literal["vllm", "fake"]) -> DecodeEngine:
    """Return the engine, not yet started.

    Raises: SettingsError.
    """
    if engine == "fake":
        from headrace.engine.fake_engine import FakeDecodeEngine

        return FakeDecodeEngine(settings, fake_faults.from_env(Role.DECODE))
    from headrace.engine.vllm_engine import VllmDecodeEngine

    return VllmDecodeEngine(settings)
