"""A batch as a deployment runs it: the broker's own users, and a tenant's API key."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from headrace.shared import subjects
from headrace.shared.subjects import Role

from .conftest import STAGES, Pipeline
from .test_secured import ACME, GLOBEX, as_tenant, completion, denied, nats_server, settings, start

__all__ = ["nats_server", "settings"]

WITHIN_S = 120  # only when all is lost
OVER = ("completed", "failed", "expired", "cancelled")


async def ended(pipeline: Pipeline, client: httpx.AsyncClient, batch_id: str) -> dict[str, object]:
    """Return a batch once it is over."""
    changed = asyncio.Event()
    records = subjects.meta_filter("acme", "batch")
    watch = await pipeline.broker.subscribe(records, lambda _: changed.set())
    async with asyncio.timeout(WITHIN_S):
        while True:
            changed.clear()
            found = await client.get(f"/v1/batches/{batch_id}", headers=as_tenant(ACME))
            batch: dict[str, object] = found.json()
            if batch["status"] in OVER:
                await watch.unsubscribe()
                return batch
            await changed.wait()


async def test_a_batch_is_run_with_the_roles_own_users_and_its_failed_line_again(
    pipeline: Pipeline, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await start(pipeline, Role.GATEWAY, *STAGES, Role.BATCH)
    bodies = [completion(pipeline, "one"), completion(pipeline, "two", max_tokens=-1)]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    uploaded = await client.post(
        "/v1/files",
        files={"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())},
        data={"purpose": "batch"},
        headers=as_tenant(ACME),
    )
    made = await client.post(
        "/v1/batches",
        json={
            "input_file_id": uploaded.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "10m",
        },
        headers=as_tenant(ACME),
    )
    batch = await ended(pipeline, client, made.json()["id"])
    assert (batch["status"], batch["request_counts"]) == (
        "completed",
        {"total": 2, "completed": 1, "failed": 1},
    )
    content = await client.get(
        f"/v1/files/{batch['output_file_id']}/content", headers=as_tenant(ACME)
    )
    assert json.loads(content.text)["custom_id"] == "0"
    hidden = await client.get(
        f"/v1/files/{batch['output_file_id']}/content", headers=as_tenant(GLOBEX)
    )
    assert hidden.status_code == 404
    again = await client.post(f"/v1/batches/{batch['id']}/retry", headers=as_tenant(ACME))
    retried = await ended(pipeline, client, again.json()["id"])
    assert retried["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert denied(caplog) == []
