"""Import rules that import-linter's patterns can't say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "shared" / "headrace" / "engine"
HEAVY = {"vllm", "torch", "nixl", "transformers"}


def imported(source: str) -> Iterator[str]:
    """Yield the top-level packages that a module imports, at whatever depth the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_only_vllm_and_nixl_modules_of_the_engine_import_vllm() -> None:
    others = [path for path in ENGINE.rglob("*.py") if not path.name.startswith(("vllm_", "nixl_"))]
    assert len(others) > 2
    assert [path.name for path in others if HEAVY & set(imported(path.read_text()))] == []


def test_an_import_inside_a_function_counts() -> None:
    source = "import os\ndef build():\n    from vllm.config import VllmConfig\n"
    assert set(imported(source)) == {"os", "vllm"}
