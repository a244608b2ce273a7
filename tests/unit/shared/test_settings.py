"""Settings: the last source wins, and a wrong value is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace.shared import settings as s
from headrace.shared.errors import SettingsError


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[decode]\nslots = 1\nmax_attempts = 1\nprefill_timeout_s = 1.0\n")
    env = {"HEADRACE_DECODE_SLOTS": "2", "HEADRACE_DECODE_MAX_ATTEMPTS": "2"}
    loaded = s.load(file, env, {"decode": {"slots": 3}})
    assert (loaded.decode.slots, loaded.decode.max_attempts, loaded.decode.prefill_timeout_s) == (
        3,
        2,
        1.0,
    )


def test_infinity_is_a_threshold() -> None:
    env = {"HEADRACE_DECODE_LOCAL_PREFILL_THRESHOLD": "inf"}
    assert s.load(env=env).decode.local_prefill_threshold == math.inf


def test_a_text_setting_may_look_like_a_number() -> None:
    assert s.load(env={"HEADRACE_BROKER_PASSWORD": "1234"}).broker.password == "1234"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"decode": {"slots": "many"}}, r"\$\.decode\.slots"),
        ({"decode": {"slots": 0}}, r"\$\.decode\.slots"),
        ({"decode": {"slot": 1}}, "slot"),
        ({"cecode": {}}, "cecode"),
        ({"decode": {"local_prefill_threshold": "nan"}}, "local_prefill_threshold"),
        ({"decode": {"local_prefill_threshold": -1}}, r"\$\.decode\.local_prefill_threshold"),
        ({"gateway": {"tenant": "a.b"}}, r"\$\.gateway\.tenant"),
        ({"gateway": {"host": ""}}, r"\$\.gateway\.host"),
        ({"gateway": {"deadline_s": "inf"}}, r"\$\.gateway\.deadline_s"),
    ],
)
def test_a_wrong_setting_is_named(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        s.load(env={}, overrides=overrides)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[decode\n")
    with pytest.raises(SettingsError, match=r"headrace\.toml"):
        s.load(file, {})


def test_what_is_dumped_is_loaded_again(tmp_path: Path) -> None:
    loaded = s.load(env={"HEADRACE_DECODE_LOCAL_PREFILL_THRESHOLD": "7"})
    file = tmp_path / "settings.json"
    file.write_bytes(s.dump(loaded))
    assert s.load(file, {}) == loaded
