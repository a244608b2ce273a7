"""`/metrics` of one process, on a port of its own, with `/live` and `/ready` for whoever runs it.

Served from a thread: a process whose event loop is stuck still says so.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.shared import metrics
from headrace.shared.errors import EngineDeadError, SettingsError
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import MetricsSettings

LAG_INTERVAL_S = 0.1
STUCK_S = 30.0
"""A loop that ran no timer for so long: the process is not alive."""
LABELS = ("role", "worker")


class Exposition:
    """What one process shows of itself. `heartbeat` and `counts` are called in the thread of a request."""

    def __init__(
        self, heartbeat: Callable[[], Heartbeat], counts: Callable[[], Mapping[str, float]]
    ) -> None:
        self.heartbeat = heartbeat
        self.counts = counts
        self._turned = time.monotonic()

    @property
    def is_live(self) -> bool:
        """Whether the event loop turns."""
        return time.monotonic() - self._turned < STUCK_S

    @property
    def is_ready(self) -> bool:
        """Whether it takes work."""
        return self.is_live and self.heartbeat().state == "ready"

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._turned = time.monotonic()
            metrics.LOOP_LAG.observe(max(0.0, loop.time() - due))


class Processes(Collector):
    """What the processes of this interpreter say in their heartbeats: one, but for tests."""

    def __init__(self) -> None:
        self.shown: set[Exposition] = set()

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without a value."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as of now."""
        families = _families()
        for shown in tuple(self.shown):
            try:
                beat, counts = shown.heartbeat(), shown.counts()
            except EngineDeadError:  # a scrape between an engine's death and its process's
                continue
            values = {
                "headrace_worker_ready": float(beat.state == "ready"),
                "headrace_slots": beat.slots,
                "headrace_requests_running": beat.num_running,
                "headrace_kv_blocks": beat.kv_blocks_total,
                "headrace_kv_blocks_free": beat.kv_blocks_free,
                **counts,
            }
            for name, value in values.items():
                families[name].add_metric((beat.role, beat.instance), value)
        return families.values()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    kinds = {name: CounterMetricFamily if name in COUNTERS else GaugeMetricFamily for name in SHOWN}
    return {name: kind(name, SHOWN[name], labels=LABELS) for name, kind in kinds.items()}


SHOWN = {
    "headrace_worker_ready": "1 while the process takes work.",
    "headrace_slots": "Requests that it runs at once; 0: as many as come.",
    "headrace_requests_running": "Requests that it runs now.",
    "headrace_kv_blocks": "KV blocks of its engine.",
    "headrace_kv_blocks_free": "KV blocks that are free, leased ones counted as used.",
    "headrace_handoffs_leased": "Prefill: handoffs neither pulled, given back nor expired.",
    "headrace_handoffs_expired": "Prefill: handoffs that nobody pulled before their lease ended, since its start.",
}
COUNTERS = frozenset({"headrace_handoffs_expired"})
PROCESSES = Processes()
REGISTRY.register(PROCESSES)


@asynccontextmanager
async def exposed(
    settings: MetricsSettings,
    heartbeat: Callable[[], Heartbeat],
    counts: Callable[[], Mapping[str, float]] = dict,
) -> AsyncIterator[None]:
    """Serve this process's metrics while the block runs, if `metrics.port` says where.

    `counts` are further values of `SHOWN`.
    Raises: SettingsError when it can't be listened on.
    """
    if not settings.port:
        yield
        return
    shown = Exposition(heartbeat, counts)
    server = _listen(settings, shown)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    lag = asyncio.create_task(shown.watch_loop())
    PROCESSES.shown.add(shown)
    try:
        yield
    finally:
        PROCESSES.shown.discard(shown)
        lag.cancel()
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _listen(settings: MetricsSettings, shown: Exposition) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers: dict[str, Callable[[], tuple[bool, bytes]]] = {
                "/metrics": lambda: (True, generate_latest(REGISTRY)),
                "/live": lambda: (shown.is_live, b""),
                "/ready": lambda: (shown.is_ready, b""),
            }
            answer = answers.get(self.path.partition("?")[0])
            is_well, body = (False, b"") if answer is None else answer()
            self.send_response(404 if answer is None else 200 if is_well else 503)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write no line a scrape."""

    try:
        return ThreadingHTTPServer((settings.host, settings.port), Handler)
    except OSError as error:
        raise SettingsError(
            f"metrics.host {settings.host!r}, metrics.port {settings.port}: cannot listen there: {error}"
        ) from error
