"""Makes requirements/cpu.lock from requirements/cpu.in: every version and hash, for every Python.

.venv/bin/python scripts/lock.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = Path("requirements") / "overrides.txt"


def dropped(overrides: str) -> list[str]:
    """Return the packages that the overrides drop from the lock."""
    return [
        line.split(" ; ")[0] for line in overrides.splitlines() if " ; " in line and line[0] != "#"
    ]


def main() -> int:
    """Run uv; return its status."""
    os.environ.pop("VIRTUAL_ENV", None)
    command = [str(Path(sys.executable).parent / "uv"), "--quiet", "pip", "compile"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--override", str(OVERRIDES)]
    for package in dropped((ROOT / OVERRIDES).read_text()):
        command += ["--no-emit-package", package]
    command += [*sys.argv[1:], "requirements/cpu.in", "--output-file", "requirements/cpu.lock"]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
