"""What traces cost: `python benchmarks/tracing.py [--windows N] [--window-s S] [--rate R] [--out FILE]`.

Two stacks of fake engines stand side by side, one without traces, one that sends every request's to a collector (a
server here that takes and forgets them). Windows of the same load go to one and to the other in turn, so that both
meet the same machine. Printed is the CPU time that each stack's services used while it had the load, broker apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from idle import cpu_s, descendants, name

BODY = {"model": "fake", "prompt": "x" * 400, "max_tokens": 32, "stream": True}


class Collector(BaseHTTPRequestHandler):
    """Takes spans over OTLP, and forgets them."""

    num_posts = 0

    def do_POST(self) -> None:
        """Answer an export."""
        self.rfile.read(int(self.headers["Content-Length"]))
        Collector.num_posts += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@dataclass
class Stack:
    """A running `headrace up`, and what its windows cost."""

    name: str
    process: subprocess.Popen[str]
    url: str
    windows: list[dict[str, float]] = field(default_factory=list)

    def services(self) -> dict[str, float]:
        """Return the CPU time used so far, by role; the supervisor and its broker count nowhere."""
        used: dict[str, float] = {}
        for number in descendants(self.process.pid):
            role = name(number)
            if role in ("gateway", "render", "prefill", "decode", "derender"):
                used[role] = used.get(role, 0.0) + cpu_s(number)
        return used


def start(name: str, home: Path, env: dict[str, str]) -> Stack:
    """Start a stack and wait until it is ready."""
    command = [sys.executable, "-m", "headrace.cli.main", "up", "--engine", "fake", "--port", "0"]
    command += ["--served-model-name", "fake", "--set", "decode.local_prefill_threshold=0"]
    command += ["--set", "up.batch=0"]
    environment = {**os.environ, "HEADRACE_HOME": str(home / name), **env}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    ready = process.stdout.readline().split()
    if ready[:1] != ["ready"]:
        raise SystemExit(f"stack {name} did not start")
    return Stack(name, process, ready[1])


async def load(stack: Stack, rate: float, seconds: float) -> None:
    """Ask `rate` times a second, whatever the answers take; wait for all of them."""

    async def ask() -> None:
        answer = await client.post("/v1/completions", json=BODY)
        answer.raise_for_status()
        if not answer.text.endswith("data: [DONE]\n\n"):
            raise SystemExit(f"no whole answer: {answer.text[-200:]}")

    loop = asyncio.get_running_loop()
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60, limits=limits) as client:
        async with asyncio.TaskGroup() as group:
            begun = loop.time()
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, begun + number / rate - loop.time()))
                group.create_task(ask())


async def window(stack: Stack, rate: float, seconds: float) -> None:
    """Put one window of load on a stack, and note what it cost; spans that wait are sent within it."""
    before = stack.services()
    await load(stack, rate, seconds)
    await asyncio.sleep(6.0)  # spans go out every 5 s
    after = stack.services()
    stack.windows.append({role: after[role] - before[role] for role in after})


def summary(off: Stack, on: Stack, rate: float, seconds: float) -> dict[str, Any]:
    """Return what is printed."""
    totals = {stack.name: [sum(w.values()) for w in stack.windows] for stack in (off, on)}
    pairs = list(zip(totals["off"], totals["on"], strict=True))
    num = rate * seconds
    return {
        "requests_per_s": rate,
        "windows": len(pairs),
        "cpu_ms_a_request_off": round(statistics.mean(totals["off"]) / num * 1e3, 3),
        "cpu_ms_a_request_on": round(statistics.mean(totals["on"]) / num * 1e3, 3),
        "more_cpu": round(sum(totals["on"]) / sum(totals["off"]) - 1, 4),
        "more_cpu_by_pair": [round(on_s / off_s - 1, 4) for off_s, on_s in pairs],
        "cores_of_the_difference": round(
            (sum(totals["on"]) - sum(totals["off"])) / (len(pairs) * seconds), 4
        ),
        "by_role_ms_a_request": {
            stack.name: {
                role: round(statistics.mean(w[role] for w in stack.windows) / num * 1e3, 3)
                for role in stack.windows[0]
            }
            for stack in (off, on)
        },
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start both stacks, and alternate."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    traced = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": arguments.protocol,
    }
    stacks: list[Stack] = []
    with tempfile.TemporaryDirectory() as home:
        try:
            stacks.append(start("off", Path(home), {}))
            stacks.append(start("on", Path(home), traced))
            off, on = stacks
            for stack in stacks:  # warm
                await load(stack, arguments.rate, 3)
            await asyncio.sleep(6.0)
            for number in range(arguments.windows):
                for stack in (off, on) if number % 2 == 0 else (on, off):
                    await window(stack, arguments.rate, arguments.window_s)
        finally:
            for stack in stacks:
                stack.process.send_signal(signal.SIGTERM)
            for stack in stacks:
                stack.process.wait(60)
    if not Collector.num_posts:
        raise SystemExit("no span arrived")
    return summary(off, on, arguments.rate, arguments.window_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--protocol", default="http/json")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
