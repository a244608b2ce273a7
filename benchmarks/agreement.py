"""Whether `headrace bench` and `vllm bench serve` measure the same of one server. Four minutes, with vLLM installed.

.venv/bin/python benchmarks/agreement.py [--rounds 3] [--rate 4] [--requests 100] [--out FILE]

One stack of fake engines, at a fixed step time, is asked by one and by the other in turn: the same prompts, which
are those of `vllm bench serve`'s own random data, and arrivals of the same rate. Both agree where the medians of the
two are no further apart than the rounds of one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKENIZER = Path.home() / ".cache" / "headrace" / "models" / "smollm2-135m-instruct"
MODEL = "fake"
MEASURES = ("ttft", "itl", "tpot", "e2e")
#: what `vllm bench serve` does, keeping what it sends; the command asks for a distribution named vllm
VLLM = """
import asyncio, json, sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = sys.argv.pop(1)
align = serve._align_prompts_to_server_tokenizer  # cuts them to the lengths that the server counts

async def kept(*args):
    samples = await align(*args)
    with open(PROMPTS, "w") as file:
        for sample in samples:
            # another beginning: else the prefix cache would have it from the first run
            line = {"prompt": "~" + sample.prompt[1:], "max_tokens": sample.expected_output_len}
            file.write(json.dumps(line) + chr(10))
    return samples

serve._align_prompts_to_server_tokenizer = kept
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
asyncio.run(serve.main_async(parser.parse_args()))
"""


@contextmanager
def stack(home: Path) -> Iterator[str]:
    """Give the address of a stack of fake engines."""
    settings = ("up.batch=0", "fake.step_s=0.02", "fake.prefill_s_per_1k=0.05")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "headrace.cli.main", "up", "--engine", "fake", "--port", "0"),
            *("--served-model-name", MODEL),
            *(flag for setting in settings for flag in ("--set", setting)),
        ],
        env={**os.environ, "HEADRACE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise SystemExit("the stack did not start")
        yield ready[1]
    finally:
        process.terminate()
        process.wait()


def by_vllm(url: str, prompts: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return p50 and p99 of each measure (ms) as `vllm bench serve` has them; its prompts go to a file."""
    result = prompts.with_suffix(".vllm.json")
    flags: dict[str, Any] = {
        "backend": "openai",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": MODEL,
        "tokenizer": options.tokenizer,
        "dataset-name": "random",
        "random-input-len": options.input_len,
        "random-output-len": options.output_len,
        "num-prompts": options.requests,
        "request-rate": options.rate,
        "seed": prompts.stem,
        "result-dir": result.parent,
        "result-filename": result.name,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "99",
    }
    command = [sys.executable, "-c", VLLM, str(prompts), "--ignore-eos", "--save-result"]
    command += ["--disable-tqdm", *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(result.read_text())
    if found["completed"] != options.requests:
        raise SystemExit(f"vllm bench serve: {found['failed']} requests failed")
    names = {name: f"{name}l" if name == "e2e" else name for name in MEASURES}
    return {
        f"{name} {shown}": found[f"{prefix}_{vllms}_ms"]
        for name, vllms in names.items()
        for shown, prefix in (("p50", "median"), ("p99", "p99"))
    }


def by_headrace(url: str, prompts: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the same as `headrace bench` has it."""
    result = prompts.with_suffix(".headrace.json")
    command = [sys.executable, "-m", "headrace.cli.main", "bench", "--url", url, "--json"]
    command += ["--prompts", str(prompts), "--requests", str(options.requests)]
    command += ["--rate", str(options.rate), "--output", str(result)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(result.read_text())
    return {
        f"{name} {percent}": found[f"{name}_ms"][percent]
        for name in MEASURES
        for percent in ("p50", "p99")
    }


def agreement(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return both medians, and whether they differ by no more than the rounds of either do among themselves."""
    apart = abs(statistics.median(ours) - statistics.median(theirs))
    spread = max(max(rounds) - min(rounds) for rounds in (ours, theirs))
    return {
        "headrace_ms": round(statistics.median(ours), 2),
        "vllm_ms": round(statistics.median(theirs), 2),
        "apart_ms": round(apart, 2),
        "spread_ms": round(spread, 2),
        "agrees": apart <= spread,
    }


def main() -> None:
    """Ask in turn, and print and keep what both say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of each (3)")
    add("--rate", type=float, default=4.0, help="requests a second (4)")
    add("--requests", type=int, default=100, help="a round (100)")
    add("--input-len", type=int, default=512, help="token IDs a prompt (512)")
    add("--output-len", type=int, default=32, help="token IDs an answer (32)")
    add("--tokenizer", type=Path, default=TOKENIZER, help="of vLLM's random prompts")
    add("--out", type=Path)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"vllm": [], "headrace": []}
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder) / "home") as url:
        for number in range(options.rounds):
            prompts = Path(folder) / f"{number}.jsonl"
            rounds["vllm"].append(by_vllm(url, prompts, options))
            rounds["headrace"].append(by_headrace(url, prompts, options))
    found = {
        name: agreement(*([one[name] for one in rounds[who]] for who in ("headrace", "vllm")))
        for name in rounds["vllm"][0]
    }
    for name, row in found.items():
        print(f"{name:<9} {row}")
    if options.out is not None:
        written = {"command": " ".join(sys.argv), "measures": found, "rounds": rounds}
        options.out.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
