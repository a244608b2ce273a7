"""Settings: the last source wins, and a wrong value is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace.engine import fake_faults
from headrace.shared import nats_server
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


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "HEADRACE_DECODE_SLOTS",
            "x",
            "HEADRACE_DECODE_SLOTS: Expected `int`, got `str` - at `$.decode.slots`; got 'x'",
        ),
        (
            "HEADRACE_UP_ENGINE",
            "tpu",
            "HEADRACE_UP_ENGINE: Invalid enum value 'tpu' - at `$.up.engine`; "
            "expected one of 'vllm', 'fake'; got 'tpu'",
        ),
        (
            "HEADRACE_DECODE_LOCAL_PREFILL_THRESHOLD",
            "nan",
            "HEADRACE_DECODE_LOCAL_PREFILL_THRESHOLD: Expected `float` >= 0.0 "
            "- at `$.decode.local_prefill_threshold`; got nan",
        ),
        (
            "HEADRACE_DECODE_SLOT",
            "8",
            "HEADRACE_DECODE_SLOT is no setting; did you mean HEADRACE_DECODE_SLOTS?",
        ),
        (
            "HEADRACE_NIXL_LEASE",
            "8",
            "HEADRACE_NIXL_LEASE is no setting; did you mean HEADRACE_NIXL_LEASE_S?",
        ),
    ],
)
def test_a_wrong_variable_is_named_with_what_would_be_right(
    variable: str, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        s.load(env={variable: text})
    assert str(caught.value) == message


def test_variables_that_are_no_settings_may_stand_beside_them() -> None:
    env = dict.fromkeys(
        (
            fake_faults.VARIABLE,
            nats_server.STORE_VARIABLE,
            "HEADRACE_HOME",
            "HEADRACE_DECODE_PASSWORD",
            "HEADRACE_ADMIN_PASSWORD",
            "HEADRACE_TEST_MODEL",
            "HEADRACE_NIXL_PROGRESS_DELAY_US",
        ),
        "7",
    )
    assert s.load(env=env).nixl.progress_delay_us == 7


def test_a_wrong_value_is_laid_to_the_source_that_won(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[decode]\nslots = 0\n")
    with pytest.raises(SettingsError, match=r"^settings file .*headrace\.toml: .*; got 0$"):
        s.load(file, {})
    env = {"HEADRACE_DECODE_SLOTS": "-1"}
    with pytest.raises(SettingsError, match=r"^HEADRACE_DECODE_SLOTS: .*; got -1$"):
        s.load(file, env)
    with pytest.raises(SettingsError, match=r"^settings: .*; got -2$"):
        s.load(file, env, {"decode": {"slots": -2}})


def test_a_setting_that_a_file_misspells_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[decode]\nslot = 1\n")
    with pytest.raises(
        SettingsError, match=r"headrace\.toml: .*`slot`.*; did you mean decode\.slots"
    ):
        s.load(file, {})


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[broker]\npassword = 271828\n")
    with pytest.raises(SettingsError, match=r"\$\.broker\.password") as caught:
        s.load(file, {})
    assert "271828" not in str(caught.value)


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
