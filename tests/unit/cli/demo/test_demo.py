from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from headrace.cli.demo import run as demo
from headrace.cli.demo.run import DemoError
from headrace.shared.messages import Timings

CHUNK = '{"id": "chatcmpl-r1", "choices": [{"index": 0, "delta": {"content": "Paris."}}]}'
DONE = "data: [DONE]\n\n"


def collected(text: str, status: int = 200) -> list[dict[str, Any]]:
    async def scenario() -> list[dict[str, Any]]:
        async with client(lambda request: httpx.Response(status, text=text)) as http:
            async with http.stream("POST", "/") as answer:
                return [chunk async for chunk in demo.chunks(answer)]

    return asyncio.run(scenario())


def client(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(handler))


def test_chunks_are_read_until_done() -> None:
    chunks = collected(f": keep-alive\n\ndata: {CHUNK}\n\ndata: {CHUNK}\n\n{DONE}")
    assert [demo.text_of(chunk) for chunk in chunks] == ["Paris.", "Paris."]


def test_a_refusal_shows_its_status_and_its_body() -> None:
    with pytest.raises(DemoError, match="answered 503: no live prefill worker"):
        collected("no live prefill worker", status=503)


def test_an_error_event_ends_the_demo() -> None:
    with pytest.raises(DemoError, match="engine failed"):
        collected('data: {"error": {"message": "engine failed"}}\n\n' + DONE)


def test_a_stream_that_is_cut_is_no_answer() -> None:
    with pytest.raises(DemoError, match=r"without \[DONE\]"):
        collected(f"data: {CHUNK}\n\n")


def test_timings_are_read_from_the_finished_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RECORD_INTERVAL_S", 0)
    records = iter(
        [
            httpx.Response(404),
            httpx.Response(200, json={"status": "running", "timings": {}}),
            httpx.Response(200, json={"status": "ok", "timings": {"prefill_mode": "remote"}}),
        ]
    )

    async def scenario() -> Timings:
        async with client(lambda request: next(records)) as http:
            return await demo.fetch_timings(http, "r1")

    assert asyncio.run(scenario()) == Timings(prefill_mode="remote")


def test_the_answer_and_the_table_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            asked.append(msgspec.json.decode(request.content))
            headers = {"X-Request-Id": "r1"}
            return httpx.Response(200, text=f"data: {CHUNK}\n\n{DONE}", headers=headers)
        assert request.url.path == "/requests/r1"
        return httpx.Response(200, json={"status": "ok", "timings": {"prefill_mode": "remote"}})

    gateway = client(answer)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: gateway)
    asyncio.run(demo.ask("http://gateway", "smol", "Where is the Louvre?"))
    shown = capsys.readouterr().out
    assert asked[0]["model"] == "smol"
    assert asked[0]["messages"][-1] == {"role": "user", "content": "Where is the Louvre?"}
    assert "Paris." in shown
    assert "Where the time went" in shown
    assert "The prefill was remote" in shown
