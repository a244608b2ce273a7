"""How long one call into an answer takes: what must not run on the event loop.

.venv/bin/python benchmarks/derender/blocking.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import workload
from workload import CASES

from headrace.derender.renderer import Derenderer
from headrace.engine import vllm_text
from headrace.shared import token_ids as packed
from headrace.shared.messages import Job

T = TypeVar("T")

NUM_IDS = 16_384
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    rows = []
    kinds = ("open", "first feed", "feed", "last feed", "close")
    print(f"{'longest call, CPU-ms':<54}" + "".join(f"{kind:>11}" for kind in kinds))
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
                    for a_feed in (1, NUM_IDS):
                        ms = play(derenderer, job, ids, a_feed)
                        what = "streamed" if stream else "whole"
                        title = f"{case.name}, {what}, prompt {prompt:,}, {a_feed:,} a feed"
                        rows.append({"title": title, "ms": ms})
                        cells = "".join(f"{ms.get(kind, 0.0):>11.1f}" for kind in kinds)
                        print(f"{title:<54}{cells}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
