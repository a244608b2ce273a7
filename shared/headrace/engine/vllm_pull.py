"""One sequence's pull: its handoff is taken once, and given up when NIXL neither brings it nor says no."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any, Self

from headrace.engine.nixl_worker import PullCost
from headrace.engine.used_handoffs import UsedHandoffs
from headrace.engine.vllm_start import EngineProcess
from headrace.shared.errors import RequestError

logger = logging.getLogger(__name__)


class Pull:
    """Around one sequence in vLLM; without a handoff it does nothing.

    A stopped prefill process neither answers nor breaks off. A sequence that is given up is aborted; its blocks
    stay taken until NIXL says that nothing writes to them any more.
    """

    def __init__(
        self,
        process: EngineProcess,
        used: UsedHandoffs,
        kv_transfer_params: dict[str, Any] | None,
        sequence_id: str,
    ) -> None:
        self._process = process
        self._used = used
        self._kv = kv_transfer_params
        self._sequence_id = sequence_id
        self._is_waiting = kv_transfer_params is not None
        self._abort: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        """Raises: HandoffError for a handoff that was taken before."""
        if self._kv is not None:
            self._used.take(self._kv)
            self._process.recorder.watch_pull(self._sequence_id, self._give_up)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.recorder.unwatch_pull(self._sequence_id)
        if isinstance(error, RequestError):
            self._fail()  # any other was aborted, and vLLM itself sees to its end

    @property
    def is_given_up(self) -> bool:
        """Whether what vLLM says of the sequence from now on counts for nothing."""
        return self._abort is not None

    def come(self, finish_reason: str | None) -> PullCost | None:
        """Note an output; the first one after a pull gets what it has cost."""
        if finish_reason == "error":
            self._fail()
        if not self._is_waiting:
            return None
        self._is_waiting = False
        return self._process.recorder.take_pull(self._sequence_id)

    def _fail(self) -> None:
        """The handoff, if it was not pulled, may be given back from now on."""
        if self._kv is not None and self._is_waiting:
            self._used.failed(self._kv)
        self._is_waiting = False

    def _give_up(self) -> None:
        logger.warning(
            "the pull of %s takes too long (decode.pull_timeout_s), it is given up",
            self._sequence_id,
            extra={"action": "pull_stalled"},
        )
        self._abort = asyncio.create_task(self._process.engine.abort(self._sequence_id))
