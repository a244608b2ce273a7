"""How long one call into an answer takes, and how long the event loop waits while the service runs such calls.

.venv/bin/python benchmarks/derender/blocking.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import workload
from workload import CASES

from headrace.derender.handler import StreamHandler, open_s
from headrace.derender.renderer import Derenderer
from headrace.derender.steps import Steps, StreamKey
from headrace.engine import vllm_text
from headrace.shared import token_ids as packed
from headrace.shared.messages import Job, StreamEnd, Tokens

T = TypeVar("T")

NUM_IDS = 16_384
NUM_IDS_A_FEED = (1, 64)  #: what a step gives; what several gave that decode got at once
NUM_PROMPT_WORDS = 95_000  #: about 100,000 token IDs


class Longest:
    """The longest call of each kind, in CPU-milliseconds: a busy machine must not count."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def call(self, kind: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        started = time.thread_time()
        result = call(*args, **kwargs)
        taken = (time.thread_time() - started) * 1_000
        self.ms[kind] = max(taken, self.ms.get(kind, 0.0))
        return result


def play(derenderer: Derenderer, job: Job, ids: list[int], a_feed: int) -> dict[str, float]:
    """Return the longest call of each kind while one answer is made, `a_feed` token IDs a feed."""
    longest = Longest()
    answer = longest.call("open", derenderer.open, job)
    for start in range(0, len(ids), a_feed):
        part = ids[start : start + a_feed]
        last = start + a_feed >= len(ids)
        kind = "last feed" if last else "feed" if start else "first feed"
        longest.call(kind, answer.feed, 0, part, finish_reason="stop" if last else None)
    longest.call("close", answer.close)
    return longest.ms


async def longest_wait(derenderer: Derenderer, job: Job, ids: list[int], a_feed: int) -> float:
    """Return how long the event loop waited at most, in ms of wall time, while one frame brought a whole answer."""
    ended = asyncio.Event()
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while not ended.is_set():
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - started - 0.001)

    async def feed(_: StreamKey, stream: StreamHandler, entries: list[Tokens], s: float) -> None:
        worked = await steps.run(s, stream.work_off, entries)
        if worked.error is not None:
            raise worked.error

    async def end(_: StreamKey, stream: StreamHandler, end: StreamEnd) -> None:
        await steps.run(stream.close_s(), stream.close, end)
        ended.set()

    starts = range(0, len(ids), a_feed)
    entries = [
        Tokens(
            stream_id=0,
            index=index,
            choice=0,
            token_ids=packed.pack(ids[start : start + a_feed]),
            finish_reason="stop" if start + a_feed >= len(ids) else None,
        )
        for index, start in enumerate(starts)
    ]
    steps = Steps(is_live=lambda *_: True, feed=feed, end=end)
    async with asyncio.TaskGroup() as group:
        steps.start(group)
        group.create_task(tick())
        answer = await steps.run(open_s(job), derenderer.open, job)
        stream = StreamHandler(job, answer, instance="bench")
        items = [*entries, StreamEnd(stream_id=0, num_entries=len(entries))]
        await steps.take(("bench", 0), stream, items)
    steps.close()
    return longest * 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    rows = []
    kinds = ("open", "first feed", "feed", "last feed", "close")
    print(
        f"{'longest call, CPU-ms':<54}" + "".join(f"{kind:>11}" for kind in kinds) + "  loop wait"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = workload.model_folder(Path(name))
        for case in CASES:
            if args.case is not None and case.name not in args.case:
                continue
            derenderer = workload.derenderer(case, folder)
            tokenizer = vllm_text.load(workload.settings(case, folder)).renderer.get_tokenizer()
            ids = workload.answer_ids(case, tokenizer, NUM_IDS)
            workload.settle()
            for stream in (True, False):
                for words in (100, NUM_PROMPT_WORDS):
                    job = workload.job(case, folder, stream=stream, num_prompt_words=words)
                    prompt = packed.count(job.prompts[0].token_ids)
                    for a_feed in NUM_IDS_A_FEED:
                        ms = play(derenderer, job, ids, a_feed)
                        what = "streamed" if stream else "whole"
                        title = f"{case.name}, {what}, prompt {prompt:,}, {a_feed:,} a feed"
                        wait = asyncio.run(longest_wait(derenderer, job, ids, a_feed))
                        rows.append({"title": title, "ms": ms, "loop_waited_ms": wait})
                        cells = "".join(f"{ms.get(kind, 0.0):>11.1f}" for kind in kinds)
                        print(f"{title:<54}{cells}{wait:>11.1f}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
