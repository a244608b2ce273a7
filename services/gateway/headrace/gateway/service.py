"""The gateway process: the HTTP server, the way to the pipeline, and the order in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal

import uvicorn

from headrace.gateway import queue_gauges
from headrace.gateway.app import create_app
from headrace.gateway.ask import Asker
from headrace.gateway.batches import Batches
from headrace.gateway.batches_once import BatchesOnce
from headrace.gateway.batches_routes import add_batches_routes
from headrace.gateway.files import Files
from headrace.gateway.files_routes import add_files_routes
from headrace.gateway.files_sweep import Sweeper
from headrace.gateway.goodbye import Goodbye
from headrace.gateway.handler import Handler
from headrace.gateway.http_limits import limited
from headrace.gateway.keyring import Keyring, operators_of
from headrace.gateway.lasting import Lasting, Terms
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.gateway.starts import Starts
from headrace.gateway.webhook_endpoints import WebhookEndpoints
from headrace.gateway.webhook_routes import add_webhook_endpoints
from headrace.shared import tracing
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.exposition import exposed
from headrace.shared.file_store import store_of
from headrace.shared.log_level import following
from headrace.shared.messages import Heartbeat
from headrace.shared.pulse import answering_pings
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role
from headrace.shared.worker import ended_by
from headrace.shared.workers import Beacon, WorkerTable

logger = logging.getLogger(__name__)

BACKLOG = 2048
LINGER_S = 1.0  # for a client that has connected, and whose request is on its way
LINGER_POLL_S = 0.02
CLOSE_TIMEOUT_S = 5  # for what is still being sent once every call has ended


class _Server(uvicorn.Server):
    """Leaves the signals to whoever runs the process, and resets no connection that was just made."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, refuse what the last clients send, then close."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.server_state.connections:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(LINGER_POLL_S)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: Settings, *, engine: str, stop: asyncio.Event) -> None:
    """Serve HTTP until `stop` is set; then refuse new requests, let the running ones end, and close.

    The HTTP server is up at once; requests are answered 503 until the broker is reached. `engine` makes no
    difference here: the gateway has none.
    Raises: SettingsError when the address cannot be listened on.
    """
    gateway = Gateway(settings, instance=f"gateway-{uuid.uuid4().hex[:8]}")
    async with exposed(settings.metrics, gateway.heartbeat):
        await gateway.run(stop)


class Gateway:
    """One gateway process."""

    def __init__(self, settings: Settings, *, instance: str, pace: Pace | None = None) -> None:
        """Raises: SettingsError when the API keys can't be read."""
        self._settings = settings
        self._instance = instance
        self._pace = pace or Pace()
        self._link = Link()
        self._keyring = Keyring.of(settings.gateway)
        self._beacon: Beacon | None = None
        self._state: Literal["ready", "draining", "stopped"] = "ready"
        self._closing = asyncio.Event()
        self._tracer = tracing.start(Role.GATEWAY, instance)
        self._handler = Handler(
            self._link,
            instance=instance,
            deadline_s=settings.gateway.deadline_s,
            pace=self._pace,
            tracer=self._tracer,
        )
        self._lasting = Lasting(self._link, self._handler, Terms.of(settings))
        self._starts = Starts(self._lasting.responses)
        self._files = Files(
            self._link,
            max_bytes=settings.gateway.max_file_bytes,
            pace=self._pace,
            store_of=store_of(settings.files),
        )
        self._batches = Batches(self._link, self._files)

    async def run(
        self, stop: asyncio.Event, *, on_listening: Callable[[int], None] | None = None
    ) -> None:
        """Serve until `stop` is set, then drain; `on_listening` is told the port.

        Raises: SettingsError; whatever ended the server or the way to the broker for good.
        """
        listener = _listen(
            self._settings.gateway.host,
            self._settings.gateway.port,
            is_shared=self._settings.up.gateway > 1,
        )
        host, port = listener.getsockname()[:2]
        logger.info(
            "gateway listens on http://%s:%d",
            host,
            port,
            extra={"action": "gateway_listening", "host": host, "port": port},
        )
        if on_listening is not None:
            on_listening(port)
        server = self._server()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        joined = asyncio.create_task(self._join())
        stopping = asyncio.create_task(stop.wait())
        watching = asyncio.create_task(self._keyring.watch())
        try:
            await asyncio.wait({serving, joined, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                draining = asyncio.create_task(self._drain())
                await asyncio.wait({draining, joined}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)
            if joined.done():
                await self._handler.drain(0)  # no answer will come
        finally:
            server.should_exit = True
            await asyncio.wait({serving})
            await self._handler.aclose()
            is_waiting_for_the_broker = self._beacon is None and not joined.done()
            if is_waiting_for_the_broker:
                joined.cancel()
            self._closing.set()
            await asyncio.gather(joined, return_exceptions=True)
            stopping.cancel()
            watching.cancel()
            await self._tracer.close()
        serving.result()
        if not is_waiting_for_the_broker:
            joined.result()

    async def _drain(self) -> None:
        self._handler.is_draining = True
        self._state = "draining"
        await self._beat()
        await self._handler.drain(self._settings.gateway.drain_timeout_s)

    async def _join(self) -> None:
        """Reach the broker, and stay in the pipeline until the gateway closes."""
        broker = await Broker.connect(self._settings.broker, role=Role.GATEWAY, name=self._instance)
        try:
            workers = WorkerTable(broker)
            await workers.start()
            await self._handler.cancels.start(broker)
            broker.on_reconnect(self._on_reconnect)
            self._link.open(broker, workers)
            await self._starts.listen(broker)
            self._beacon = Beacon(broker, self.heartbeat)
            await self._beacon.start()
            logger.info("gateway is ready", extra={"action": "worker_ready"})
            sweeper = Sweeper(self._files, self._batches, pace=self._pace)
            sweeping = asyncio.create_task(sweeper.run())
            try:
                async with (
                    answering_pings(broker, self._instance),
                    ended_by(broker.closed_for_good()),
                    self._watching_queues(broker, workers),
                    following(broker, Role.GATEWAY),
                ):
                    await self._closing.wait()
                self._state = "stopped"
                await self._beat()
            finally:
                sweeping.cancel()
                await asyncio.gather(sweeping, return_exceptions=True)
                await self._starts.aclose()
                await self._beacon.stop()
                await workers.stop()
        finally:
            await broker.close()

    @contextlib.asynccontextmanager
    async def _watching_queues(self, broker: Broker, workers: WorkerTable) -> AsyncIterator[None]:
        """Keep the queues' metrics, where somebody may look at them."""
        if not self._settings.metrics.port:
            yield
            return
        async with ended_by(queue_gauges.watch(broker, workers)):
            yield

    async def _beat(self) -> None:
        """Tell a change of state at once, if there is anybody to tell."""
        if self._beacon is not None and self._link.broker.is_connected:
            with contextlib.suppress(BrokerError):
                await self._beacon.beat()

    async def _on_reconnect(self) -> None:
        self._handler.reread_all()

    def heartbeat(self) -> Heartbeat:
        """Return what this gateway is right now."""
        return Heartbeat(
            role=Role.GATEWAY,
            instance=self._instance,
            model="",  # it serves whatever the workers serve
            contract="",
            state=self._state,
            slots=0,  # as many as connect
            num_running=self._handler.num_running,
        )

    def _server(self) -> uvicorn.Server:
        gateway = self._settings.gateway
        asker = Asker(self._link, timeout_s=self._pace.ask_timeout_s)
        app = create_app(
            self._link,
            self._handler,
            asker,
            keyring=self._keyring,
            tenant=gateway.tenant,
            operators=operators_of(gateway),
            max_body_bytes=gateway.max_body_bytes,
            pace=self._pace,
            lasting=self._lasting,
        )
        add_files_routes(app, self._handler, self._files)
        add_batches_routes(
            app,
            self._handler,
            self._batches,
            once=BatchesOnce(self._lasting.idempotency, self._batches),
            pace=self._pace,
        )
        add_webhook_endpoints(app, WebhookEndpoints(self._link, self._settings.webhooks))
        config = uvicorn.Config(
            Goodbye(app, lambda: self._handler.is_draining),
            http=limited(gateway.max_connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=gateway.keep_alive_s,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        return _Server(config)


def _listen(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Return a listening socket; the kernel spreads connections over those that share an address.

    Raises: SettingsError naming the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=is_shared
        )
    except OSError as error:
        raise SettingsError(
            f"gateway.host {host!r}, gateway.port {port}: cannot listen there: {error}"
        ) from error
