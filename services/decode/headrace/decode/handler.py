"""One job: get its prompts computed, here or elsewhere, and generate every choice of its answer."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from headrace.decode.pending import AttemptFailedError
from headrace.decode.prefill_leg import PrefillLeg
from headrace.decode.prefix_index import PrefixIndex
from headrace.decode.priority import engine_priority
from headrace.decode.stream import Stream
from headrace.engine.interface import DecodeEngine
from headrace.shared import token_ids
from headrace.shared.errors import EngineRequestError, HandoffError, NoWorkerError, RequestError
from headrace.shared.intake import all_or_none
from headrace.shared.messages import Handoff, Job, Prompt, Timings

MAX_RETRIES_HERE = 1
"""Of a prompt that this worker's own engine failed to compute."""


class PullFailedError(EngineRequestError):
    """The KV cache could not be pulled; nothing was emitted, so the prompt may be computed again."""


class NothingEmittedError(EngineRequestError):
    """The engine failed this prompt before any of its choices had a token ID."""


class Stopwatch:
    """Collects the timings of one job while it runs."""

    def __init__(
        self, job: Job, *, instance: str, now: Callable[[], float], is_continued: bool = False
    ) -> None:
        """`is_continued`: another worker had the first token ID; when, nobody knows any more."""
        self._now = now
        self._is_continued = is_continued
        taken = now()
        self._accepted = job.timings.accepted if job.timings.accepted is not None else taken
        self._first: float | None = None
        self._last = taken
        self._timings = msgspec.structs.replace(
            job.timings,
            decode_queue_s=max(0.0, taken - job.published),
            workers={**job.timings.workers, "decode": instance},
        )

    def add(self, **fields: Any) -> None:
        """Set fields of `Timings`."""
        self._timings = msgspec.structs.replace(self._timings, **fields)

    def prefilled_by(self, handoff: Handoff) -> None:
        """Note a remote prefill."""
        self.add(
            prefill_mode="remote",
            prefill_queue_s=handoff.prefill_queue_s,
            prefill_s=handoff.prefill_s,
            workers={**self._timings.workers, "prefill": handoff.prefill_instance},
        )

    def token(self) -> None:
        """A token ID came out of the engine."""
        self._last = self._now()
        if self._first is None:
            self._first = self._last

    def read(self, num_output_token_ids: int) -> Timings:
        """Return all that is known now."""
        if self._first is not None and not self._is_continued:
            self.add(first_token_s=self._first - self._accepted, decode_s=self._last - self._first)
        self.add(num_output_token_ids=num_output_token_ids)
        return self._timings


class DecodeHandler:
    """Generates the answer of a job into its stream."""

    def __init__(
        self,
        engine: DecodeEngine,
        leg: PrefillLeg,
        index: PrefixIndex,
        *,
        local_prefill_threshold: float,
        max_attempts: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._leg = leg
        self._index = index
        self._threshold = local_prefill_threshold
        self._max_attempts = max_attempts
        self._now = now
        self.num_local_prefills = 0

    async def generate(self, job: Job, stream: Stream, watch: Stopwatch) -> None:
        """Generate every choice. Cancelling the call aborts what is in the engines.

        Raises: RequestError for this request, EngineDeadError for the worker.
        """
        await all_or_none(
            self._prompt(job, number, prompt, stream, watch)
            for number, prompt in enumerate(job.prompts)
        )

    async def _prompt(
        self, job: Job, number: int, prompt: Prompt, stream: Stream, watch: Stopwatch
    ) -> None:
        """Get the prompt computed, and its choices generated, in at most `decode.max_attempts` attempts.

        A prefill worker that failed this prompt is not asked again; the last attempt computes it here. Nothing is
        tried again once a choice has a token ID.
        """
        failed: set[str] = set()  # prefill workers
        num_failed_here = 0
        for attempt in range(1, self._max_attempts + 1):
            handoff = None
            if attempt < self._max_attempts and self._wants_remote(prompt, failed):
                try:
                    handoff = await self._leg.compute(job, prompt, failed)
                except NoWorkerError:
                    pass  # nobody is left to ask: computed here
                except (AttemptFailedError, HandoffError):
                    continue
            if handoff is None:
                self.num_local_prefills += 1
                watch.add(prefill_mode="local")
            else:
                watch.prefilled_by(handoff)
            try:
                await self._choices(job, number, prompt, handoff, stream, watch, attempt)
            except (PullFailedError, HandoffError):
                if handoff is not None:
                    failed.add(handoff.prefill_instance)
                    self._leg.not_pulled(handoff)
                continue
            except NothingEmittedError:
                num_failed_here += 1
                if num_failed_here > MAX_RETRIES_HERE or attempt == self._max_attempts:
                    raise
                continue
            if handoff is not None:
                self._leg.pulled(handoff)
            self._index.add(prompt.token_ids, prompt.cache_salt)
            return
        raise EngineRequestError(
            f"request {job.request_id} failed {self._max_attempts} times (decode.max_attempts)"
        )

    def _wants_remote(self, prompt: Prompt, failed: set[str]) -> bool:
        length = token_ids.count(prompt.token_ids)
        cached = self._index.num_cached(prompt.token_ids, prompt.cache_salt)
        if prompt.prompt_logprobs is not None:
            cached = 0  # what is in the cache has none: all of the prompt is computed
        return length - cached >= self._threshold and self._leg.has_worker(failed)

    async def _choices(
        self,
        job: Job,
        number: int,
        prompt: Prompt,
        handoff: Handoff | None,
        stream: Stream,
        watch: Stopwatch,
        attempt: int,
    ) -> None:
        """Generate the n choices of a prompt: the first pulls the KV, the others find it in the cache."""
        ids = token_ids.unpack(prompt.token_ids)
        first_token = asyncio.Event()
        pulled = asyncio.Event()

        async def choice(i: int, kv_transfer_params: dict[str, Any] | None) -> None:
            index = number * job.n + i
            stream.running(index, asyncio.current_task())
            try:
                if i > 0:
                    await first_token.wait()
                if not stream.is_stopped(index):
                    await generated(i, index, kv_transfer_params)
            except asyncio.CancelledError:
                if not stream.is_stopped(index):
                    raise
            finally:
                if stream.is_stopped(index):  # the others must not wait for it
                    first_token.set()

        async def generated(i: int, index: int, kv_transfer_params: dict[str, Any] | None) -> None:
            emitted = False
            outputs = self._engine.generate(
                f"{job.request_id}-{index}-{attempt}",
                ids,
                prompt.sampling_params,
                kv_transfer_params=kv_transfer_params,
                cache_salt=prompt.cache_salt,
                priority=engine_priority(job),
                seed_offset=i,
                reasoning_ended=prompt.reasoning_ended,
                reasoning_parser_kwargs=prompt.reasoning_parser_kwargs,
                prompt_logprobs=prompt.prompt_logprobs if handoff is None and i == 0 else None,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finish_reason == "error":
                        raise (
                            EngineRequestError("the engine failed this request")
                            if emitted or kv_transfer_params is None
                            else PullFailedError("the KV cache could not be pulled")
                        )
                    if not emitted:
                        _note_first(output, watch)
                        emitted = True
                        pulled.set()
                        if handoff is not None and i == 0:
                            output = dataclasses.replace(
                                output, prompt_logprobs=handoff.prompt_logprobs
                            )
                    watch.token()
                    stream.add(index, output)
                    first_token.set()

        def started(i: int) -> Coroutine[Any, Any, None]:
            return choice(i, handoff.kv_transfer_params if handoff and i == 0 else None)

        try:
            await all_or_none(started(i) for i in range(job.n))
        except PullFailedError:
            raise
        except RequestError as error:
            if first_token.is_set() or not error.retryable:
                raise
            raise NothingEmittedError(str(error)) from error
        finally:
            if handoff is not None and not pulled.is_set():
                # Also when the engine has it already: a cancel may come before it has begun to pull.
                self._leg.release(handoff)


def _note_first(output: Any, watch: Stopwatch) -> None:
    """Note what the first output of a sequence says of its prompt."""
    watch.add(num_cached_token_ids=output.num_cached_token_ids)
    if output.kv_transfer_s is not None:
        watch.add(kv_transfer_s=output.kv_transfer_s, kv_transfer_bytes=output.kv_transfer_bytes)
