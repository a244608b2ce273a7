"""What `headrace bench` measures of one streamed answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from headrace.cli.bench.call import Caller
from headrace.cli.bench.measures import Measured
from headrace.cli.bench.prompts import Ask

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}


def text(value: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value}]}


def delta(**value: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": value}]}


class Server:
    """Answers with the events it is given, and keeps what it was asked."""

    def __init__(self, events: Iterable[Any], *, status: int = 200) -> None:
        self._body = "".join(
            f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
            for event in events
        )
        self._status = status
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/requests/"):
            return httpx.Response(200, json={"timings": {"prefill_s": 0.25}})
        self.bodies.append(json.loads(request.content))
        return httpx.Response(self._status, text=self._body, headers={"X-Request-Id": "r1"})


async def ask(server: Server, *turns: Any, reads_records: bool = False) -> list[Measured]:
    async with httpx.AsyncClient(
        base_url="http://server", transport=httpx.MockTransport(server)
    ) as client:
        caller = Caller(client, "m", reads_records=reads_records, extra={"priority": 1})
        return await caller.ask(Ask(turns=turns, num_output_token_ids=5))


async def test_an_answer_has_its_times_and_the_servers_own_counts() -> None:
    server = Server([text("a"), text("b"), text("c"), USAGE, "[DONE]"])
    (one,) = await ask(server, [1, 2, 3])
    assert one.error == ""
    assert one.ttft_s is not None
    assert len(one.itls_s) == 2
    assert one.e2e_s == pytest.approx(one.ttft_s + sum(one.itls_s))
    assert (one.num_prompt_token_ids, one.num_output_token_ids) == (3, 5)
    assert one.stages is None
    assert server.bodies[0]["prompt"] == [1, 2, 3]
    assert server.bodies[0]["priority"] == 1


async def test_a_chats_first_chunk_is_no_token_where_it_only_names_the_role() -> None:
    opening = delta(role="assistant", content="")
    server = Server([opening, delta(content="a"), delta(content="b"), USAGE, "[DONE]"])
    (one,) = await ask(server, [{"role": "user", "content": "hi"}])
    assert len(one.itls_s) == 1


async def test_headraces_record_comes_along() -> None:
    (one,) = await ask(Server([text("a"), USAGE, "[DONE]"]), [1], reads_records=True)
    assert one.stages == {"prefill_s": 0.25}


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([text("a"), USAGE], "the stream ended without [DONE]"),
        ([USAGE, "[DONE]"], "no token ID came"),
        ([text("a"), {"error": {"message": "expired"}}], "in the stream: expired"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(events: list[Any], error: str) -> None:
    (one,) = await ask(Server(events), [1])
    assert one.error == error


async def test_a_refusal_is_an_error_with_its_status() -> None:
    (one,) = await ask(Server(["busy"], status=429), [1])
    assert one.error.startswith("HTTP 429")


async def test_a_conversation_says_again_what_was_said() -> None:
    server = Server([text("x"), USAGE, "[DONE]"])
    await ask(server, "a", "b")
    assert [body["prompt"] for body in server.bodies] == ["a", "axb"]
    of_ids = Server([text("x"), USAGE, "[DONE]"])
    await ask(of_ids, [1], [2])
    assert [body["prompt"] for body in of_ids.bodies] == [[1], [1, 2]]


async def test_a_conversation_ends_with_its_first_error() -> None:
    assert len(await ask(Server([], status=500), "a", "b")) == 1
