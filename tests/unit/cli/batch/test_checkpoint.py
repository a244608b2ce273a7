"""The output of a batch as its checkpoint."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from headrace.cli.batch.checkpoint import Checkpoint, CheckpointError, LineId
from headrace.shared.errors import SettingsError

DIGEST = "0123456789ab"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def put(
    checkpoint: Checkpoint, number: int, custom_id: str, *, status: int = 200, attempt: int = 0
) -> None:
    line_id = LineId("run", number, DIGEST, attempt)
    result = {
        "id": str(line_id),
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": str(line_id), "body": None},
        "error": None if status == 200 else {"error": {"message": "no"}},
    }
    written = json.dumps(result, separators=(",", ":")).encode()
    checkpoint.write(line_id, custom_id, written, is_ok=status == 200)


def lines(path: Path) -> list[tuple[str, int]]:
    """Return custom_id and status of each line."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(result["custom_id"], result["response"]["status_code"]) for result in found]


def test_an_id_says_all_that_it_is_made_of() -> None:
    line_id = LineId("my-run_1", 17, DIGEST, 2)
    assert LineId.read(str(line_id)) == line_id


def test_what_was_written_is_there_when_it_is_opened_again(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a")
        put(checkpoint, 2, "b", status=400)
    with Checkpoint(path) as checkpoint:
        assert (checkpoint.num_ok, checkpoint.num_failed) == (1, 1)
        a, b = checkpoint.get("a"), checkpoint.get("b")
        assert a is not None
        assert b is not None
        assert (a.is_ok, b.is_ok) == (True, False)
        assert checkpoint.get("c") is None


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_torn_last_line_is_cut_off_wherever_it_is_torn(path: Path, cut: int) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a")
        size = path.stat().st_size
        put(checkpoint, 2, "b")
    os.truncate(path, size + cut)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.get("b") is None
        put(checkpoint, 2, "b")
    assert lines(path) == [("a", 200), ("b", 200)]


def test_a_whole_last_line_without_its_end_is_kept(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a")
    os.truncate(path, path.stat().st_size - 1)
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 2, "b")
    assert lines(path) == [("a", 200), ("b", 200)]


@pytest.mark.parametrize(
    "text",
    [
        "notes without a line's end",
        "notes\n",
        '{"id":"vllm-1","custom_id":"a","response":null,"error":null}\n',
        '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}',
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError, match="line 1 is no result of a batch run"):
        Checkpoint(path)
    assert path.read_text() == text


def test_the_last_line_of_a_custom_id_counts_and_the_others_go(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a", status=500)
        put(checkpoint, 2, "b")
        put(checkpoint, 1, "a", attempt=1)
        assert (checkpoint.num_ok, checkpoint.num_failed) == (2, 0)
    assert lines(path) == [("b", 200), ("a", 200)]


def test_what_a_killed_process_left_twice_is_one_line_after_the_next_open(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a", status=500)
        before = path.read_bytes()
        put(checkpoint, 1, "a", attempt=1)
    path.write_bytes(before + path.read_bytes())
    with Checkpoint(path) as checkpoint:
        assert lines(path) == [("a", 200)]
        put(checkpoint, 2, "b")
    assert lines(path) == [("a", 200), ("b", 200)]


def test_a_bad_line_is_known_by_its_number_until_it_is_mended(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 4, "", status=400)
        put(checkpoint, 5, "", status=400)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.num_failed == 2
        put(checkpoint, 4, "d")
    assert lines(path) == [("", 400), ("d", 200)]


def test_a_run_keeps_its_id_though_it_was_killed_before_its_first_result(path: Path) -> None:
    first = Checkpoint(path)
    first._file.close()  # as the kernel does for a killed process
    with Checkpoint(path) as again:
        assert again.run_id == first.run_id
    path.unlink()
    path.touch()
    os.utime(path, (1, 1))
    with Checkpoint(path) as anew:
        assert anew.run_id != first.run_id


def test_a_run_has_the_id_that_its_results_have_unless_it_is_given_one(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.run_id == "run"
    with Checkpoint(path, "other") as checkpoint:
        assert checkpoint.run_id == "other"


def test_two_processes_do_not_write_one_file(path: Path) -> None:
    with Checkpoint(path), pytest.raises(SettingsError, match="another process writes it"):
        Checkpoint(path)


def test_a_file_that_was_put_in_its_place_is_held_too(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a")
        checkpoint._compact()
        with pytest.raises(SettingsError, match="another process writes it"):
            Checkpoint(path)
        put(checkpoint, 2, "b")
    assert lines(path) == [("a", 200), ("b", 200)]


@pytest.mark.parametrize("path", [Path("/"), Path("/dev/full")])
def test_what_is_no_file_is_no_output(path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"--output-file {path}: not a file"):
        Checkpoint(path)


def test_a_disk_that_is_full_leaves_what_was_whole_and_a_line_to_cut_off(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 1, "a")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"--output-file .*: File too large"):
                put(checkpoint, 2, "b")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoint.get("b") is None
    assert not path.read_bytes().endswith(b"\n")
    with Checkpoint(path) as checkpoint:
        put(checkpoint, 2, "b")
    assert lines(path) == [("a", 200), ("b", 200)]
