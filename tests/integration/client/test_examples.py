"""The examples, as processes of their own, against the whole pipeline."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from headrace.engine.fake_text import expected_output

from ..pipeline.conftest import STAGES
from .conftest import Pipeline

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NODE = shutil.which("node")
QUESTIONS = [
    "What is the capital of Japan?",
    "What is the capital of Germany?",
    "How many days are in a week?",
]
MAX_TOKENS = 64  # that each example asks for


def answer_to(question: str) -> str:
    """Return what the fake engine answers to a chat of one message."""
    prompt = f"user: {question}\nassistant: "
    ids = expected_output(list(prompt.encode()), MAX_TOKENS)
    return bytes(i for i in ids if i < 256).decode()


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_submit_walks_away_and_streams(pipeline: Pipeline) -> None:
    await pipeline.start(*STAGES)
    url, model = pipeline.settings.broker.url, pipeline.settings.model.served_name
    out = await run(sys.executable, str(EXAMPLES / "python" / "submit.py"), url, model)
    answers = [f"{question} → {answer_to(question)}" for question in QUESTIONS]
    assert out == "\n".join([*answers, answer_to("Count to ten."), "(ok)", ""])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, str(EXAMPLES / "python" / "plain_nats.py")], id="python"),
        pytest.param(
            [NODE, str(EXAMPLES / "node" / "submit.mjs")],
            id="node",
            marks=pytest.mark.skipif(
                NODE is None or not (EXAMPLES / "node" / "node_modules").is_dir(),
                reason="needs npm install in examples/node",
            ),
        ),
    ],
)
async def test_a_service_without_headraces_client_gets_its_answer(
    pipeline: Pipeline, command: list[str]
) -> None:
    await pipeline.start(*STAGES)
    url, model = pipeline.settings.broker.url, pipeline.settings.model.served_name
    out = await run(*command, url, model, "What is the capital of Japan?")
    assert out == f"accepted\n{answer_to('What is the capital of Japan?')}\n"


@pytest.mark.skipif(NODE is None, reason="needs node")
async def test_the_node_example_is_javascript() -> None:
    assert NODE is not None
    assert await run(NODE, "--check", str(EXAMPLES / "node" / "submit.mjs")) == ""
