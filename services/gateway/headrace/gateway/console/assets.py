"""The page's files, read once: what a browser may load, and nothing else of this package."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

ROOT = "/console"
PAGE = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Everything comes from here; nothing runs, loads or is sent elsewhere, whatever an answer of a model says.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for each time, and answered 304: a new version is seen at once
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    media_type: str
    etag: str


def load() -> dict[str, Asset]:
    """Return every file by its path at the gateway; the page itself also by `/console`."""
    assets = {}
    for file in files(__package__).joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is None:
            continue
        content = file.read_bytes()
        etag = f'"{sha256(content).hexdigest()[:16]}"'
        assets[f"{ROOT}/{file.name}"] = Asset(content=content, media_type=media_type, etag=etag)
    page = assets.pop(f"{ROOT}/{PAGE}")
    return assets | {ROOT: page, f"{ROOT}/": page}
