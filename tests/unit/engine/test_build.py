from __future__ import annotations

import sys

import pytest

from headrace.decode import engine as decode_engine
from headrace.engine.fake_engine import FakeDecodeEngine, FakePrefillEngine, FaultPlan
from headrace.engine.fake_faults import VARIABLE
from headrace.prefill import engine as prefill_engine
from headrace.shared.settings import Settings


def test_each_role_builds_its_fake_with_its_own_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"prefill": {"drop_pulls": true}}')
    prefill = prefill_engine.build(Settings(), "fake")
    decode = decode_engine.build(Settings(), "fake")
    assert isinstance(prefill, FakePrefillEngine)
    assert isinstance(decode, FakeDecodeEngine)
    assert prefill.faults == FaultPlan(drop_pulls=True)
    assert decode.faults == FaultPlan()


def test_the_fake_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    prefill_engine.build(Settings(), "fake")
    decode_engine.build(Settings(), "fake")
    with pytest.raises(ImportError):
        import vllm  # noqa: F401
