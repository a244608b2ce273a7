"""First contact with prefill workers, before a request needs it.

NIXL's handshake costs a tenth of a second here and 5 s with a dead address, one at a time; and the blocks
of a handoff that is given back are only freed once the two engines have shaken hands.
"""

from __future__ import annotations

import asyncio
import logging

from headrace.engine.interface import DecodeEngine
from headrace.shared import subjects, wire
from headrace.shared.errors import BrokerError, HandoffError, RequestError, WireError
from headrace.shared.messages import Handoff, Handshake, Heartbeat, PrefillFailed
from headrace.shared.openai_errors import error_of
from headrace.shared.subjects import Role
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
RETRY_S = 5.0


class Peers:
    """The prefill workers that this decode engine has shaken hands with."""

    def __init__(self, worker: Worker, engine: DecodeEngine) -> None:
        self._worker = worker
        self._engine = engine
        self._tried: dict[str, bool] = {}

    async def greet_all(self) -> None:
        """Shake hands with every prefill worker there is; one that fails is tried again by `run`."""
        await asyncio.gather(*(self._greet(peer) for peer in self._new()))

    async def run(self) -> None:
        """Shake hands with each prefill worker that comes, until cancelled."""
        while True:
            await self._worker.table.wait_for(lambda _: bool(self._new()))
            await self.greet_all()
            failed = [instance for instance, succeeded in self._tried.items() if not succeeded]
            if failed:
                await asyncio.sleep(RETRY_S)
                for instance in failed:
                    del self._tried[instance]

    def _new(self) -> list[Heartbeat]:
        ready = self._worker.table.ready(
            Role.PREFILL, slug=self._worker.slug, contract=self._worker.contract
        )
        alive = {peer.instance for peer in ready}
        self._tried = {name: tried for name, tried in self._tried.items() if name in alive}
        return [peer for peer in ready if peer.instance not in self._tried]

    async def _greet(self, peer: Heartbeat) -> None:
        try:
            handoff = await self._handoff(peer)
            await self._engine.warm_handshake(handoff.kv_transfer_params)
        except (BrokerError, HandoffError, RequestError, WireError) as error:
            self._tried[peer.instance] = False
            logger.warning(
                "no first contact with %s yet: %s",
                peer.instance,
                error,
                extra={"action": "handshake_failed", "worker": peer.instance},
            )
            return
        self._tried[peer.instance] = True
        logger.info(
            "shook hands with %s",
            peer.instance,
            extra={"action": "handshake_done", "worker": peer.instance},
        )

    async def _handoff(self, peer: Heartbeat) -> Handoff:
        request = Handshake(decode_instance=self._worker.instance, contract=self._worker.contract)
        answer = wire.decode(
            await self._worker.broker.request(
                subjects.handshake(peer.instance), wire.encode(request), timeout_s=ANSWER_TIMEOUT_S
            ),
            Handoff,
            PrefillFailed,
        )
        if isinstance(answer, PrefillFailed):
            raise error_of(answer.failure)
        return answer
