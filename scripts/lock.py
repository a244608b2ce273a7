"""Makes the locks of requirements/ from the .in files: every version and hash, for every Python.

    .venv/bin/python scripts/lock.py

cpu.lock is the whole; the locks of the images hold parts of it, at the same versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = Path("requirements") / "overrides.txt"
WHOLE = "cpu"
PARTS = ("gateway", "engine")


def dropped(overrides: str) -> list[str]:
    """Return the packages that the overrides drop from the lock."""
    return [
        line.split(" ; ")[0] for line in overrides.splitlines() if " ; " in line and line[0] != "#"
    ]


def compile_lock(name: str, *options: str) -> int:
    """Make requirements/<name>.lock again; return uv's status."""
    command = [str(Path(sys.executable).parent / "uv"), "--quiet", "pip", "compile"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--override", str(OVERRIDES)]
    for package in dropped((ROOT / OVERRIDES).read_text()):
        command += ["--no-emit-package", package]
    files = [f"requirements/{name}.in", "--output-file", f"requirements/{name}.lock"]
    return subprocess.run([*command, *options, *files], cwd=ROOT).returncode


def main() -> int:
    """Make every lock; return the first status that is not 0."""
    os.environ.pop("VIRTUAL_ENV", None)
    status = compile_lock(WHOLE, *sys.argv[1:])
    for name in PARTS:
        status = status or compile_lock(
            name, "--upgrade", "--constraint", f"requirements/{WHOLE}.lock"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
