"""Batches on the whole pipeline, with a broker of their own: batch workers take whatever batch there is."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.batch.ownership import Owned
from headrace.shared import subjects
from headrace.shared.batches import BatchRecord, FileRecord
from headrace.shared.broker import Broker, WorkQueue
from headrace.shared.files import BrokerFiles, FileWriter
from headrace.shared.nats_server import NatsServer
from headrace.shared.records import Records, new_id
from headrace.shared.settings import Settings

from ..client.conftest import Engine, Engines, engines, settings
from ..pipeline.conftest import STAGES, Pipeline, pipeline

__all__ = ["STAGES", "Engine", "Engines", "Pipeline", "engines", "pipeline", "settings"]

TENANT = "acme"
WITHIN_S = 120  # only when all is lost


@pytest.fixture(scope="module")
def nats_server(module_server: NatsServer) -> NatsServer:
    """A broker of this module's own, on a port that stays when it is restarted."""
    return module_server


class Batches:
    """What a client of batches sees, without HTTP."""

    def __init__(self, broker: Broker, model: str) -> None:
        self._broker = broker
        self._model = model
        self.records = Records(broker)
        self.store = BrokerFiles(broker)

    def lines(self, num: int, **more: Any) -> list[dict[str, Any]]:
        """Return the lines of an input."""
        return [self.line(f"request-{n}", f"question {n}", **more) for n in range(1, num + 1)]

    def line(self, custom_id: str, prompt: str, **more: Any) -> dict[str, Any]:
        """Return one line."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 8, **more}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}

    async def upload(self, lines: Sequence[dict[str, Any] | bytes]) -> FileRecord:
        """Store an input file."""
        file_id = new_id("file-")
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        async with FileWriter(self.store, TENANT, file_id) as writer:
            await writer.write(b"".join(line + b"\n" for line in raw))
        record = FileRecord(
            id=file_id,
            filename="in.jsonl",
            purpose="batch",
            created_at=int(time.time()),
            num_bytes=writer.num_bytes,
            num_parts=writer.num_parts,
        )
        await self.records.put("file", TENANT, file_id, record, expect=0)
        return record

    async def create(
        self, lines: Sequence[dict[str, Any] | bytes], *, window_s: float = 3_600
    ) -> str:
        """Make a batch, and have it run; return its ID."""
        source = await self.upload(lines)
        now, batch_id = int(time.time()), new_id("batch_")
        record = BatchRecord(
            id=batch_id,
            endpoint="/v1/completions",
            input_file_id=source.id,
            completion_window=f"{window_s}s",
            created_at=now,
            expires_at=int(time.time() + window_s),
        )
        await self.records.put("batch", TENANT, batch_id, record, expect=0)
        await self._broker.publish_durable(
            subjects.batch(TENANT, batch_id), b"", message_id=batch_id, expect_last=0
        )
        return batch_id

    async def get(self, batch_id: str) -> BatchRecord:
        """Return the record of a batch as it is now."""
        found = await self.records.get("batch", TENANT, batch_id, BatchRecord)
        assert found is not None
        return found[0]

    async def change(self, batch_id: str, **changes: Any) -> None:
        """Change the record of a batch, as its gateway does to cancel it."""
        found = await self.records.get("batch", TENANT, batch_id, BatchRecord)
        assert found is not None
        await Owned(self.records, TENANT, *found).change(lambda _: changes)

    async def cancel(self, batch_id: str) -> None:
        """Have a batch end."""
        await self.change(batch_id, status="cancelling", cancelling_at=int(time.time()))

    async def until(
        self,
        batch_id: str,
        holds: Callable[[BatchRecord], bool] = lambda record: record.is_over,
    ) -> BatchRecord:
        """Return the record once something holds of it."""
        changed = asyncio.Event()
        watch = await self.records.watch("batch", lambda *_: changed.set())
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    changed.clear()
                    record = await self.get(batch_id)
                    if holds(record):
                        return record
                    # Word of a change may be lost with the broker.
                    try:
                        async with asyncio.timeout(2):
                            await changed.wait()
                    except TimeoutError:
                        continue
        finally:
            await watch.unsubscribe()

    async def file(self, file_id: str | None) -> FileRecord | None:
        """Return the record of a file. None: there is none."""
        found = file_id and await self.records.get("file", TENANT, file_id, FileRecord)
        return found[0] if found else None

    async def content(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file, each of which must be JSON on one line."""
        if file_id is None:
            return []
        data = b""
        async for part in self.store.parts(TENANT, file_id):
            data += part.data
        assert not data or data.endswith(b"\n")
        return [json.loads(line) for line in data.split(b"\n")[:-1]]

    async def results(self, batch_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what both files of a batch hold."""
        record = await self.get(batch_id)
        return await self.content(record.output_file_id), await self.content(record.error_file_id)


@pytest.fixture
def batches(pipeline: Pipeline, settings: Settings) -> Batches:
    return Batches(pipeline.broker, settings.model.served_name)


def ids(*files: list[dict[str, Any]]) -> list[str]:
    """Return the custom IDs of the lines of files, sorted."""
    return sorted(line["custom_id"] for lines in files for line in lines)


@pytest.fixture
def quick_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that nobody gives a sign of is taken by the next worker after a second."""
    queue = WorkQueue.batch()
    monkeypatch.setattr(WorkQueue, "batch", lambda: dataclasses.replace(queue, ack_wait_s=1.0))


def check(
    lines: Sequence[dict[str, Any]], output: list[dict[str, Any]], errors: list[dict[str, Any]]
) -> None:
    """Every line has one result."""
    assert ids(output, errors) == sorted(line["custom_id"] for line in lines)
