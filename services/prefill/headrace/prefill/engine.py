"""Which engine this worker runs."""

from __future__ import annotations

from typing import Literal

from headrace.engine import fake_faults
from headrace.engine.interface import PrefillEngine
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role


def build(settings: Settings, engine: Literal["vllm", "fake"]) -> PrefillEngine:
    """Return the engine, not yet started.

    Raises: SettingsError.
    """
    if engine == "fake":
        from headrace.engine.fake_engine import FakePrefillEngine

        return FakePrefillEngine(settings, fake_faults.from_env(Role.PREFILL))
    from headrace.engine.vllm_engine import VllmPrefillEngine

    return VllmPrefillEngine(settings)
