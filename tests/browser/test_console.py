"""What a person does at `/console`: types a key, reads, clicks, chats."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from .conftest import KEYS, WATCHDOG_MS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "A question that is long enough for a prefill worker: where does the time go?"


async def chat(page: Page, text: str = QUESTION) -> None:
    """Ask, and wait until the answer's timings are there."""
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")
    await page.wait_for_selector(".timing .waterfall")


async def test_the_page_asks_for_a_key_and_refuses_a_wrong_one(console: Any) -> None:
    page = await console()
    await expect(page.locator("#key-dialog")).to_be_visible()
    assert await page.locator(".worker").count() == 0
    await page.fill("#key-input", "not-the-right-one")
    await page.press("#key-input", "Enter")
    await expect(page.locator("#key-text")).to_contain_text("Not a good key")


async def test_the_key_stays_in_its_tab(console: Any) -> None:
    page = await console("acme")
    await page.reload()
    await page.wait_for_selector(".stage.tone-decode .worker")
    assert await page.evaluate("Object.values(localStorage).length") == 0
    other = await page.context.new_page()
    await other.goto(page.url)
    await expect(other.locator("#key-dialog")).to_be_visible()
    await page.click("#key")
    await page.click("#key-forget")
    await expect(page.locator("#key-dialog")).to_be_visible()


async def test_every_stage_is_drawn_with_its_workers_and_queues(console: Any) -> None:
    page = await console("acme")
    for role in ("render", "prefill", "decode", "derender"):
        await expect(page.locator(f".stage.tone-{role} .worker .dot.ready")).to_have_count(1)
    await expect(page.locator("#health")).to_have_text("ready, remote prefill")
    await expect(page.locator(".link .lanes")).to_have_count(3)


RECORD: dict[str, Any] = {
    "accepted": 100.0,
    "total_s": 10.0,
    "status": "ok",
    "timings": {
        "render_queue_s": 0.5,
        "render_s": 0.5,
        "decode_queue_s": 1.0,
        "prefill_mode": "remote",
        "prefill_wait_s": 3.0,
        "prefill_queue_s": 0.5,
        "prefill_s": 2.0,
        "kv_transfer_s": 0.5,
        "first_step_s": 1.0,
        "first_token_s": 6.0,
        "decode_s": 3.0,
        "total_s": 9.5,
    },
}


@pytest.mark.parametrize(
    ("missing", "explained"),
    [(None, 1.0), ("decode_queue_s", 0.9), ("prefill_wait_s", 0.7), ("first_step_s", 0.9)],
)
async def test_what_no_stage_measured_is_not_explained(
    console: Any, missing: str | None, explained: float
) -> None:
    page = await console("acme")
    timings = {name: value for name, value in RECORD["timings"].items() if name != missing}
    found = await page.evaluate(
        """async (record) => {
            const { spans, explained } = await import("/console/waterfall.js");
            const all = spans(record, 110);
            return [explained(all), all.spans.reduce((sum, span) => sum + span.length, 0)];
        }""",
        {**RECORD, "timings": timings},
    )
    assert found == [pytest.approx(explained), pytest.approx(10.0)]


async def test_an_answer_streams_and_its_time_is_explained(console: Any) -> None:
    page = await console("acme")
    await chat(page)
    assert len(await page.inner_text(".message:not(.user)")) > 20
    facts = await page.inner_text(".timing")
    for word in ("TTFT", "ITL median", "prefill remote", "KV moved", "KV transfer", "decode"):
        assert word in facts
    row = page.locator("button.request").first
    await row.click()
    await expect(page.locator(".detail .waterfall")).to_be_visible()
    explained = await page.locator(".detail .facts span", has_text="explained").inner_text()
    assert int(explained.split()[1]) >= 95


async def test_an_answer_can_be_stopped(console: Any) -> None:
    page = await console("acme")
    await page.fill("#max-tokens", "4000")
    await page.fill("#prompt", "Go on and on.")
    await page.click("#send")
    await page.wait_for_selector(".message.writing:not(:empty)")
    await page.click("#stop")
    await page.wait_for_selector(".status-cancelled")
    await expect(page.locator("#send")).to_be_visible()


async def test_an_error_is_shown_in_the_gateways_words(console: Any) -> None:
    page = await console("acme")
    await page.fill("#temperature", "-1")
    await page.evaluate("document.getElementById('chat').noValidate = true")
    await page.fill("#prompt", "x")
    await page.click("#send")
    await expect(page.locator(".message.failed")).to_contain_text("temperature")


async def test_a_tenant_sees_its_own_requests_and_not_where_workers_run(console: Any) -> None:
    acme = await console("acme")
    await chat(acme)
    globex = await console("globex")
    await expect(globex.locator("#about")).to_contain_text("requests of globex")
    await expect(globex.locator("#requests .empty")).to_be_visible()
    assert await globex.locator(".where").count() == 0
    ops = await console("ops")
    assert await ops.locator(".worker .where").count() == 4


async def test_a_gateway_that_is_away_is_said(console: Any) -> None:
    page = await console("acme")
    await page.context.set_offline(True)
    await expect(page.locator("#trouble")).to_contain_text("No answer from the gateway")
    await page.context.set_offline(False)
    await expect(page.locator("#trouble")).to_be_hidden()


async def test_a_tab_that_nobody_looks_at_asks_nothing(console: Any) -> None:
    page = await console("acme")
    await page.clock.install()
    await page.evaluate(
        """() => {
          Object.defineProperty(document, "hidden", {get: () => window.isAway, configurable: true});
          window.isAway = true;
        }"""
    )
    async with page.expect_request_finished(lambda request: "/console/state" in request.url):
        await page.evaluate(
            "window.isAway = false; dispatchEvent.call(document, new Event('visibilitychange'))"
        )
        await page.evaluate("window.isAway = true")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.clock.run_for(60_000)
    assert asked == []
    async with page.expect_request_finished(lambda request: "/console/state" in request.url):
        await page.evaluate(
            "window.isAway = false; dispatchEvent.call(document, new Event('visibilitychange'))"
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
async def test_nothing_is_cut_off(console: Any, scheme: str, width: int) -> None:
    page = await console("ops", viewport={"width": width, "height": 900}, color_scheme=scheme)
    await chat(page)
    await page.locator("button.request").first.click()
    await expect(page.locator(".detail .waterfall")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 384) == (scheme == "dark")
    if folder := os.environ.get("CONSOLE_PICTURES"):  # for a person to look at
        await page.screenshot(path=f"{folder}/{scheme}-{width}.png", full_page=True)


async def test_the_page_loads_nothing_from_elsewhere(console: Any, url: str) -> None:
    page = await console()
    asked = {
        entry
        for entry in await page.evaluate(
            "performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
    }
    assert len(asked) > 8
    assert all(entry.startswith(f"{url}/") for entry in asked)
    policy = (await page.request.get(f"{url}/console")).headers["content-security-policy"]
    assert "default-src 'none'" in policy


async def test_a_batch_is_shown_with_its_progress(console: Any, url: str) -> None:
    page = await console("acme")
    await expect(page.locator("#batches-card")).to_be_hidden()
    model = await page.input_value("#model")
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": model, "prompt": "x", "max_tokens": 4},
    }
    headers = {"Authorization": f"Bearer {KEYS['acme']}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        upload = await client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", json.dumps(line).encode())},
        )
        upload.raise_for_status()
        order = {
            "input_file_id": upload.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        (await client.post("/v1/batches", json=order)).raise_for_status()
    row = page.locator("#batches .batch")
    await expect(row).to_contain_text("completed", timeout=WATCHDOG_MS)
    await expect(row).to_contain_text("1 of 1")
    globex = await console("globex")
    await expect(globex.locator("#batches-card")).to_be_hidden()
