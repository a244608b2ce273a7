"""The real thing: `headrace up` with vLLM and NIXL on the demo model, started once for the session."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from headrace.cli.demo import model as demo_model
from headrace.shared import settings as settings_module
from headrace.shared.broker import Broker
from headrace.shared.workers import WorkerTable

MODEL = "smollm2-135m-instruct"
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
SETTINGS = {
    "model.dtype": "float32",  # the answer over NIXL is then token for token that of one engine
    "model.max_model_len": "4096",
    "decode.local_prefill_threshold": "0",
    "gateway.port": "0",
}


@dataclass
class Stack:
    """A running `headrace up`."""

    process: subprocess.Popen[str]
    url: str
    run_dir: Path

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}{path}", timeout=30)
        answer.raise_for_status()
        return answer.json()

    async def until(self, predicate: Callable[[WorkerTable], bool]) -> None:
        """Return once the heartbeats of the stack's workers satisfy `predicate`."""
        settings = settings_module.load(self.run_dir / "settings.json", {})
        broker = await Broker.connect(settings.broker, role="test", name="e2e")
        try:
            async with WorkerTable(broker) as table:
                await table.wait_for(predicate)
        finally:
            await broker.close()

    def heartbeat(self, role: str) -> dict[str, Any]:
        """Return what the only worker of a role last said of itself."""
        (worker,) = [w for w in self.get("/workers")["data"] if w["role"] == role]
        return dict(worker)


@contextlib.contextmanager
def running_stack(home: Path, **settings: str) -> Iterator[Stack]:
    """Start `headrace up`, wait for its ready line, and end it as Ctrl-C does."""
    sets = [f"--set={key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    command = [sys.executable, "-m", "headrace.cli.main", "up", *sets]
    log = home / "up.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "HEADRACE_HOME": str(home)},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready http://"), log.read_text()[-4000:]
        logs = re.search(r"^logs in (.+)/logs$", log.read_text(), re.MULTILINE)
        assert logs is not None
        yield Stack(process, line.split()[1], Path(logs[1]))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            code = process.wait(timeout=120)
            assert code in (0, -signal.SIGKILL), log.read_text()[-4000:]
        finally:
            process.stdout.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return demo_model.ensure(settings_module.home(), progress=lambda _: None)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A home of the test's own, with the demo model in it."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").mkdir()
    (home / "models" / model_folder.name).symlink_to(model_folder)
    return home


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
