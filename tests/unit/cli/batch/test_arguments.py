"""The command line of `headrace batch run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import build_parser, main

FILES = ("-i", "in.jsonl", "-o", "out.jsonl")


def test_the_flags_of_vllms_command_are_known() -> None:
    files = ("--input-file", "in.jsonl", "--output-file", "out.jsonl")
    options = build_parser().parse_args(["batch", "run", *files, "--model", "m"])
    assert (options.input_file, options.output_file) == (Path("in.jsonl"), Path("out.jsonl"))
    assert build_parser().parse_args(["batch", "run", *FILES]).input_file == Path("in.jsonl")


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_wrong_concurrency_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["batch", "run", *FILES, "--concurrency", number])
    assert "argument --concurrency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run-id", "a.b"), "--run-id must be 1 to 64 of"),
        (("--local", "--nats-url", "nats://x"), "leave out --nats-url"),
        ((), "--input-file in.jsonl: No such file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["batch", "run", *FILES, *flags]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
