"""What finished jobs leave in the broker: `python benchmarks/broker_memory.py [--first N] [--last N] [--out FILE]`.

A real broker, the stages with fake engines in this process. `bulk` jobs run; after the first N of them, after the last,
and some times between (`--looks`), the program waits until all that is kept for a while is past its age, and looks at
what is left: memory, messages, subjects, consumers. What is kept for days or minutes is kept for `--keep-s` seconds
here; nothing else is changed.

Exit code 1: there is more left after the last than after the first. The broker's memory may be a tenth and 16 MiB more,
which its garbage collector may keep: of 90,000 jobs more, some 200 bytes each would be seen.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats

from headrace.decode import service as decode
from headrace.derender import service as derender
from headrace.prefill import service as prefill
from headrace.render import service as render
from headrace.shared import settings as settings_module
from headrace.shared import subjects
from headrace.shared.broker import Broker, Received, topology
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane
from headrace.shared.workers import WorkerTable

TENANT, MODEL = "bench", "bench"
WINDOW = 256
STALL_S = 120.0  # no job ended for so long: something hangs
GROWTH = 1.1  # of the memory: Go gives back what it likes
SLACK_MIB = 16.0
GRACE_S = 10.0  # for the broker's own sweep
ROLES: tuple[Callable[..., Any], ...] = (render.run, prefill.run, decode.run, derender.run)


def keep_for(seconds: int) -> None:
    """Let no stream keep anything for longer, nor an ID to tell a repeated publish by."""
    declared, config = topology.streams, topology.Stream.config

    def shortened(max_queued_per_subject: int) -> tuple[topology.Stream, ...]:
        return tuple(
            dataclasses.replace(stream, max_age_s=min(stream.max_age_s, seconds))
            for stream in declared(max_queued_per_subject)
        )

    def with_window(stream: topology.Stream, replicas: int) -> dict[str, Any]:
        return config(stream, replicas) | {"duplicate_window": min(120, seconds) * 10**9}

    topology.streams = shortened
    topology.Stream.config = with_window  # type: ignore[method-assign]


@asynccontextmanager
async def stack(settings: Settings) -> AsyncIterator[Broker]:
    """Run the stages; give a connection of a client."""
    stop = asyncio.Event()
    broker = await Broker.connect(settings.broker, role="bench", name="bench")
    services = [asyncio.create_task(run(settings, engine="fake", stop=stop)) for run in ROLES]
    async with WorkerTable(broker) as table:
        await table.wait_for(lambda t: sum(h.state == "ready" for h in t.workers()) == len(ROLES))
    yield broker
    stop.set()
    await asyncio.gather(*services)
    await broker.close()


class Load:
    """Submits jobs, a window of them at a time, and counts their ends."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._ended: set[str] = set()
        self._free = asyncio.Semaphore(WINDOW)

    async def start(self) -> None:
        """Hear of every end."""
        await self._broker.subscribe(subjects.res(TENANT, "x").removesuffix("x") + "*", self._end)

    def _end(self, received: Received) -> None:
        name = received.subject.rpartition(".")[2]
        if name not in self._ended:
            self._ended.add(name)
            self._free.release()

    async def run(self, first: int, last: int) -> float:
        """Run the jobs of these numbers; return how many ended a second."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(first, last):
                async with asyncio.timeout(STALL_S):
                    await self._free.acquire()
                group.create_task(self._submit(number))
        for _ in range(WINDOW):
            async with asyncio.timeout(STALL_S):
                await self._free.acquire()
        for _ in range(WINDOW):
            self._free.release()
        return (last - first) / (time.monotonic() - started)

    async def _submit(self, number: int) -> None:
        body = {"model": MODEL, "prompt": f"job {number}", "max_tokens": 4}
        request_id = f"job-{number}"
        await self._broker.publish_durable(
            subjects.req(TENANT, MODEL, Lane.BULK),
            msgspec.json.encode(body),
            message_id=f"{TENANT}.{request_id}",
            headers={"Hr-Endpoint": "completions", "Hr-Request-Id": request_id},
        )


def rss_mib(pid: int) -> float:
    """Return a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


async def streams_of(url: str) -> list[dict[str, Any]]:
    """Return every stream as the broker's API shows it."""
    client = await nats.connect(url)
    try:
        answer = await client.request("$JS.API.STREAM.LIST", timeout=10)
        return list(json.loads(answer.data)["streams"])
    finally:
        await client.close()


async def look(server: NatsServer) -> dict[str, Any]:
    """Return what is in the broker."""
    assert server.pid is not None
    found = {s["config"]["name"]: s["state"] for s in await streams_of(server.url)}
    return {
        "rss_mib": round(rss_mib(server.pid), 1),
        "num_streams": len(found),
        "num_consumers": sum(state["consumer_count"] for state in found.values()),
        "num_messages": {name: s["messages"] for name, s in found.items() if s["messages"]},
        "num_subjects": sum(state.get("num_subjects", 0) for state in found.values()),
    }


async def settled(server: NatsServer, keep_s: int) -> dict[str, Any]:
    """Wait until what was kept for a while is gone; return what is left."""
    await asyncio.sleep(keep_s + GRACE_S)
    return await look(server)


def totals(first: int, last: int, looks: int) -> list[int]:
    """Return after how many jobs to look."""
    return [first + (last - first) * i // (looks - 1) for i in range(looks)]


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run it all; return what was seen."""
    server = NatsServer(folder)
    await server.start()
    settings = settings_module.load(
        env={},
        overrides={
            "model": {"served_name": MODEL},
            "broker": {"url": server.url},
            "decode": {"slots": 64},
            "fake": {"step_s": 0.0, "prefill_s_per_1k": 0.0},
        },
    )
    result: dict[str, Any] = {"keep_s": options.keep_s, "looks": []}
    try:
        async with stack(settings) as broker:
            load, done = Load(broker), 0
            await load.start()
            for total in totals(options.first, options.last, options.looks):
                rate = await load.run(done, total)
                done = total
                busy = await look(server)
                quiet = await settled(server, options.keep_s)
                seen = {"num_jobs": total, "jobs_per_s": round(rate, 1)}
                result["looks"].append(seen | {"at_the_end": busy, "when_quiet": quiet})
                print(json.dumps(result["looks"][-1]), file=sys.stderr, flush=True)
    finally:
        await server.stop()
    first, last = (result["looks"][i]["when_quiet"] for i in (0, -1))
    names = ("num_streams", "num_consumers", "num_messages", "num_subjects")
    result["is_back"] = all(first[name] == last[name] for name in names) and (
        last["rss_mib"] <= first["rss_mib"] * GROWTH + SLACK_MIB
    )
    return result


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=10_000, metavar="N")
    parser.add_argument("--last", type=int, default=100_000, metavar="N")
    parser.add_argument("--looks", type=int, default=4, metavar="N")
    parser.add_argument("--keep-s", type=int, default=60, metavar="S")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    keep_for(options.keep_s)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(options, Path(folder)))
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if result["is_back"] else 1


if __name__ == "__main__":
    sys.exit(main())
