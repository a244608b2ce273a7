"""The input file of a batch that the command line runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.shared.batch_lines import Line, lines_of
from headrace.shared.errors import SettingsError

PIECE_BYTES = 2**20


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, with one of them in memory at a time. Raises: SettingsError."""
    try:
        with path.open("rb") as file:
            yield from lines_of(iter(lambda: file.read1(PIECE_BYTES), b""))
    except OSError as error:
        raise SettingsError(f"--input-file {path}: {error.strerror or error}") from None
