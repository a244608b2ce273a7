from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli import model
from headrace.cli.demo import model as demo_model
from headrace.shared.settings import ModelSettings, Settings


def test_the_demo_model_becomes_its_folder_and_its_served_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "ensure", lambda home, *, progress: home / "models" / "smol")
    resolved = model.resolve(Settings(), needs_files=True).model
    assert resolved.name == str(tmp_path / "models" / "smol")
    assert resolved.served_name == "smollm2-135m-instruct"


def test_the_demo_model_is_not_made_for_who_needs_no_files() -> None:
    resolved = model.resolve(Settings(), needs_files=False).model
    assert (resolved.name, resolved.served_name) == ("demo", "smollm2-135m-instruct")


def test_another_model_keeps_its_name() -> None:
    settings = Settings(model=ModelSettings(name="/models/qwen"))
    resolved = model.resolve(settings, needs_files=True).model
    assert (resolved.name, resolved.served_name) == ("/models/qwen", "/models/qwen")
