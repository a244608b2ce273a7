"""What `headrace bench` refuses before anything is started or sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.bench.prompts import read_asks
from headrace.cli.main import build_parser, main

#: were it not refused for what a test says, it would be for its setups: nothing is ever started here
COMPARE = ("--compare", "--engine", "fake", "--no-plots", "--setups", "none")


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what `headrace bench` says against flags; fails where it has nothing against them."""
    try:
        code = main(["bench", *flags])
    except SystemExit as ended:  # argparse's own way
        code = int(ended.code or 0)
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "fast"], "--rates: expected a number above 0, got 'fast'"),
        (["--rates", "1,0"], "--rates: expected a number above 0, got '0'"),
        (["--rates=-1"], "--rates: expected a number above 0, got '-1'"),
        (["--rates", "nan"], "--rates: expected a number above 0, got 'nan'"),
        (["--rates", "inf"], "--rates: expected a finite number, got 'inf'"),
        (["--rates", ","], "--rates: expected numbers, as 1,2,4"),
        (["--chunks", "512,x"], "--chunks: expected a whole number from 1 on, got 'x'"),
        (["--rounds", "0"], "--rounds: expected a whole number from 1 on, got '0'"),
        (["--seconds", "0"], "--seconds: expected a number above 0, got '0'"),
        (["--setups", "some"], "--setups some: there are coupled, replicas,"),
        (["--prefill", "0"], "--compare needs a prefill worker to compare with"),
        (["--vocab-size", "100"], "--vocab-size 100: random token IDs begin at 100"),
        (
            ["--setups", "pd", "--output", "/dev/null/out"],
            "--output /dev/null/out: no folder can be made there",
        ),
        (["--url", "http://gpu:8000"], "--url is of one server"),
        (["--api-key", "sk-1"], "--api-key is of one server"),
        (["--requests", "5"], "--requests is of one server"),
        (["--rate", "2"], "--rate is of one server: --compare starts its own, and sends --rates"),
    ],
)
def test_a_comparison_is_refused_before_anything_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *COMPARE, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate: expected a number above 0, got '0'"),
        (["--concurrency", "-1"], "--concurrency: expected a whole number from 1 on, got '-1'"),
        (["--requests", "0"], "--requests: expected a whole number from 1 on, got '0'"),
        (["--warmup", "-1"], "--warmup: expected a whole number from 0 on, got '-1'"),
        (["--goodput", "ttft"], "--goodput: 'ttft': expected a number of ms above 0"),
        (["--goodput", "ttft:nan"], "--goodput: 'ttft:nan': expected a number of ms above 0"),
        (["--goodput", " "], "--goodput: ' ' has no limit"),
        (["--output", "/nowhere/out.json"], "--output /nowhere/out.json: there is no folder"),
        (["--rates", "1,3"], "--rates is of --compare"),
        (["--set", "decode.slots=8"], "--set is of --compare"),
        (["--no-plots"], "--no-plots is of --compare"),
    ],
)
def test_a_load_on_one_server_is_refused_before_anything_is_sent(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *flags)


def test_a_rate_that_is_given_twice_is_measured_once_and_chunks_may_be_none() -> None:
    options = build_parser().parse_args(["bench", "--rates", "2,1,2", "--chunks", ""])
    assert options.rates == [2.0, 1.0]
    assert options.chunks == []


def test_a_file_of_prompts_that_is_no_such_file_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "asks.jsonl"
    for text in ("[1, 2]", '{"text": "hi"}', '{"conversations": [{"from": "human"}]}', "{"):
        path.write_text(f"{text}\n")
        said = refusal(capsys, "--prompts", str(path))
        assert f"{path}:1: " in said
    path.write_text('{"conversations": [{"from": "gpt", "value": "hi"}]}\n')
    assert "no prompt" in refusal(capsys, "--prompts", str(path))


def test_a_prompt_may_hold_what_else_counts_as_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85"}\n')
    (ask,) = read_asks(path, 1, 8)
    assert ask.turns == ("one\u2028two\x85",)
