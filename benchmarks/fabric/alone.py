"""The fake engines alone, called directly in one process: `python benchmarks/fabric/alone.py --streams N ...`.

The same prompts, answers and steps as in `load.py`, and the same path of each: prefill, pull, decode. What the pipeline
adds is the difference. `run.py` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import aclosing
from typing import Any

import msgspec
import uvloop
from window import Found, add_options, keep_open, pin

from headrace.engine.fake_engine import FakeDecodeEngine, FakePrefillEngine
from headrace.shared.settings import load


class Engines:
    """A prefill and a decode engine."""

    def __init__(self, step_s: float, num_token_ids: int, prompt_token_ids: list[int]) -> None:
        settings = load(None, overrides={"fake": {"step_s": step_s, "num_blocks": 65_536}}, env={})
        self._prefill = FakePrefillEngine(settings)
        self._decode = FakeDecodeEngine(settings)
        self._prompt = prompt_token_ids
        self._params = msgspec.msgpack.encode({"max_tokens": num_token_ids, "ignore_eos": True})

    async def start(self) -> None:
        """Be ready."""
        await self._prefill.start()
        await self._decode.start()

    async def stop(self) -> None:
        """End both."""
        await self._decode.shutdown()
        await self._prefill.shutdown()

    async def ask(self, request_id: str, found: Found, since: float) -> None:
        """Have one request answered; note its token IDs that came after `since`."""
        asked, last = time.perf_counter(), None
        prefilled = await self._prefill.prefill(
            request_id, self._prompt, cache_salt=None, priority=0
        )
        outputs = self._decode.generate(
            request_id,
            self._prompt,
            self._params,
            kv_transfer_params=prefilled.kv_transfer_params,
            cache_salt=None,
            priority=0,
        )
        async with aclosing(outputs):
            async for output in outputs:
                now = time.perf_counter()
                found.note(len(output.token_ids), now, asked=asked, last=last, since=since)
                last = now
        found.num_answers += time.perf_counter() >= since


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Keep so many streams open, as `load.py` does; return what was found in the window."""
    engines = Engines(options.step_s, options.token_ids, [120] * options.prompt_bytes)
    await engines.start()
    found = await keep_open(options.streams, options.ramp_s, options.window_s, engines.ask, used)
    await engines.stop()
    return found


def used() -> dict[str, float]:
    """Return the CPU time of this process, which is engines and caller."""
    return {"caller": time.process_time()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, required=True)
    add_options(parser)
    options = parser.parse_args()
    pin(options.cpus)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.write(json.dumps(runner.run(measure(options))) + "\n")


if __name__ == "__main__":
    main()
