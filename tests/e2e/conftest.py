"""The real thing, and what one plain engine answers in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from headrace.cli.demo import model as demo_model
from headrace.shared import settings as settings_module

from ..real_stack import MODEL, USUAL, Stack, Stacks

MAX_TOKENS = 12
LENGTHS = [
    5,
    6,
    8,
    13,
    21,
    34,
    55,
    89,
    127,
    128,
    129,
    144,
    200,
    256,
    300,
    377,
    610,
    987,
    1597,
    3000,
]
TEXT = (
    "The river rises in the hills and runs to the sea. A mill stands where the valley is narrow, and its "
    "wheel turns day and night. The miller counts the sacks, the carter waits with his horse, and children "
    "throw stones into the race. What did they see when the water was low? "
)
FOLDER = Path(__file__).parent
ALONE = ("test_local.py", "test_nixl_faults.py", "test_surface.py")  # each has a stack of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run those first that share a stack, so that it is started once."""
    ours = [number for number, item in enumerate(items) if FOLDER in item.path.parents]
    ordered = sorted((items[number] for number in ours), key=lambda item: item.path.name in ALONE)
    for number, item in zip(ours, ordered, strict=True):
        items[number] = item


@pytest.fixture(scope="module")
def stack(stacks: Stacks) -> Stack:
    """The stack that most of these tests share."""
    return stacks.get(**USUAL)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return demo_model.ensure(settings_module.home(), progress=lambda _: None)


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[list[int]]:
    """20 prompts of 5 to 3,000 token IDs, each with a beginning of its own."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompts = []
    for number, length in enumerate(LENGTHS):
        ids = tokenizer(f"{number} stories. " + TEXT * (length // 50 + 1))["input_ids"][:length]
        assert len(ids) == length
        prompts.append(ids)
    return prompts


@pytest.fixture(scope="session")
def expected(model_folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one plain engine answers; it has ended when this returns."""
    return reference_answers(model_folder, prompts, MAX_TOKENS)


def complete(stack: Stack, prompt: list[int]) -> list[int]:
    """Return the token IDs of the greedy answer, asked for through the OpenAI SDK."""
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    token_ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    return token_ids


def reference_answers(
    model_folder: Path, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """Return what one plain `AsyncLLM` answers to each prompt, greedily, in a process of its own."""
    script = Path(__file__).with_name("reference.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model_folder), str(max_tokens)],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
    )
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers
