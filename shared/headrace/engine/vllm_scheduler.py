"""vLLM's scheduler, which looks before each step whose blocks have come, and for whom: loaded by vLLM, by name.

vLLM's own hears of an arrival with the output of a step that was launched after it, and in between launches one or
two steps without the request: two pauses of a millisecond when the engine has nothing else to do, two steps of others
when it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from headrace.engine.lane_steps import LaneSteps
from headrace.engine.nixl_connector import HeadraceNixlConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _LooksFirst(LaneSteps):
    """What is added to vLLM's scheduler, whichever that is."""

    # A GPU computes no more token IDs a second in longer steps than these, nor do a few CPU cores.
    num_bulk_step_token_ids = 128 if current_platform.is_cpu() else 2048

    def schedule(self: Any, *given: Any, **named: Any) -> Any:
        """Decide what the next step does."""
        if isinstance(self.connector, HeadraceNixlConnector):
            arrived = self.connector.arrived()
            if arrived:
                self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=arrived))
        return super().schedule(*given, **named)


class HeadraceScheduler(_LooksFirst, Scheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """For a step at a time."""

    sits_out = True


class HeadraceAsyncScheduler(_LooksFirst, AsyncScheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """For steps that are launched before the one before has ended."""

    sits_out = False


_OURS = {Scheduler: HeadraceScheduler, AsyncScheduler: HeadraceAsyncScheduler}


def look_first(config: VllmConfig) -> None:
    """Let an engine with this configuration have our scheduler, unless it is to have a special one."""
    vllms = config.scheduler_config.get_scheduler_cls()
    if vllms in _OURS:
        config.scheduler_config.scheduler_cls = f"{__name__}.{_OURS[vllms].__name__}"
