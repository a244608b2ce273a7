"""Another service takes on nothing but NATS with the client."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = ("torch", "vllm", "numpy", "fastapi", "uvicorn", "httpx", "headrace.engine")


def test_the_client_imports_nothing_heavy() -> None:
    names = subprocess.run(
        [sys.executable, "-c", "import sys, headrace.client.sync; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "headrace.client.sync" in names
    assert [name for name in names if name.startswith(FORBIDDEN)] == []
