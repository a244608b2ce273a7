"""What traces cost: `python benchmarks/tracing.py [--starts N] [--seconds S] [--rate R] [--cpus 2-15] [--out FILE]`.

Stacks of fake engines stand side by side: one without traces, and for each protocol one that sends every request's
to a collector (a server here that takes and forgets them). All get the same requests at the same moments, so that
all meet the same machine, and what counts is the difference in CPU time of their services, brokers apart. A process
that is started anew may be a little slower or faster for as long as it runs; so the stacks are started again and
again, in another order each time, and the interval of confidence is that of the mean over these starts. Needs no
network, and no other Python packages than headrace itself; on PYTHONPATH from the source tree it need not be
installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
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
ROLES = ("gateway", "render", "prefill", "decode", "derender")
OFF = "off"
WARM_S = 8.0
"""Spans go out every 5 s: from then on, as many are sent as are made."""
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t, 95% two-sided, for 1 to 15 degrees of freedom."""


class Collector(BaseHTTPRequestHandler):
    """Takes spans over OTLP, and forgets them. It keeps connections, as collectors do."""

    protocol_version = "HTTP/1.1"
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
    """A running `headrace up`, and the processes of its services."""

    process: subprocess.Popen[str]
    url: str
    services: dict[str, int] = field(default_factory=dict)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time used so far, by role; the supervisor and its broker count nowhere."""
        return {role: cpu_s(number) for role, number in self.services.items()}


def started(home: Path, env: dict[str, str]) -> Stack:
    """Start a stack and wait until it is ready."""
    command = [sys.executable, "-m", "headrace.cli.main", "up", "--engine", "fake", "--port", "0"]
    command += ["--served-model-name", "fake", "--set", "decode.local_prefill_threshold=0"]
    command += ["--set", "up.batch=0"]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "HEADRACE_HOME": str(home), **env}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    ready = process.stdout.readline().split()
    if ready[:1] != ["ready"]:
        raise SystemExit("a stack did not start")
    stack = Stack(process, ready[1])
    stack.services = {
        role: number for number in descendants(process.pid) if (role := name(number)) in ROLES
    }
    return stack


async def load(stacks: list[Stack], rate: float, seconds: float) -> list[dict[str, float]]:
    """Ask each stack `rate` times a second, and return what each used, by role, behind `WARM_S`."""

    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json=BODY)
        answer.raise_for_status()
        if not answer.text.endswith("data: [DONE]\n\n"):
            raise SystemExit(f"no whole answer: {answer.text[-200:]}")

    loop = asyncio.get_running_loop()
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
    clients = [httpx.AsyncClient(base_url=s.url, timeout=60, limits=limits) for s in stacks]
    before: list[dict[str, float]] = []
    try:
        async with asyncio.TaskGroup() as group:
            begun = loop.time()
            for number in range(int(rate * (WARM_S + seconds))):
                await asyncio.sleep(max(0.0, begun + number / rate - loop.time()))
                if number == int(rate * WARM_S):
                    before = [stack.cpu_s() for stack in stacks]
                first = number % len(clients)
                for client in clients[first:] + clients[:first]:
                    group.create_task(ask(client))
            after = [stack.cpu_s() for stack in stacks]
    finally:
        for client in clients:
            await client.aclose()
    return [
        {role: then[role] - now[role] for role in now}
        for now, then in zip(before, after, strict=True)
    ]


async def one_start(
    options: argparse.Namespace, number: int, collector_url: str
) -> dict[str, dict[str, float]]:
    """Start every stack, load all at once, and return what each service used (ms a request)."""
    cases = [OFF, *options.protocols]
    order = cases[number % len(cases) :] + cases[: number % len(cases)]
    running: dict[str, Stack] = {}
    with tempfile.TemporaryDirectory() as home:
        try:
            os.sched_setaffinity(0, options.cpus)
            for case in order:
                env = {"OTEL_TRACES_EXPORTER": "none"}
                if case != OFF:
                    env = {
                        "OTEL_EXPORTER_OTLP_ENDPOINT": collector_url,
                        "OTEL_EXPORTER_OTLP_PROTOCOL": case,
                    }
                running[case] = started(Path(home) / case.replace("/", "-"), env)
            os.sched_setaffinity(0, options.own_cpus)
            used = await load([running[case] for case in cases], options.rate, options.seconds)
        finally:
            for stack in running.values():
                stack.process.send_signal(signal.SIGTERM)
            for stack in running.values():
                stack.process.wait(60)
    num = int(options.rate * (WARM_S + options.seconds)) - int(options.rate * WARM_S)
    return {
        case: {role: seconds / num * 1e3 for role, seconds in roles.items()}
        for case, roles in zip(cases, used, strict=True)
    }


def interval(values: list[float]) -> dict[str, float]:
    """Return the mean, and the 95% interval of confidence around it."""
    mean, df = statistics.mean(values), len(values) - 1
    half = T_975[min(df, len(T_975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def summary(options: argparse.Namespace, starts: list[dict[str, dict[str, float]]]) -> Any:
    """Return what is printed."""
    off = [sum(start[OFF].values()) for start in starts]
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": len(options.cpus),
        "requests_per_s": options.rate,
        "seconds_a_start": options.seconds,
        "starts": len(starts),
        "off_ms_a_request": round(statistics.mean(off), 3),
    }
    for case in options.protocols:
        more = [sum(start[case].values()) - base for start, base in zip(starts, off, strict=True)]
        shares = [extra / base for extra, base in zip(more, off, strict=True)]
        found[case] = {
            "more_ms_a_request": interval(more),
            "more_cpu": interval(shares),
            "more_cpu_by_start": [round(share, 4) for share in shares],
            "more_ms_by_role": {
                role: round(statistics.mean(s[case][role] - s[OFF][role] for s in starts), 3)
                for role in ROLES
            },
        }
    return found


async def measure(options: argparse.Namespace) -> Any:
    """Start the stacks again and again, and print how each start went."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_port}"
    starts = []
    for number in range(options.starts):
        starts.append(await one_start(options, number, url))
        totals = {case: round(sum(roles.values()), 3) for case, roles in starts[-1].items()}
        print(f"start {number + 1}: {totals} ms a request", file=sys.stderr, flush=True)
    if not Collector.num_posts:
        raise SystemExit("no span arrived")
    return summary(options, starts)


def cpu_list(text: str) -> set[int]:
    """Return the CPUs that `2-5,8` names. Raises: ValueError."""
    ends = [part.partition("-") for part in text.split(",")]
    return {cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=9, help="two at least")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load that counts, a start")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, each stack")
    parser.add_argument(
        "--protocols",
        type=lambda text: text.split(","),
        default=["http/json", "http/protobuf"],
        help="a traced stack each (http/json,http/protobuf)",
    )
    parser.add_argument(
        "--cpus", type=cpu_list, help="of the stacks, as 2-15; the load comes from the others"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    options.cpus = options.cpus or every
    options.own_cpus = every - options.cpus or every
    text = json.dumps(asyncio.run(measure(options)), indent=1) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
