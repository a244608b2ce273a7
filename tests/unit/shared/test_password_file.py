"""The broker's password from a file, as containers have their secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.shared import settings
from headrace.shared.errors import SettingsError


def test_the_brokers_password_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("secret\n")
    loaded = settings.load(env={"HEADRACE_BROKER_PASSWORD_FILE": str(path)})
    assert loaded.broker.password == "secret"
    again = tmp_path / "settings.json"
    again.write_bytes(settings.dump(loaded))
    assert settings.load(again, env={}) == loaded


def test_a_password_and_a_file_of_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("secret")
    with pytest.raises(SettingsError, match="not both"):
        settings.load(
            env={
                "HEADRACE_BROKER_PASSWORD_FILE": str(path),
                "HEADRACE_BROKER_PASSWORD": "another",
            }
        )


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_file_without_a_password_stops_the_start(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "password"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=r"broker\.password_file"):
        settings.load(env={"HEADRACE_BROKER_PASSWORD_FILE": str(path)})
