"""Writes the module map of docs/architecture.md: each file with the first line of its docstring.

.venv/bin/python scripts/module_map.py            # the document
.venv/bin/python scripts/module_map.py --check    # say whether it is up to date; change nothing
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
#: in the order of the imports: each may use what stands below it
PACKAGES = (
    "cli/headrace/cli",
    "client/headrace/client",
    "services/gateway/headrace/gateway",
    "services/batch/headrace/batch",
    "services/render/headrace/render",
    "services/decode/headrace/decode",
    "services/prefill/headrace/prefill",
    "services/derender/headrace/derender",
    "shared/headrace/engine",
    "shared/headrace/shared",
)

_MAP = re.compile(r"(<!-- generated:modules -->\n).*?(<!-- /generated -->)", re.DOTALL)


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring, without its full stop."""
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    return doc.partition("\n")[0].removesuffix(".")


def module_map() -> str:
    """Return the map: a heading a package, a line a file."""
    lines = []
    for package in PACKAGES:
        folder = ROOT / package
        lines += [f"**`headrace.{folder.name}`**: {first_line(folder / '__init__.py')}.", ""]
        lines += [
            f"- [{file.relative_to(folder)}](../{file.relative_to(ROOT)}): {first_line(file)}"
            for file in sorted(folder.rglob("*.py"))
            if file != folder / "__init__.py"
        ]
        lines.append("")
    return "\n".join(lines)


def generated(text: str) -> str:
    """Return the document with the map made anew."""
    return _MAP.sub(lambda match: f"{match[1]}{module_map()}{match[2]}", text)


def main(arguments: list[str]) -> int:
    """Write the document, or say whether it is up to date; return the exit code."""
    text = DOCUMENT.read_text()
    new = generated(text)
    if "--check" in arguments:
        if new != text:
            print(f"{DOCUMENT.relative_to(ROOT)} is out of date: run scripts/module_map.py")
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
