import subprocess
import sys

FORBIDDEN = ("torch", "vllm", "numpy", "transformers", "headrace.engine", "headrace.render")


def test_the_gateway_imports_nothing_heavy():
    names = subprocess.run(
        [sys.executable, "-c", "import sys, headrace.gateway.service; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "headrace.gateway.service" in names
    assert [name for name in names if name.startswith(FORBIDDEN)] == []
