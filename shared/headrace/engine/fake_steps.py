"""The fake engine's steps: each gives every running sequence one token ID."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from headrace.engine.fake_text import FakeSamplingParams, answer
from headrace.engine.interface import DecodeOutput
from headrace.shared.messages import FinishReason

Logprobs = list[tuple[int, float, int | None]]


class Sequence:
    """One answer in the making. A slow reader gets several steps at once, as from vLLM."""

    def __init__(self, content: bytes, params: FakeSamplingParams, max_tokens: int) -> None:
        self._rest = answer(content, params, max_tokens)
        self._num_logprobs = params.logprobs
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | None = None
        self._error: Exception | None = None
        self._more = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the last token ID was made."""
        return self._finish_reason is not None

    def step(self) -> None:
        """Make one token ID."""
        token_id, self._finish_reason, self._stop_reason = next(self._rest)
        self._token_ids.append(token_id)
        self._more.set()

    def fail(self, error: Exception) -> None:
        """Make nothing more: whoever waits gets the error."""
        self._error = error
        self._more.set()

    async def next_output(self) -> DecodeOutput:
        """Return all that was made since the last call, at least one token ID. Raises: what `fail` was given."""
        await self._more.wait()
        if self._error is not None:
            raise self._error
        self._more.clear()
        token_ids, self._token_ids = self._token_ids, []
        return DecodeOutput(
            token_ids=token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs(token_ids),
        )

    def _logprobs(self, token_ids: list[int]) -> list[Logprobs] | None:
        if self._num_logprobs is None:
            return None
        others = range(1, self._num_logprobs)
        return [
            [(token_id, -0.25, 1), *((token_id ^ i, -2.0 - i, i + 1) for i in others)]
            for token_id in token_ids
        ]


class StepLoop:
    """Steps while anything runs, and rests else."""

    def __init__(
        self,
        step_s: float,
        before_step: Callable[[], Awaitable[None]],
        after_step: Callable[[int], None],
    ) -> None:
        """`before_step` may hang, or raise `EngineDeadError`; `after_step` is told how many token IDs there were."""
        self._step_s = step_s
        self._before_step = before_step
        self._after_step = after_step
        self._running: dict[Sequence, None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def running(self, sequence: Sequence) -> Iterator[None]:
        """Step the sequence until it has finished or the block is left."""
        self._running[sequence] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._loop())
        try:
            yield
        finally:
            self._running.pop(sequence, None)

    def fail(self, error: Exception) -> None:
        """Fail every running sequence. Costs a running one nothing: none of them waits for two things."""
        for sequence in self._running:
            sequence.fail(error)

    async def stop(self) -> None:
        """End the loop."""
        self._running.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _loop(self) -> None:
        while self._running:
            await asyncio.sleep(self._step_s)
            await self._before_step()
            stepped = list(self._running)
            for sequence in stepped:
                sequence.step()
                if sequence.finished:
                    del self._running[sequence]
            self._after_step(len(stepped))
