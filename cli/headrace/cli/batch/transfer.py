"""Input and output of a batch at an http(s) URL, as `vllm run-batch` has it: read with GET, written with PUT.

A batch runs on files of this machine; so it goes on where it was, and nothing large is held in memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import httpx

from headrace.shared.errors import HeadraceError, SettingsError
from headrace.shared.settings import home

SCHEMES = ("http://", "https://")
PIECE_BYTES = 2**20
TIMEOUT_S = 60.0  # without a byte
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)
#: a server's own trouble, which may pass
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})

Place: TypeAlias = Path | str
"""A file of this machine, or a URL."""


class TransferError(HeadraceError):
    """A URL could not be read or written; says what the server said."""


class _PassingError(TransferError):
    """The same may fare better in a moment."""


def place(text: str) -> Place:
    """Return what the command line names."""
    return text if text.startswith(SCHEMES) else Path(text)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The files that stand for a batch's input and output while it runs."""

    input_file: Path
    output_file: Path
    download_from: str | None  #: None: the input is a file of this machine
    upload_to: str | None
    folder: Path | None  #: of what is here for the time of the run. None: there is nothing

    @classmethod
    def of(cls, source: Place, target: Place) -> Transfer:
        """Name the files; URLs that differ in their query alone have the same, so that a newly signed one goes on."""
        named = [str(p).partition("?")[0] for p in (source, target)]
        digest = blake2b("\n".join(named).encode(), digest_size=10).hexdigest()
        folder = home() / "batch" / digest
        from_url, to_url = isinstance(source, str), isinstance(target, str)
        return cls(
            input_file=folder / "input.jsonl" if isinstance(source, str) else source,
            output_file=folder / "output.jsonl" if isinstance(target, str) else target,
            download_from=source if isinstance(source, str) else None,
            upload_to=target if isinstance(target, str) else None,
            folder=folder if from_url or to_url else None,
        )

    def fetch(self) -> None:
        """Have the input here. Raises: TransferError, SettingsError when there is no room for it."""
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"{self.folder} (HEADRACE_HOME): {error.strerror}") from None
        if self.download_from is not None:
            url, part = self.download_from, self.input_file.with_suffix(".part")
            _patiently(lambda: _download(url, part))
            os.replace(part, self.input_file)

    def deliver(self) -> None:
        """Send the output where it belongs, and forget what was here for it. Raises: TransferError, then it stays."""
        if self.upload_to is not None:
            url = self.upload_to
            _patiently(lambda: _upload(self.output_file, url))
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _patiently(act: Callable[[], None]) -> None:
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return act()
        except _PassingError:
            if delay_s is None:
                raise
            time.sleep(delay_s)


def _download(url: str, path: Path) -> None:
    try:
        with (
            httpx.stream("GET", url, timeout=TIMEOUT_S, follow_redirects=True) as response,
            path.open("wb") as file,
        ):
            _check(url, response)
            for piece in response.iter_bytes(PIECE_BYTES):
                file.write(piece)
    except httpx.InvalidURL as error:
        raise TransferError(f"{shown(url)}: {error}") from None
    except httpx.HTTPError as error:
        raise _PassingError(f"{shown(url)}: {error or type(error).__name__}") from None
    except OSError as error:
        raise SettingsError(f"{path} (HEADRACE_HOME): {error.strerror}") from None


def _upload(path: Path, url: str) -> None:
    # A length, and no chunks: object stores take nothing else.
    headers = {"Content-Length": str(path.stat().st_size)}
    try:
        response = httpx.put(url, content=_pieces(path), headers=headers, timeout=TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise TransferError(f"{shown(url)}: {error}") from None
    except httpx.HTTPError as error:
        raise _PassingError(f"{shown(url)}: {error or type(error).__name__}") from None
    _check(url, response)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _check(url: str, response: httpx.Response) -> None:
    if not response.is_success:
        kind = _PassingError if response.status_code in PASSING else TransferError
        raise kind(f"{shown(url)}: HTTP {response.status_code}")


def shown(url: str) -> str:
    """Return a URL as logs and errors may show it: a signed one is a key."""
    parsed = url.partition("?")[0]
    scheme, _, rest = parsed.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
