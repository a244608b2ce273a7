"""What the services show at `/metrics` after requests whose fate is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from headrace.client import Client
from headrace.gateway import queue_gauges
from headrace.shared.messages import Terminal
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import joined

from ...ports import free_port
from .conftest import STAGES, Engines, Pipeline

WATCHDOG_S = 30
Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def with_metrics(settings: Settings, port: int) -> Settings:
    return msgspec.structs.replace(
        settings, metrics=msgspec.structs.replace(settings.metrics, port=port)
    )


async def scraped(port: int) -> Scrape:
    async with httpx.AsyncClient(timeout=WATCHDOG_S) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


Grown = Callable[..., float]


def grown(before: Scrape, after: Scrape) -> Grown:
    """Return a function that says by how much a series grew: all services count in one place here."""

    def by(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return after.get(key, 0.0) - before.get(key, 0.0)

    return by


async def test_each_service_counts_what_it_does(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    ports = {role: free_port() for role in (Role.GATEWAY, *STAGES)}
    for role, port in ports.items():
        await pipeline.start(role, settings=with_metrics(pipeline.settings, port))
    before = await scraped(ports[Role.GATEWAY])
    model = pipeline.settings.model.served_name
    prompt = "x" * 100
    answer = await client.post(
        "/v1/completions",
        json={"model": model, "prompt": prompt, "max_tokens": 20, "stream": True},
    )
    assert answer.status_code == 200, answer.text
    refused = await client.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
    assert refused.status_code == 404
    async with Client(pipeline.settings.broker.url) as submitter:
        body = {"model": model, "prompt": prompt, "max_tokens": 20}
        result = await submitter.run(body, endpoint="completions", lane=Lane.BULK)
    assert result.status == "ok"

    running = await scraped(ports[Role.DERENDER])
    shown = {dict(labels)["role"] for name, labels in running if name == "headrace_worker_ready"}
    assert shown == {Role.GATEWAY, *STAGES}
    for service in pipeline.services[1:]:
        await service.drain()  # what they count last comes after the answer
    by = grown(before, await scraped(ports[Role.GATEWAY]))
    for lane in ("rt", "bulk"):
        assert by("headrace_requests_total", lane=lane, status="ok") == 1
        assert by("headrace_time_to_first_token_seconds_count", lane=lane) == 1
        assert by("headrace_e2e_request_latency_seconds_count", lane=lane) == 1
        assert by("headrace_goodput_requests_total", lane=lane) == 1
        assert by("headrace_prompt_tokens_total", lane=lane) == 100
        assert by("headrace_generation_tokens_total", lane=lane) > 1
        for queue in ("req", "job", "pf"):
            assert by("headrace_request_queue_time_seconds_count", queue=queue, lane=lane) == 1
    num_tokens = sum(by("headrace_generation_tokens_total", lane=lane) for lane in ("rt", "bulk"))
    assert 0 < by("headrace_inter_token_latency_seconds_count") <= num_tokens - 2
    assert by("headrace_derender_tokens_total") == num_tokens
    assert by("headrace_http_requests_total", endpoint="completions", code="200") == 1
    assert by("headrace_http_refused_requests_total", code="404", error="model_not_found") == 1
    for name in ("remote_prefills", "handoffs_issued", "handoffs_used"):
        assert by(f"headrace_{name}_total") == 2, name
    for part in ("post", "wire", "notice"):
        assert by("headrace_kv_transfer_seconds_count", part=part) == 2
    assert by("headrace_kv_transfer_bytes_total") > 0
    assert by("headrace_prefill_wasted_tokens_total", reason="not_pulled") == 0


async def test_a_cancelled_request_is_counted_where_it_is_asked_for_and_where_it_takes_effect(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    port = free_port()
    await pipeline.start(Role.GATEWAY, settings=with_metrics(pipeline.settings, port))
    await pipeline.start(*STAGES)
    before = await scraped(port)
    body = {"model": pipeline.settings.model.served_name, "prompt": "hello", "max_tokens": 20}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    async with asyncio.timeout(WATCHDOG_S):
        await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await held.decode[0].wait_until(lambda stats: stats.num_running == 0)
    for service in pipeline.services[1:]:
        await service.drain()
    by = grown(before, await scraped(port))
    assert by("headrace_cancels_asked_total", by="gateway") == 1
    assert by("headrace_cancels_effective_total", stage="decode") == 1
    assert by("headrace_requests_total", lane="rt", status="cancelled") == 1
    assert by("headrace_slo_missed_requests_total", lane="rt", objective="failed") == 0


async def test_queues_are_shown_with_their_depth_and_age(pipeline: Pipeline) -> None:
    port = free_port()
    await pipeline.start(Role.GATEWAY, settings=with_metrics(pipeline.settings, port))
    await pipeline.start(Role.RENDER)  # and nobody takes the job
    model = pipeline.settings.model.served_name
    async with Client(pipeline.settings.broker.url) as submitter:
        await submitter.submit({"model": model, "prompt": "x"}, endpoint="completions")
        looked = asyncio.Queue[None]()
        watching = asyncio.create_task(
            queue_gauges.watch(
                pipeline.broker, pipeline.table, 0.05, on_look=lambda: looked.put_nowait(None)
            )
        )
        async with asyncio.timeout(WATCHDOG_S):
            while True:
                await looked.get()
                shown = {
                    dict(labels)["lane"]: value
                    for (name, labels), value in (await scraped(port)).items()
                    if name == "headrace_queue_depth"
                    and dict(labels)["queue"] == "job"
                    and dict(labels)["model"].startswith(model)
                }
                if shown.get("std") == 1:
                    break
        watching.cancel()
    assert shown == {"rt": 0, "std": 1, "bulk": 0}
    ages = {
        dict(labels)["lane"]: value
        for (name, labels), value in (await scraped(port)).items()
        if name == "headrace_queue_oldest_seconds"
        and dict(labels)["queue"] == "job"
        and dict(labels)["model"].startswith(model)
    }
    assert ages.pop("std") > 0
    assert ages == {"rt": 0, "bulk": 0}


async def test_a_process_says_whether_it_is_ready(pipeline: Pipeline) -> None:
    port = free_port()
    (service,) = await pipeline.start(Role.DERENDER, settings=with_metrics(pipeline.settings, port))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        statuses = [(await client.get(path)).status_code for path in ("/ready", "/live", "/x")]
        assert statuses == [200, 200, 404]
    await service.drain()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_terminal_that_is_published_twice_counts_once(pipeline: Pipeline) -> None:
    end = Terminal(request_id="r-1", seq=0, status="ok", http_status=200, body=b"{}", epoch=1)
    before = REGISTRY.get_sample_value("headrace_requests_total", {"lane": "std", "status": "ok"})
    async with joined(
        pipeline.settings, Role.DERENDER, model="m", contract="c", slots=1, stop=asyncio.Event()
    ) as worker:
        for epoch in (1, 1, 2):
            again = msgspec.structs.replace(end, epoch=epoch)
            await worker.publish_terminal(pipeline.settings.model.served_name, Lane.STD, again)
    after = REGISTRY.get_sample_value("headrace_requests_total", {"lane": "std", "status": "ok"})
    assert after == (before or 0) + 1
