"""One prefill task in, one handoff out; knows no broker."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.engine.interface import EngineInfo, PrefillEngine
from headrace.shared import token_ids
from headrace.shared.errors import BadRequestError, ExpiredError, NoWorkerError
from headrace.shared.messages import Handoff, PrefillTask


class PrefillHandler:
    """Turns a `PrefillTask` into a `Handoff`."""

    def __init__(
        self,
        engine: PrefillEngine,
        info: EngineInfo,
        *,
        instance: str,
        contract: str,
        clock_offset: Callable[[str], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`clock_offset` is what to add to an instance's times to have them in the clock of `now`."""
        self._engine = engine
        self._info = info
        self._instance = instance
        self._contract = contract
        self._clock_offset = clock_offset
        self._now = now

    async def handle(self, task: PrefillTask) -> Handoff:
        """Compute one prompt. Cancelling the call aborts it in the engine.

        Raises: NoWorkerError for another contract, BadRequestError for a prompt that is not the one named, ExpiredError
        when nobody waits any more, EngineRequestError, EngineDeadError.
        """
        taken = self._now()
        if task.contract != self._contract:
            raise NoWorkerError(
                f"the task's contract is {task.contract}, this prefill worker's is {self._contract}: "
                "the workers do not serve the same model, settings and versions"
            )
        offset = self._clock_offset(task.decode_instance)
        late_s = taken - (task.expires + offset)
        if late_s > 0:
            raise ExpiredError(f"task {task.task_id} expired {late_s:.1f} s ago")
        if token_ids.prompt_hash(task.token_ids, task.cache_salt) != task.prompt_hash:
            raise BadRequestError(
                f"the prompt of task {task.task_id} does not have the hash it names"
            )
        result = await self._engine.prefill(
            task.task_id,
            token_ids.unpack(task.token_ids),
            cache_salt=task.cache_salt,
            priority=task.priority,
            prompt_logprobs=task.prompt_logprobs,
        )
        return Handoff(
            task_id=task.task_id,
            request_id=task.request_id,
            prefill_instance=self._instance,
            epoch=self._info.engine_id,
            contract=self._contract,
            prompt_hash=task.prompt_hash,
            expires=result.expires,
            kv_transfer_params=result.kv_transfer_params,
            prefill_queue_s=max(0.0, taken - (task.published + offset)),
            prefill_s=self._now() - taken,
            num_cached_token_ids=result.num_cached_token_ids,
            prompt_logprobs=result.prompt_logprobs,
        )
