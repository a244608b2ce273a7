"""Uploads that come too slowly, and uploads for which there is no room."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headrace.gateway.errors import BodyTimeoutError
from headrace.gateway.files import Files
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.shared.batches import DraftRecord
from headrace.shared.broker import Broker
from headrace.shared.broker.jetstream import api
from headrace.shared.broker.streams import FILE_STREAM
from headrace.shared.records import Records
from headrace.shared.workers import WorkerTable

TIMEOUT_S = 30.0
MIB = 2**20
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
HEADERS = {"content-type": "multipart/form-data; boundary=b"}


async def left(broker: Broker, tenant: str) -> int:
    """How much of this tenant's there is."""
    parts = await broker.documents.names(f"hr.v1.file.{tenant}.*.*")
    drafts = await Records(broker).list("draft", tenant, DraftRecord)
    files = await broker.documents.names(f"hr.v1.meta.{tenant}.file.*")
    return len(parts) + len(drafts.records) + len(files)


async def stalls() -> AsyncIterator[bytes]:
    yield HEAD + bytes(2 * MIB)
    await asyncio.Event().wait()


async def trickles() -> AsyncIterator[bytes]:
    yield HEAD
    while True:
        yield b"x"
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("chunks", "pace"),
    [
        (stalls, Pace(body_timeout_s=0.05)),
        (trickles, Pace(upload_timeout_s=0.05)),
    ],
)
async def test_an_upload_that_does_not_arrive_is_given_up_and_leaves_nothing(
    broker: Broker, chunks: Any, pace: Pace
) -> None:
    tenant = f"t-{uuid.uuid4().hex[:12]}"
    async with WorkerTable(broker) as workers:
        link = Link()
        link.open(broker, workers)
        files = Files(link, max_bytes=100 * MIB, pace=pace)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(BodyTimeoutError, match="the file did not arrive"):
                await files.upload(tenant, chunks(), HEADERS)
    assert await left(broker, tenant) == 0


async def test_an_upload_without_room_is_refused_and_leaves_nothing(
    own_broker: Broker, own_sdk: openai.AsyncOpenAI
) -> None:
    config = (await api(own_broker._control, f"STREAM.INFO.{FILE_STREAM}"))["config"]
    await api(own_broker._control, f"STREAM.UPDATE.{FILE_STREAM}", config | {"max_bytes": 2 * MIB})
    with pytest.raises(openai.RateLimitError, match="the broker's store is full") as refused:
        await own_sdk.files.create(file=("f", bytes(4 * MIB)), purpose="batch")
    assert "retry-after" in refused.value.response.headers
    assert await left(own_broker, "default") == 0
    assert (await own_sdk.files.create(file=("f", bytes(MIB)), purpose="batch")).bytes == MIB
