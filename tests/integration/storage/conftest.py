"""A tenant of each test's own, and both kinds of store."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.shared.settings import FilesSettings

SERVER = Path(__file__).with_name("s3_server.py")
TIMEOUT_S = 60.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def tenant() -> str:
    """A tenant of this test's own."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a store that speaks S3, with the bucket `files`."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **CREDENTIALS},
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert httpx.put(f"{url}/files", timeout=TIMEOUT_S).status_code == 200
        yield url
    finally:
        process.communicate(timeout=TIMEOUT_S)  # it ends with its stdin


@pytest.fixture
def s3_settings(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> FilesSettings:
    """Settings that reach it, with the credentials in the environment; a prefix of this test's own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return FilesSettings(
        s3_bucket="files",
        s3_endpoint=s3_server,
        s3_region="us-east-1",
        s3_prefix=uuid.uuid4().hex,
    )
