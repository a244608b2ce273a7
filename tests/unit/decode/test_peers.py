"""Which prefill workers decode can pull from: what handshakes and pulls say of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.decode import peers as peers_module
from headrace.decode.peers import MAX_FAILED_PULLS, Peers
from headrace.shared import wire
from headrace.shared.errors import EngineDeadError, EngineRequestError
from headrace.shared.messages import Handoff, Heartbeat
from headrace.shared.subjects import Role


class Worker:
    """A decode worker and its engine; each handshake succeeds, fails or waits as the test says."""

    instance, contract, slug = "decode-1", "c", "m"

    def __init__(self) -> None:
        self.broker = self.table = self
        self.names: set[str] = set()
        self.failing: set[str] = set()
        self.hung: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.greeted: dict[str, asyncio.Queue[None]] = defaultdict(asyncio.Queue)
        self._changed = asyncio.Event()

    def ready(self, role: Role, **by: str) -> list[Heartbeat]:
        return [
            Heartbeat(
                role=Role.PREFILL,
                instance=name,
                model="m",
                contract="c",
                state="ready",
                slots=1,
                num_running=0,
            )
            for name in self.names
        ]

    def workers(self) -> list[Heartbeat]:
        return self.ready(Role.PREFILL)

    async def wait_for(self, predicate: Any) -> None:
        while not predicate(self):
            await self._changed.wait()
            self._changed.clear()

    def are(self, *names: str) -> None:
        self.names = set(names)
        self._changed.set()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        name = subject.rpartition(".")[2]
        return wire.encode(
            Handoff(
                task_id="t",
                request_id="r",
                prefill_instance=name,
                epoch="e",
                contract="c",
                prompt_hash="h",
                expires=1.0,
                kv_transfer_params={"name": name},
                prefill_queue_s=0.0,
                prefill_s=0.0,
            )
        )

    async def warm_handshake(self, kv_transfer_params: dict[str, Any]) -> None:
        name = kv_transfer_params["name"]
        self.greeted[name].put_nowait(None)
        if name in self.hung:
            await asyncio.Event().wait()
        if name in self.broken:
            raise self.broken[name]
        if name in self.failing:
            raise EngineRequestError("no handshake")


@pytest_asyncio.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(peers_module, "FIRST_RETRY_S", 0.0)
    return Worker()


@pytest_asyncio.fixture
async def peers(worker: Any) -> AsyncIterator[Peers]:
    peers = Peers(worker, worker)
    running = asyncio.create_task(peers.run())
    yield peers
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def settled(peers: Peers, name: str, usable: bool) -> None:
    while peers.is_usable(name) is not usable:  # noqa: ASYNC110 - a turn of the loop, not a time
        await asyncio.sleep(0)


async def test_a_worker_without_a_handshake_is_not_used_until_one_succeeds(
    worker: Worker, peers: Peers
) -> None:
    worker.failing = {"p1"}
    worker.are("p1", "p2")
    for _ in range(3):
        await worker.greeted["p1"].get()
    await settled(peers, "p1", False)
    assert peers.is_usable("p2")
    worker.failing.clear()
    await settled(peers, "p1", True)
    assert worker.greeted["p2"].qsize() == 1


async def test_one_that_hangs_keeps_no_other_waiting(worker: Worker, peers: Peers) -> None:
    worker.hung = {"p1"}
    worker.are("p1")
    await worker.greeted["p1"].get()
    worker.are("p1", "p2")
    await worker.greeted["p2"].get()


async def test_a_worker_whose_pulls_fail_is_not_used_until_another_handshake(
    worker: Worker, peers: Peers
) -> None:
    worker.are("p1")
    await worker.greeted["p1"].get()
    await peers._peers["p1"].done.wait()
    worker.hung = {"p1"}
    for _ in range(MAX_FAILED_PULLS):
        assert peers.is_usable("p1")
        peers.not_pulled("p1")
    assert not peers.is_usable("p1")
    await worker.greeted["p1"].get()


async def test_pulls_that_fail_during_the_first_handshake_begin_another_in_its_place(
    worker: Worker, peers: Peers
) -> None:
    worker.hung = {"p1"}
    worker.are("p1")
    await worker.greeted["p1"].get()
    first = peers._peers["p1"].greeted
    assert first is not None
    for _ in range(MAX_FAILED_PULLS):
        peers.not_pulled("p1")
    await worker.greeted["p1"].get()
    assert first.cancelled()


async def test_pulls_that_fail_now_and_then_do_no_harm(worker: Worker, peers: Peers) -> None:
    worker.are("p1")
    await worker.greeted["p1"].get()
    await peers._peers["p1"].done.wait()
    for _ in range(5):
        peers.not_pulled("p1")
        peers.pulled("p1")
    assert peers.is_usable("p1")


async def test_a_worker_that_is_gone_is_forgotten(worker: Worker, peers: Peers) -> None:
    worker.failing = {"p1"}
    worker.are("p1")
    await worker.greeted["p1"].get()
    worker.are("p2")
    await worker.greeted["p2"].get()
    assert peers._peers.keys() == {"p2"}


async def test_a_start_waits_for_the_first_handshakes_and_not_for_their_success(
    worker: Any,
) -> None:
    peers = Peers(worker, worker)
    worker.names = {"p1", "p2"}
    worker.failing = {"p1"}
    await peers.greet_all()
    assert worker.greeted["p1"].qsize() >= 1
    assert worker.greeted["p2"].qsize() == 1
    running = asyncio.create_task(peers.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(EngineDeadError("dead"), False), (KeyError("a bug"), True)]
)
async def test_a_greeting_that_ends_for_ever_is_told(
    worker: Worker,
    peers: Peers,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    has_traceback: bool,
) -> None:
    worker.broken = {"p1": error}
    worker.are("p1")
    await worker.greeted["p1"].get()
    await asyncio.wait({peers._peers["p1"].greeted})  # type: ignore[arg-type]  # it has begun
    await asyncio.sleep(0)
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.__dict__["worker"] == "p1"
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) is has_traceback
