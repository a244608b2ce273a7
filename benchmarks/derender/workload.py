"""What the derender benchmarks feed: a model folder with room, jobs as render makes them, answers as token IDs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from headrace.derender import renderer as derenderers
from headrace.derender.renderer import Derenderer
from headrace.render import renderer as renderers
from headrace.render.handler import RenderHandler
from headrace.shared.contract import model_path
from headrace.shared.messages import Job
from headrace.shared.settings import Settings, load
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

MAX_MODEL_LEN = 262_144
EOS = 2
_WORDS = (
    "the quick brown fox jumps over a lazy dog while seven small planets orbit around bright suns"
)
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "write", "parameters": _PARAMETERS}}]
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of answer and the parsers that read it."""

    name: str
    reasoning_parser: str = ""
    tool_parser: str = ""
    start: str = ""  #: before the words; nothing closes it, so that every token ID is of one kind
    body: dict[str, Any] = field(default_factory=dict)
    rescans: bool = False  #: vLLM's own parser reads the whole call again with each token ID
    max_stock: int = 4_096  #: token IDs of the longest answer that is measured through stock


CASES = (
    Case(name="plain"),
    Case(name="reasoning", reasoning_parser="qwen3", start="<think>\n"),
    Case(
        name="tool",
        tool_parser="kimi_k2",
        start="<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
        '<|tool_call_argument_begin|>{"text": "',
        body=TOOLS,
    ),
    Case(
        name="tool, JSON read anew",
        tool_parser="hermes",
        start='<tool_call>\n{"name": "write", "arguments": {"text": "',
        body=TOOLS,
        rescans=True,
    ),
    Case(
        name="tool, XML read anew",
        tool_parser="qwen3_coder",
        start="<tool_call>\n<function=write>\n<parameter=text>\n",
        body=TOOLS,
        rescans=True,
        max_stock=256,  # stock needs about four minutes for 1,024, and hours for 4,096
    ),
)


def model_folder(folder: Path) -> Path:
    """Make a folder with the demo model's tokenizer and a longer context; no weights."""
    source = Path(model_path(Settings()))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(case: Case, folder: Path) -> Settings:
    """Return the settings that `headrace up` would have for this case."""
    model = {
        "name": str(folder),
        "served_name": "bench",
        "reasoning_parser": case.reasoning_parser,
        "tool_call_parser": case.tool_parser,
        "enable_auto_tool_choice": bool(case.tool_parser),
    }
    return load(env={}, overrides={"model": model})


def derenderer(case: Case, folder: Path) -> Derenderer:
    """Return a started derenderer."""
    made = derenderers.build(settings(case, folder), "vllm")
    asyncio.run(made.start())
    return made


def settle() -> None:
    """Keep the collector from going through vLLM's objects, as the derender process does once it has started."""
    gc.collect()
    gc.freeze()


def words(num: int) -> str:
    """Return so many words of text, always the same ones."""
    choose = random.Random(1)
    return " ".join(choose.choice(_WORDS.split()) for _ in range(num))


def job(case: Case, folder: Path, *, stream: bool, num_prompt_words: int = 100) -> Job:
    """Return a job as render makes it."""
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": words(num_prompt_words)}],
        "stream": stream,
        **case.body,
    }
    renderer = renderers.build(settings(case, folder), "vllm")
    asyncio.run(renderer.start())
    submission = Submission(
        request_id="0" * 32,
        tenant="bench",
        slug="bench",
        lane=Lane.RT,
        endpoint="chat.completions",
        deadline=float("inf"),
        accepted=0.0,
        body=json.dumps(body).encode(),
        is_own_id=False,
    )
    try:
        return asyncio.run(RenderHandler(renderer, "render-1").handle(submission))
    finally:
        asyncio.run(renderer.close())


def answer_ids(case: Case, tokenizer: Any, num: int) -> list[int]:
    """Return so many token IDs of one answer, the last one EOS."""
    ids: list[int] = tokenizer.encode(case.start + words(num), add_special_tokens=False)
    return [*ids[: num - 1], EOS]
