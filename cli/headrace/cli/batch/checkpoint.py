"""The output of a batch, which is its checkpoint too: what stands in it is not run again.

Lines are appended. Where one custom_id has two, as after a retry, the last one counts, and the others are taken
out when the file is opened or closed.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from headrace.shared.errors import HeadraceError, SettingsError

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LINE_ID = re.compile(rf"({RUN_ID.pattern})-(\d{{1,12}})-([0-9a-f]{{12}})-(\d{{1,6}})")
_BEGINNING = b'{"id":"'

Key = str | int
"""Of a result: its custom_id, or the number of its line where that has none."""


class CheckpointError(HeadraceError):
    """The output can't be written, as on a full disk; what is in it is whole, but for its last line."""


class LineId(NamedTuple):
    """Names one attempt at one line: as `id` in the output, and as the request's ID in the pipeline.

    The digest in it keeps the stored result of one request from being taken for that of another.
    """

    run_id: str
    number: int  #: of the line
    digest: str  #: of the request
    attempt: int  #: from 0

    def __str__(self) -> str:
        return "-".join(str(part) for part in self)

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises: ValueError for any other `id`."""
        found = _LINE_ID.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no id of a batch run")
        return cls(found[1], int(found[2]), found[3], int(found[4]))


class Entry(NamedTuple):
    """The result that counts."""

    line_id: LineId
    is_ok: bool
    offset: int  #: where its line begins


class _Response(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: Any

    @property
    def is_ok(self) -> bool:
        return not self.error and self.response is not None and self.response.status_code == 200


_results = msgspec.json.Decoder(_Result)


class Checkpoint:
    """An output file, held by this process alone."""

    def __init__(self, path: Path, run_id: str | None = None) -> None:
        """Open or make the file, cut off a last line that was not written whole, and read it.

        `run_id`: None: that of the file, or a new one for a new file.
        Raises: SettingsError for a file that is no output of a batch run, or that another process writes.
        """
        self._path = path
        self._entries: dict[Key, Entry] = {}
        self._is_superseded = False  # whether the file has lines that do not count
        if path.exists() and not path.is_file():
            raise SettingsError(f"--output-file {path}: not a file")
        try:
            self._file = _locked(path)
            try:
                self._load()
                if self._is_superseded:
                    self._compact()
                    self._load()
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise SettingsError(f"--output-file {path}: {error.strerror or error}") from None
        self.run_id = run_id or self._run_id()

    @property
    def num_ok(self) -> int:
        """How many results in the file are answers."""
        return sum(entry.is_ok for entry in self._entries.values())

    @property
    def num_failed(self) -> int:
        """How many results in the file are errors."""
        return len(self._entries) - self.num_ok

    def get(self, key: Key) -> Entry | None:
        """Return what the file has for a custom_id or a line. None: nothing."""
        return self._entries.get(key)

    def write(self, line_id: LineId, custom_id: str, result: bytes, *, is_ok: bool) -> None:
        """Append one result. `result` is its JSON without a line's end. Raises: CheckpointError."""
        key = custom_id or line_id.number
        try:
            offset = self._append(result + b"\n")
        except OSError as error:
            raise self._failed(error) from None
        self._put(key, Entry(line_id, is_ok, offset))
        if custom_id and line_id.number in self._entries:  # the line was bad, and is mended
            del self._entries[line_id.number]
            self._is_superseded = True

    def close(self) -> None:
        """Leave one line a result in the file. Raises: CheckpointError."""
        try:
            if self._is_superseded:
                self._compact()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, data: bytes) -> int:
        """Write past all buffers: nothing is left to write when this fails. Return where it begins."""
        descriptor = self._file.fileno()
        offset = os.fstat(descriptor).st_size
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        return offset

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"--output-file {self._path}: {error.strerror or error}")

    def _put(self, key: Key, entry: Entry) -> None:
        self._is_superseded |= key in self._entries
        self._entries[key] = entry

    def _run_id(self) -> str:
        if self._entries:
            return next(iter(self._entries.values())).line_id.run_id
        # Until the first result is written, the time of the last change is that of the file's making: so a command
        # that is killed before has the same name afterwards, and a file that is made anew is a new run.
        made = os.fstat(self._file.fileno())
        parts = (self._path.absolute(), made.st_ino, made.st_mtime_ns)
        return blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def _load(self) -> None:
        self._entries.clear()
        self._is_superseded = False
        for number, (offset, line) in enumerate(self._lines(), 1):
            try:
                result = _results.decode(line)
                line_id = LineId.read(result.id)
            except (msgspec.DecodeError, ValueError) as error:
                if not line.endswith(b"\n") and _is_torn(line):
                    self._file.truncate(offset)
                    return
                raise SettingsError(
                    f"--output-file {self._path}: line {number} is no result of a batch run ({error}): "
                    "choose another file, or remove this one"
                ) from None
            self._put(result.custom_id or line_id.number, Entry(line_id, result.is_ok, offset))
            if not line.endswith(b"\n"):  # whole but for that, and the last one
                self._append(b"\n")
                return

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = self._file.seek(0)
        while line := self._file.readline():
            yield offset, line
            offset += len(line)

    def _compact(self) -> None:
        """Put a file in its place that has only the lines that count; at each moment one of the two is there."""
        counting = {entry.offset for entry in self._entries.values()}
        beside = self._path.with_name(f"{self._path.name}.tmp")
        with beside.open("wb") as new:
            for offset, line in self._lines():
                if offset in counting:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.chmod(beside, os.fstat(self._file.fileno()).st_mode & 0o7777)
        file = _open(beside)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.replace(beside, self._path)
        self._file.close()
        self._file = file


def _locked(path: Path) -> BinaryIO:
    """Open a file that no other process holds. Raises: SettingsError, OSError."""
    while True:
        file = _open(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BlockingIOError:
            file.close()
            raise SettingsError(f"--output-file {path}: another process writes it") from None
        except OSError:
            file.close()
            raise
        file.close()  # another process has just put a new file in its place


def _open(path: Path) -> BinaryIO:
    return path.open("a+b")


def _is_torn(line: bytes) -> bool:
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
