"""Makes `.venv` with everything that serves, tests and checks headrace without a GPU.

    python3 scripts/setup.py

Needs the standard library alone. Each step leaves a stamp made of what it depends on, so that a
second run does nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMPS = VENV / ".setup.json"
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST, NEWEST = (3, 11), (3, 13)
MACHINES = ("x86_64", "aarch64")
NEEDED_BYTES = 5 * 2**30  #: of disk, for an empty .venv and pip's temporary files


class SetupError(Exception):
    """This machine can't be set up as it is; the message says what to change."""


def check_machine(version: tuple[int, int], system: str, machine: str) -> None:
    """Refuse a Python or a machine that has no wheels.

    Raises: SetupError.
    """
    if not OLDEST <= version <= NEWEST:
        names = [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
        found = next((name for name in names if shutil.which(name)), names[0])
        raise SetupError(
            "Python {}.{} is not supported, only {}.{} to {}.{}. Try: make setup PYTHON={}".format(
                *version, *OLDEST, *NEWEST, found
            )
        )
    if system != "Linux" or machine not in MACHINES:
        raise SetupError(
            f"vLLM and NIXL have no wheels for {system} {machine}, "
            f"only for Linux on {' and '.join(MACHINES)}"
        )


def check_disk(free: int) -> None:
    """Refuse a disk with too few bytes `free`, before anything is downloaded.

    Raises: SetupError.
    """
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{free / 2**30:.1f} GiB free under {ROOT}; setup needs {NEEDED_BYTES / 2**30:.0f} GiB"
        )


def is_cpu_build(report: dict[str, Any]) -> bool:
    """Tell from pip's installation report whether the torch that it found does without CUDA.

    A CUDA build asks for NVIDIA's libraries or for triton; the CPU build asks for neither.
    """
    for item in report.get("install", []):
        metadata = item["metadata"]
        if metadata["name"].lower() == "torch":
            needs = [
                need.lower() for need in metadata.get("requires_dist", []) if "extra ==" not in need
            ]
            return not any(need.startswith(("nvidia-", "cuda-", "triton")) for need in needs)
    return False


def _torch() -> None:
    """Install torch's CPU build from where pip looks anyway, else from PyTorch's own index."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        search = ("--dry-run", "--ignore-installed", "--no-deps", "--report", str(path))
        found = _pip("install", *search, TORCH, show=False) == 0
        usual = found and is_cpu_build(json.loads(path.read_text()))
    source = [] if usual else ["--index-url", TORCH_CPU_INDEX]
    options = ("--no-deps", "--no-compile", "--progress-bar", "off")
    if _pip("install", *options, *source, TORCH, show=True):
        raise SetupError(
            f"no CPU build of {TORCH} from {'where pip looks' if usual else TORCH_CPU_INDEX}; "
            "what pip says stands above. PIP_FIND_LINKS can name a folder that holds its wheel."
        )


def _lock() -> None:
    options = ("--no-deps", "--no-compile", "--require-hashes", "--only-binary", ":all:")
    _install(*options, "--progress-bar", "off", "-r", str(LOCK))
    # On all cores; pip would compile on one. Without bytecode, `import vllm` takes twice as long,
    # and where PYTHONDONTWRITEBYTECODE is set it would do so every time.
    # The status is not looked at: some packages carry templates that are no Python.
    compile_all = ["-m", "compileall", "-q", "-j", "0", str(VENV / "lib")]
    subprocess.run([VENV / "bin" / "python", *compile_all], stdout=subprocess.DEVNULL)


def _project() -> None:
    _install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def _steps() -> list[tuple[str, str, Callable[[], None]]]:
    """Return each step's name, digest of what it and those above it depend on, and function."""
    python = (VENV / "pyvenv.cfg").read_bytes()
    steps = [
        ("torch", [TORCH.encode()], _torch),
        ("everything else that requirements/cpu.lock names", [LOCK.read_bytes()], _lock),
        ("headrace itself", [(ROOT / "pyproject.toml").read_bytes()], _project),
    ]
    digest = hashlib.sha256(python + str(ROOT).encode())
    stamped = []
    for name, parts, function in steps:
        for part in parts:
            digest.update(part)
        stamped.append((name, digest.hexdigest(), function))
    return stamped


def _pip(*arguments: str, show: bool) -> int:
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *arguments], stderr=subprocess.PIPE, text=True)
    for line in done.stderr.splitlines():
        # pip warns of each local index that lacks a package
        if show and "is ignored: it is neither a file nor a directory" not in line:
            print(line, file=sys.stderr)
    return done.returncode


def _install(*arguments: str) -> None:
    if status := _pip("install", *arguments, show=True):
        raise SetupError(f"pip install failed with status {status}; what it says stands above")


def _make_venv() -> None:
    python = VENV / "bin" / "python"
    probe = f"import pip, sys; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    if (
        python.exists()
        and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    ):
        return
    print(f"making {VENV}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise SetupError(
            f"python -m venv failed: {made.stdout.strip()} {made.stderr.strip()}\n"
            "On Debian and Ubuntu, install python3-venv."
        )


def _read_stamps() -> dict[str, str]:
    try:
        stamps: dict[str, str] = json.loads(STAMPS.read_text())
    except (OSError, ValueError):
        return {}
    return stamps


def run() -> None:
    """Do what is not done yet, step by step.

    Raises: SetupError.
    """
    done = _read_stamps()
    if done and done == {name: digest for name, digest, _ in _steps()}:
        return
    check_machine(sys.version_info[:2], platform.system(), platform.machine())
    if not done:
        check_disk(shutil.disk_usage(ROOT).free)
    _make_venv()
    done = _read_stamps()
    for name, digest, function in _steps():
        if done.get(name) != digest:
            start = time.monotonic()
            print(f"installing {name} ...", flush=True)
            function()
            print(f"installed {name} in {time.monotonic() - start:.0f} s", flush=True)
            done[name] = digest
            STAMPS.write_text(json.dumps(done))


@contextmanager
def _alone() -> Iterator[None]:
    with (ROOT / ".setup.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Set up `.venv`; say what went wrong in one line."""
    os.environ.pop("PYTHONPATH", None)  # pip must see .venv alone
    try:
        with _alone():
            run()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
