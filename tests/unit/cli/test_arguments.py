from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from headrace.cli import arguments, plan
from headrace.cli.demo import run as demo
from headrace.cli.main import build_parser, main
from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})


def up(*flags: str) -> Settings:
    return arguments.load_settings(build_parser().parse_args(["up", *flags]))


def test_no_flags_are_the_defaults() -> None:
    assert up() == Settings()


def test_flags_with_names_of_vllm_set_the_model() -> None:
    model = up(
        *("--model", "/models/qwen", "--served-model-name", "qwen", "--max-model-len", "4096"),
        *("--dtype", "float32", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"),
        *("--enable-auto-tool-choice", "--trust-remote-code"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    ).model
    assert model.name == "/models/qwen"
    assert model.served_name == "qwen"
    assert model.max_model_len == 4096
    assert model.dtype == "float32"
    assert model.reasoning_parser == "qwen3"
    assert model.tool_call_parser == "hermes"
    assert model.enable_auto_tool_choice
    assert model.trust_remote_code
    assert model.default_chat_template_kwargs == {"enable_thinking": False}


def test_flags_set_the_stack() -> None:
    settings = up(
        *("--host", "0.0.0.0", "--port", "0", "--engine", "fake", "--nats-url", "nats://n:4222"),
        *("--render", "2", "--prefill", "0", "--decode", "3", "--derender", "4"),
    )
    assert (settings.gateway.host, settings.gateway.port) == ("0.0.0.0", 0)
    assert (settings.up.engine, settings.up.nats_url) == ("fake", "nats://n:4222")
    counts = settings.up
    assert (counts.render, counts.prefill, counts.decode, counts.derender) == (2, 0, 3, 4)


def test_colocated_is_a_number_of_plain_engines() -> None:
    settings = up("--colocated", "3")
    assert (settings.decode.colocated, settings.up.decode) == (True, 3)
    assert not up("--decode", "3").decode.colocated


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
def test_colocated_engines_are_instead_of_prefill_and_decode(flag: str) -> None:
    with pytest.raises(SettingsError, match="instead of --prefill and --decode"):
        up("--colocated", "2", flag, "1")


@pytest.mark.parametrize("num", ["0", "-1", "1.5", "two"])
def test_a_stack_of_no_colocated_engines_is_refused(num: str) -> None:
    with pytest.raises(
        SettingsError, match=f"--colocated {num}: expected a number of engines from 1 on"
    ):
        up("--colocated", num)


def test_a_worker_is_told_its_broker() -> None:
    options = build_parser().parse_args(["serve", "decode", "--nats-url", "nats://n:4222"])
    assert arguments.load_settings(options).broker.url == "nats://n:4222"


@pytest.mark.parametrize("flag", ["--render", "--prefill", "--decode", "--derender"])
def test_a_worker_takes_no_number_of_processes(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "decode", flag, "2"])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {flag} 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("up", ["Start a whole stack", "how many decode processes", "a broker that runs already"]),
        ("demo", ["ask one question", "what to ask"]),
        ("serve", ["Run one worker", "the broker's address", "which worker of its role"]),
        ("version", ["Print the version."]),
    ],
)
def test_help_says_what_a_command_and_its_flags_mean(
    command: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(words in shown for words in expected)


def test_the_version_is_a_flag_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    command, flag = capsys.readouterr().out.splitlines()
    assert command == flag
    assert flag.startswith("headrace ")


@pytest.mark.parametrize("question", ["", "  "])
def test_an_empty_question_is_refused(
    question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "demo", lambda *_: pytest.fail("it was asked"))
    assert main(["demo", question]) == 2
    assert "the question is empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_missing_vllm_ends_the_command_before_anything_is_made(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(plan, "with_port", lambda _: pytest.fail("it went on"))
    assert main([command]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err


def test_a_model_whose_name_is_a_number_stays_a_name() -> None:
    assert up("--model", "135").model.name == "135"


def test_engine_arguments_reach_their_role_with_the_type_they_look_like() -> None:
    settings = up(
        *("--engine-arg", "enforce-eager=true", "--prefill-arg", "gpu_memory_utilization=0.4"),
        *("--decode-arg", "max-num-seqs=64", "--decode-arg", 'hf_overrides={"rope_theta": 1e6}'),
    )
    assert settings.prefill.engine == {"enforce_eager": True, "gpu_memory_utilization": 0.4}
    assert settings.decode.engine == {
        "enforce_eager": True,
        "max_num_seqs": 64,
        "hf_overrides": {"rope_theta": 1e6},
    }


def test_set_reaches_every_setting_and_comes_last() -> None:
    settings = up("--port", "1", "--set", "gateway.port=2", "--set", "decode.max_attempts=5")
    assert settings.gateway.port == 2
    assert settings.decode.max_attempts == 5


def test_set_reaches_into_a_table() -> None:
    settings = up("--set", "prefill.engine.kv_cache_memory_bytes=134217728")
    assert settings.prefill.engine == {"kv_cache_memory_bytes": 134217728}


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[decode]\nslots = 1\nmax_attempts = 1\n[render]\nslots = 1\n")
    monkeypatch.setattr(
        "os.environ", {"HEADRACE_DECODE_SLOTS": "2", "HEADRACE_DECODE_MAX_ATTEMPTS": "2"}
    )
    settings = up("--config", str(path), "--set", "decode.slots=3")
    assert settings.decode.slots == 3
    assert settings.decode.max_attempts == 2
    assert settings.render.slots == 1


def test_an_infinite_threshold_can_be_given() -> None:
    assert up("--set", "decode.local_prefill_threshold=inf").decode.local_prefill_threshold == (
        math.inf
    )


def test_the_demo_prefills_remotely_unless_told_otherwise() -> None:
    def threshold(*flags: str) -> float:
        options = build_parser().parse_args(["demo", *flags])
        return arguments.load_settings(options, demo.PRESETS).decode.local_prefill_threshold

    assert threshold() == 0
    assert threshold("--set", "decode.local_prefill_threshold=100") == 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "slots=8"], "'slots' is no setting: expected SECTION.KEY, as decode.slots"),
        (["--set", "decode.slots"], "--set decode.slots: expected SECTION.KEY=VALUE"),
        (["--set", "decode..slots=1"], "'decode..slots' is no setting"),
        (["--set", "decode.slot=1"], "unknown field `slot`"),
        (["--set", "decode.slots=0"], r"\$.decode.slots"),
        (["--engine-arg", "enforce_eager"], "--engine-arg enforce_eager: expected NAME=VALUE"),
        (["--port", "http"], r"\$.gateway.port"),
        (["--set", "gateway.port=1", "--set", "gateway.port.x=1"], "port is a value, not a table"),
        (["--engine", "llama.cpp"], r"\$.up.engine"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        up(*flags)


def test_a_wrong_setting_ends_the_command_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--set", "decode.slots=none"]) == 2
    assert "decode.slots" in capsys.readouterr().err
