"""Render random chats with and without the render cache, and compare their token IDs.

.venv/bin/python -m tests.text.cached_renders --chats 10000      # every family of tokenizers: minutes
.venv/bin/python -m tests.text.cached_renders --chats 10000 --family tekken
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from headrace.render import renderer as renderers
from headrace.render.renderer import Renderer
from headrace.shared import metrics
from headrace.shared.settings import load

from .random_chats import body, chats
from .tokenizer_families import FAMILIES, make


@dataclass
class Found:
    """What a comparison came to."""

    num_chats: int = 0
    num_token_ids: int = 0
    num_from_cache: int = 0
    different: bytes | None = None  #: the first request that had other token IDs


def build(folder: Path, cache_bytes: int) -> Renderer:
    """Return a renderer for a model folder, not started."""
    overrides = {
        "model": {"name": str(folder), "served_name": "m"},
        "render": {"cache_bytes": cache_bytes},
    }
    return renderers.build(load(env={}, overrides=overrides), "vllm")


async def compare(
    folder: Path, num_chats: int, *, seed: int = 0, cache_bytes: int = 2**18
) -> Found:
    """Render so many chats both ways; the cache is small, so that entries also leave it."""
    cached, plain = build(folder, cache_bytes), build(folder, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await cached.start()
        await plain.start()
    found = Found()
    hits = _hits()
    try:
        for messages in chats(num_chats, seed):
            data = body(messages)
            one, other = [
                (await renderer.render("chat.completions", data)).prompts[0].token_ids
                for renderer in (cached, plain)
            ]
            found.num_chats += 1
            found.num_token_ids += len(one) // 4
            if one != other:
                found.different = data
                break
    finally:
        await cached.close()
        await plain.close()
    found.num_from_cache = int(_hits() - hits)
    return found


def _hits() -> float:
    return float(metrics.RENDER_CACHE_HITS._value.get())


def main() -> int:
    """Compare each family; return 1 when one differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    arguments = parser.parse_args()
    failed = 0
    for family in arguments.family or FAMILIES:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path = make(family, Path(folder))
            found = asyncio.run(compare(path, arguments.chats, seed=arguments.seed))
        sys.stdout.write(
            f"{family}: {found.num_chats} chats, {found.num_token_ids} token IDs, "
            f"{found.num_from_cache} of them from the cache, "
            f"{'DIFFERENT: ' + repr(found.different) if found.different else 'all equal'}"
            f" ({time.monotonic() - started:.0f} s)\n"
        )
        sys.stdout.flush()
        failed |= found.different is not None
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
