"""The fake engines alone, called directly in one process: `python benchmarks/fabric/alone.py --streams N ...`.

The same prompts, answers and steps as in `load.py`, and the same path of each: prefill, pull, decode. What the pipeline
adds is the difference. `run.py` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from typing import Any

import msgspec
import uvloop
from load import Found

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
                if now >= since:
                    found.num_token_ids += len(output.token_ids)
                    if last is None and asked >= since:
                        found.ttft.append(now - asked)
                    elif last is not None and last >= since:
                        found.gaps.append(now - last)
                last = now
        found.num_answers += time.perf_counter() >= since


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Keep so many streams open, as `load.py` does; return what was found in the window."""
    engines = Engines(options.step_s, options.token_ids, [120] * options.prompt_bytes)
    await engines.start()
    loop = asyncio.get_running_loop()
    begin = time.perf_counter() + options.ramp_s * 1.5
    found = Found()

    async def stream(number: int) -> None:
        await asyncio.sleep(number / options.streams * options.ramp_s)
        count = 0
        while True:
            await engines.ask(f"{number}-{count}", found, begin)
            count += 1

    tasks = [loop.create_task(stream(number)) for number in range(options.streams)]
    await asyncio.sleep(options.ramp_s * 1.5)
    cpu_s = time.process_time()
    await asyncio.wait(tasks, timeout=options.window_s, return_when=asyncio.FIRST_COMPLETED)
    elapsed, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engines.stop()
    return {
        "ttft_s": found.ttft,
        "gaps_s": found.gaps,
        "num_token_ids": found.num_token_ids,
        "num_answers": found.num_answers,
        "window_s": elapsed,
        "cpu_s": cpu_s,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--token-ids", type=int, required=True)
    parser.add_argument("--ramp-s", type=float, required=True)
    parser.add_argument("--window-s", type=float, required=True)
    parser.add_argument("--prompt-bytes", type=int, default=400)
    parser.add_argument("--cpus", default="")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.write(json.dumps(runner.run(measure(options))) + "\n")


if __name__ == "__main__":
    main()
