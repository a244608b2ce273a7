"""First contact with prefill workers, before a request needs it; and who of them cannot be pulled from.

NIXL's handshake costs a tenth of a second here and 5 s with a dead address, one at a time; and the blocks
of a handoff that is given back are only freed once the two engines have shaken hands.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from headrace.engine.interface import DecodeEngine
from headrace.shared import subjects, wire
from headrace.shared.errors import (
    BrokerError,
    EngineDeadError,
    HandoffError,
    RequestError,
    WireError,
)
from headrace.shared.messages import Handoff, Handshake, Heartbeat, PrefillFailed
from headrace.shared.openai_errors import error_of
from headrace.shared.subjects import Role
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0
MAX_FAILED_PULLS = 2
"""In a row, and the worker is not asked before another handshake: one may be a single handoff's trouble."""


@dataclass(eq=False, slots=True)
class _Peer:
    greeted: asyncio.Task[None] | None = None  #: shakes hands, until it succeeds
    is_usable: bool = True
    num_failures: int = 0  #: handshakes and pulls in a row
    done: asyncio.Event = field(default_factory=asyncio.Event)  #: the first handshake has ended


class Peers:
    """The prefill workers that this decode engine has, or has not, shaken hands with."""

    def __init__(self, worker: Worker, engine: DecodeEngine) -> None:
        self._worker = worker
        self._engine = engine
        self._peers: dict[str, _Peer] = {}

    def is_usable(self, instance: str) -> bool:
        """Whether this prefill worker can be pulled from, as far as is known."""
        peer = self._peers.get(instance)
        return peer is None or peer.is_usable

    @property
    def unusable(self) -> tuple[str, ...]:
        """Who cannot be pulled from, as far as is known."""
        return tuple(sorted(name for name, peer in self._peers.items() if not peer.is_usable))

    def pulled(self, instance: str) -> None:
        """Note a pull that succeeded."""
        peer = self._peers.get(instance)
        if peer is not None and peer.is_usable:
            peer.num_failures = 0

    def not_pulled(self, instance: str) -> None:
        """Note a pull that failed."""
        peer = self._peers.get(instance)
        if peer is None or not peer.is_usable:
            return
        peer.num_failures += 1
        if peer.num_failures >= MAX_FAILED_PULLS:
            self._suspend(instance, peer, f"{peer.num_failures} pulls in a row failed")
            self._greet_soon(instance, peer)

    async def greet_all(self) -> None:
        """Shake hands with every prefill worker there is; one that fails is tried again later."""
        new = self._update()
        await asyncio.gather(*(peer.done.wait() for peer in new))

    async def run(self) -> None:
        """Shake hands with each prefill worker that comes, until cancelled."""
        try:
            while True:
                await self._worker.table.wait_for(lambda _: self._alive() != self._peers.keys())
                self._update()
        finally:
            for peer in self._peers.values():
                _end(peer)

    def _alive(self) -> set[str]:
        """Return who takes work, and of who is known already, who is there."""
        there: list[Heartbeat] = self._worker.table.workers()
        ready = self._worker.table.ready(
            Role.PREFILL, slug=self._worker.slug, contract=self._worker.contract
        )
        known = {worker.instance for worker in there if worker.instance in self._peers}
        return known | {worker.instance for worker in ready}

    def _update(self) -> list[_Peer]:
        """Forget who is gone, and begin with who is new; return those."""
        alive = self._alive()
        for instance in self._peers.keys() - alive:
            _end(self._peers.pop(instance))
        new = {instance: _Peer() for instance in alive - self._peers.keys()}
        self._peers |= new
        for instance, peer in new.items():
            self._greet_soon(instance, peer)
        return list(new.values())

    def _greet_soon(self, instance: str, peer: _Peer) -> None:
        if peer.greeted is not None:
            peer.greeted.cancel()  # else nobody would end it when the worker is gone
        peer.greeted = asyncio.create_task(
            self._greet_until_it_succeeds(instance, peer), name=instance
        )
        peer.greeted.add_done_callback(_ended)

    async def _greet_until_it_succeeds(self, instance: str, peer: _Peer) -> None:
        """Each peer has a pause of its own, the longer the more often it has failed."""
        while True:
            if peer.num_failures:
                doublings = min(peer.num_failures - 1, 10)
                await asyncio.sleep(min(MAX_RETRY_S, FIRST_RETRY_S * 2**doublings))
            try:
                if await self._greet(instance, peer):
                    return
            finally:
                peer.done.set()
            peer.num_failures += 1

    async def _greet(self, instance: str, peer: _Peer) -> bool:
        try:
            handoff = await self._handoff(instance)
        except (BrokerError, RequestError, WireError) as error:
            logger.warning(
                "no first contact with %s yet: %s",
                instance,
                error,
                extra={"action": "handshake_failed", "worker": instance},
            )
            return False  # it may be busy: that says nothing of its KV cache
        try:
            await self._engine.warm_handshake(handoff.kv_transfer_params)
        except (HandoffError, RequestError) as error:
            self._suspend(instance, peer, str(error))
            return False
        peer.is_usable = True  # its failures count until a pull succeeds
        logger.info(
            "shook hands with %s",
            instance,
            extra={"action": "handshake_done", "worker": instance},
        )
        return True

    def _suspend(self, instance: str, peer: _Peer, why: str) -> None:
        peer.is_usable = False
        logger.warning(
            "prefill worker %s is not used: %s",
            instance,
            why,
            extra={"action": "handshake_failed", "worker": instance},
        )

    async def _handoff(self, instance: str) -> Handoff:
        request = Handshake(decode_instance=self._worker.instance, contract=self._worker.contract)
        answer = wire.decode(
            await self._worker.broker.request(
                subjects.handshake(instance), wire.encode(request), timeout_s=ANSWER_TIMEOUT_S
            ),
            Handoff,
            PrefillFailed,
        )
        if isinstance(answer, PrefillFailed):
            raise error_of(answer.failure)
        return answer


def _ended(greeting: asyncio.Task[None]) -> None:
    if greeting.cancelled() or (error := greeting.exception()) is None:
        return
    logger.error(
        "%s is not greeted any more: %s",
        greeting.get_name(),
        error,
        exc_info=None if isinstance(error, EngineDeadError) else error,
        extra={"action": "handshake_ended", "worker": greeting.get_name()},
    )


def _end(peer: _Peer) -> None:
    if peer.greeted is not None:
        peer.greeted.cancel()
    peer.done.set()
