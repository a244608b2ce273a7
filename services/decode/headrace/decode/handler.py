"""One job: get its prompts computed, here or elsewhere, and generate every choice of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from headrace.decode.pending import AttemptFailedError
from headrace.decode.prefill_leg import PrefillLeg
from headrace.decode.prefix_index import PrefixIndex
from headrace.decode.stream import Stream
from headrace.engine.interface import DecodeEngine
from headrace.engine.priorities import engine_priority
from headrace.shared import metrics, token_ids
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
        self.taken = taken = now()
        self._accepted = job.timings.accepted if job.timings.accepted is not None else taken
        self.ready_at = taken  #: when the engine could have the prompt's KV cache, or compute it
        self.first: float | None = None  #: when the first token ID was there
        self.last = taken  #: when the last one was
        self.num_kv_descriptors: int | None = None  #: of the last pull; None: there was none
        self.kv_parts: dict[str, float] = {}  #: of the last pull, in seconds: post, wire, notice
        self._timings = msgspec.structs.replace(
            job.timings,
            decode_queue_s=max(0.0, taken - job.published),
            workers={**job.timings.workers, "decode": instance},
        )

    def add(self, **fields: Any) -> None:
        """Set fields of `Timings`."""
        self._timings = msgspec.structs.replace(self._timings, **fields)

    def prefilled_here(self) -> None:
        """Note that the prompt is computed by decode's own engine."""
        self.ready_at = self._now()
        self.add(prefill_mode="local")

    def prefilled_by(self, handoff: Handoff) -> None:
        """Note a remote prefill."""
        self.ready_at = self._now()
        self.add(
            prefill_mode="remote",
            prefill_queue_s=handoff.prefill_queue_s,
            prefill_s=handoff.prefill_s,
            workers={**self._timings.workers, "prefill": handoff.prefill_instance},
        )

    def token(self) -> None:
        """A token ID came out of the engine."""
        self.last = self._now()
        if self.first is None:
            self.first = self.last

    def read(self, num_output_token_ids: int) -> Timings:
        """Return all that is known now."""
        if self.first is not None and not self._is_continued:
            self.add(
                prefill_wait_s=self.ready_at - self.taken,
                first_step_s=max(0.0, self.first - self.ready_at),
                first_token_s=self.first - self._accepted,
                decode_s=self.last - self.first,
            )
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
        is_colocated: bool = False,
        max_attempts: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._leg = leg
        self._index = index
        self._threshold = local_prefill_threshold
        self._is_colocated = is_colocated
        self._max_attempts = max_attempts
        self._now = now
        self.num_local_prefills = 0
        self.num_generated_token_ids = 0

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
            why_here = self._why_here(prompt, failed, attempt)
            if why_here is None:
                try:
                    handoff = await self._leg.compute(job, prompt, failed)
                except NoWorkerError:
                    why_here = "no_worker"
                except (AttemptFailedError, HandoffError):
                    metrics.RETRIES.labels("prefill").inc()
                    continue
            if handoff is None:
                self.num_local_prefills += 1
                metrics.LOCAL_PREFILLS.labels(why_here).inc()
                watch.prefilled_here()
            else:
                metrics.REMOTE_PREFILLS.inc()
                watch.prefilled_by(handoff)
            try:
                await self._choices(job, number, prompt, handoff, stream, watch, attempt)
            except (PullFailedError, HandoffError):
                if handoff is not None:
                    failed.add(handoff.prefill_instance)
                    self._leg.not_pulled(handoff)
                metrics.RETRIES.labels("pull").inc()
                continue
            except NothingEmittedError:
                num_failed_here += 1
                if num_failed_here > MAX_RETRIES_HERE or attempt == self._max_attempts:
                    raise
                metrics.RETRIES.labels("engine").inc()
                continue
            if handoff is not None:
                self._leg.pulled(handoff)
            self._index.add(prompt.token_ids, prompt.cache_salt)
            return
        raise EngineRequestError(
            f"request {job.request_id} failed {self._max_attempts} times (decode.max_attempts)"
        )

    def _why_here(self, prompt: Prompt, failed: set[str], attempt: int) -> str | None:
        """Return why decode computes the prompt itself, in a word. None: a prefill worker is asked."""
        if self._is_colocated:
            return "colocated"
        length = token_ids.count(prompt.token_ids)
        cached = self._index.num_cached(prompt.token_ids, prompt.cache_salt)
        if prompt.prompt_logprobs is not None:
            cached = 0  # what is in the cache has none: all of the prompt is computed
        if length - cached < self._threshold:
            return "short"
        if attempt == self._max_attempts:
            return "last_attempt"
        return None if self._leg.has_worker(failed) else "no_worker"

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
            last: float | None = (
                None  #: when the choice's last output came, of the clock that costs least
            )
            outputs = self._engine.generate(
                f"{job.request_id}-{index}-{attempt}",
                ids,
                prompt.sampling_params,
                kv_transfer_params=kv_transfer_params,
                cache_salt=prompt.cache_salt,
                priority=engine_priority(job.lane, job.priority),
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
                            if last is not None or kv_transfer_params is None
                            else PullFailedError("the KV cache could not be pulled")
                        )
                    came = time.perf_counter()
                    if last is not None:
                        metrics.ITL.observe(came - last)
                    else:
                        _note_first(output, watch)
                        pulled.set()
                        if handoff is not None and i == 0:
                            output = msgspec.structs.replace(
                                output, prompt_logprobs=handoff.prompt_logprobs
                            )
                    last = came
                    self.num_generated_token_ids += len(output.token_ids)
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
            if handoff is not None and pulled.is_set():
                metrics.HANDOFFS_USED.inc()
            elif handoff is not None:
                metrics.not_pulled(prompt)
                # Also when the engine has it already: a cancel may come before it has begun to pull.
                self._leg.release(handoff)


def _note_first(output: Any, watch: Stopwatch) -> None:
    """Note what the first output of a sequence says of its prompt."""
    watch.add(num_cached_token_ids=output.num_cached_token_ids)
    if output.kv_transfer_s is not None:
        watch.add(kv_transfer_s=output.kv_transfer_s, kv_transfer_bytes=output.kv_transfer_bytes)
        watch.num_kv_descriptors = output.num_kv_descriptors
        watch.kv_parts = {
            "post": output.kv_post_s,
            "wire": output.kv_transfer_s - output.kv_post_s,
            "notice": output.kv_notice_s,
        }
        metrics.pulled(watch.kv_parts, output.kv_transfer_bytes)
