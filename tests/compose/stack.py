"""compose.yaml for real, on the CPU: `make test-compose`. Needs a Docker engine and the images of .env's defaults.

Not found by a plain `pytest`: it takes minutes, and what `docker compose build` makes.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .containers import Stack

MODEL = "smollm2-135m-instruct"
#: longer than `decode.local_prefill_threshold`
BACKGROUND = (
    "Answer in one short sentence. " + "The traveller asks about countries and towns. " * 40
)
QUESTION = "What is the capital of France?"
STAGES = {"render": 1, "prefill": 1, "decode": 1, "derender": 2}

pytestmark = pytest.mark.timeout(1_200)


def report(line: str) -> None:
    sys.stderr.write(f"\n{line}\n")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The default stack, up and ready."""
    stack = Stack()
    started = time.monotonic()
    try:
        stack.compose("up", "--detach")
        stack.until_ready(**STAGES)
        report(f"from up to ready: {time.monotonic() - started:.0f} s")
        ask(stack)
        report(f"from up to the first answer: {time.monotonic() - started:.0f} s")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "30")


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(stack: Stack) -> tuple[str, dict[str, Any]]:
    """Ask one long question whose prompt is in no cache; return the answer and the request's record."""
    request_id = uuid.uuid4().hex
    answer = client_of(stack).chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": f"{request_id} {BACKGROUND}"},
            {"role": "user", "content": QUESTION},
        ],
        temperature=0,
        max_tokens=24,
        extra_headers={"X-Request-Id": request_id},
    )
    return answer.choices[0].message.content or "", stack.get(f"/requests/{request_id}")


def hosts(stack: Stack) -> dict[str, str]:
    """Return in which container each worker runs, by its instance."""
    return {
        worker["instance"]: worker["process"].partition(":")[0]
        for worker in stack.get("/workers")["data"]
    }


def test_the_kv_cache_moves_from_one_container_to_another(stack: Stack) -> None:
    answer, record = ask(stack)
    assert "Paris" in answer
    timings = record["timings"]
    assert timings["prefill_mode"] == "remote"
    # decode had all of the prompt from elsewhere; the last token ID it may compute itself
    assert timings["num_cached_token_ids"] >= timings["num_prompt_token_ids"] - 1
    assert timings["kv_transfer_bytes"] > 10**6
    of = hosts(stack)
    served_by = {
        role: of[instance] for role, instance in timings["workers"].items() if instance in of
    }
    assert served_by["prefill"] != served_by["decode"]
    report(
        f"KV: {timings['kv_transfer_bytes']:,} bytes in {timings['kv_transfer_s'] * 1000:.1f} ms"
    )


def test_a_scaled_stage_shares_the_streams(stack: Stack) -> None:
    stack.compose("up", "--detach", "--no-recreate", "--scale", "derender=4")
    stack.until_ready(**{**STAGES, "derender": 4})
    served_by = {ask(stack)[1]["timings"]["workers"]["derender"] for _ in range(12)}
    assert len(served_by) > 1


def test_a_stream_outlives_the_container_that_writes_it(stack: Stack) -> None:
    stack.until_ready(**{**STAGES, "derender": 4})
    request_id = uuid.uuid4().hex
    chunks = client_of(stack).completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=200,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
        extra_headers={"X-Request-Id": request_id},
    )
    num_chunks, reason, usage = 0, None, None
    for chunk in chunks:
        num_chunks += 1
        usage = chunk.usage or usage
        if chunk.choices:
            reason = chunk.choices[0].finish_reason or reason
        if num_chunks == 3:
            for container in stack.containers("derender")[:3]:
                stack.crash(container)
    assert reason == "length"
    assert usage is not None
    assert usage.completion_tokens == 200
    stack.until_ready(derender=4)  # its restart policy brings each one back


def test_a_crashed_engine_comes_back_and_hands_over_again(stack: Stack) -> None:
    (container,) = stack.containers("prefill")
    before = {i for i, host in hosts(stack).items() if container.startswith(host)}
    stack.crash(container)
    assert "Paris" in ask(stack)[0]  # meanwhile decode computes the prompt itself

    def is_new() -> bool:
        now = {i for i, host in hosts(stack).items() if container.startswith(host)}
        return bool(now - before) and stack.stages().get("prefill") == 1

    stack.until("a new prefill worker", is_new)
    stack.until(
        "a prompt computed by it", lambda: ask(stack)[1]["timings"]["prefill_mode"] == "remote"
    )


def test_the_operator_sees_every_worker(stack: Stack) -> None:
    shown = stack.compose("run", "--rm", "cli", "top", "--once")
    assert all(role in shown for role in STAGES)


def test_the_gateway_knows_the_consumers_by_which_stages_are_scaled(stack: Stack) -> None:
    config = ("--config", "/etc/headrace/headrace.toml", "--set", "broker.user=gateway")
    shown = stack.compose("exec", "-T", "gateway", "headrace", "top", "--json", *config)
    queues = json.loads(shown)["queues"]
    names = {f"{q['stage']}_{q['lane']}": f"{q['model']}_{q['lane']}" for q in queues}
    assert len(names) == len(queues) == 9
    assert names["render_rt"] == f"{MODEL}_rt"
    assert names["decode_bulk"].removesuffix("_bulk") == names["prefill_std"].removesuffix("_std")


@pytest.mark.parametrize("service", ["gateway", "render", "prefill", "decode", "derender", "batch"])
def test_a_service_runs_confined_and_holds_its_own_password_alone(
    stack: Stack, service: str
) -> None:
    container = stack.containers(service)[0]
    config = stack.inspect(container)
    assert config["HostConfig"]["ReadonlyRootfs"]
    assert config["HostConfig"]["CapDrop"] == ["ALL"]
    assert stack.docker("exec", container, "id", "-u").strip() == "10001"
    held = stack.docker("exec", container, "sh", "-c", "find /run/headrace -type f").split()
    assert held == ["/run/headrace/own/password"]
    password = stack.docker("exec", container, "cat", held[0])
    assert password not in str(config)


def test_a_stop_drains_every_container(stack: Stack) -> None:
    stack.compose("stop")
    for service in (*STAGES, "gateway", "batch", "nats"):
        for container in stack.containers(service):
            state = stack.inspect(container)["State"]
            assert state["ExitCode"] == 0, (service, state)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{stack.url}/health", trust_env=False)
