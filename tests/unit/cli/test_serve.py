from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.cli.serve import serve
from headrace.shared.errors import BrokerError, EngineDeadError, SettingsError
from headrace.shared.settings import Settings, UpSettings
from headrace.shared.subjects import Role

FAKE = Settings(up=UpSettings(engine="fake"))


class StandIn(ModuleType):
    """A service module: gets SIGTERM, then ends with `error`, or drained."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__("headrace.render.service")
        self.error = error
        self.engine = ""
        self.served_name = ""

    async def run(self, settings: Settings, *, engine: str, stop: asyncio.Event) -> None:
        self.engine = engine
        self.served_name = settings.model.served_name
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        if self.error is not None:
            raise self.error


def served(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> tuple[int, StandIn]:
    module = StandIn(error)
    monkeypatch.setitem(sys.modules, "headrace.render.service", module)
    return serve(Role.RENDER, FAKE), module


def test_a_term_signal_drains_the_service_and_ends_with_code_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, module = served(monkeypatch, None)
    assert code == 0
    assert module.engine == "fake"
    assert module.served_name == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("no such model"), 2),
        (EngineDeadError("gone"), 3),
        (BrokerError("refused"), 1),
        (ZeroDivisionError("a defect"), 1),
    ],
)
def test_how_a_service_fails_is_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    assert served(monkeypatch, error)[0] == code


@pytest.mark.parametrize("role", [Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER])
def test_a_missing_vllm_is_a_wrong_setting_before_the_model_is_made(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    role: Role,
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, f"headrace.{role}.service", None)
    assert serve(role, Settings()) == 2
    assert "vLLM is not installed" in caplog.text
    assert not (tmp_path / "home").exists()


def test_a_gateway_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "headrace.gateway.service", StandIn(None))
    assert serve(Role.GATEWAY, Settings()) == 0


def test_a_role_that_is_not_installed_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.render.service", None)
    assert serve(Role.RENDER, FAKE) == 2
