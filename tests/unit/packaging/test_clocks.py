"""A test file is imported long before its tests run: what it reads off a clock then is old by then."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow"}


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported: all but the bodies of its functions."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = [*node.decorator_list, node.args]
    elif isinstance(node, ast.Lambda):
        children = [node.args]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from run_at_import(child)


def clock_reads(source: str) -> list[int]:
    """Return the lines that read a clock at import."""
    return [
        node.lineno
        for node in run_at_import(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLOCKS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("time", "datetime")
    ]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\nEXPIRES = time.time() + 600", [2]),
        ("def test_it(expires=time.time()): ...", [1]),
        ("@mark([datetime.now()])\ndef test_it(): ...", [1]),
        ("def test_it():\n    time.time()", []),
        ("MAKE = lambda: time.time()", []),
    ],
)
def test_a_clock_read_at_import_is_found(source: str, lines: list[int]) -> None:
    assert clock_reads(source) == lines


def test_no_test_file_reads_a_clock_when_it_is_imported() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = {
        str(f.relative_to(ROOT)): lines for f in files if (lines := clock_reads(f.read_text()))
    }
    assert not found
