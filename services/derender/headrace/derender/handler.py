"""One stream: token IDs in, numbered answer messages out; knows no broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.derender.renderer import AnswerStream
from headrace.shared import prompt_logprobs, subjects, token_ids
from headrace.shared.broker.blobs import MAX_PAYLOAD_BYTES
from headrace.shared.errors import PayloadTooLargeError, RequestError, WireError
from headrace.shared.messages import Chunk, Job, OpenStream, StreamEnd, Terminal, Tokens
from headrace.shared.openai_errors import error_of
from headrace.shared.worker import terminal_of

RESYNC_S = 0.5
TOKEN_ID_S = 60e-6
"""CPU of a token ID, until the stream's own is known, and of a token ID of a whole answer at its close."""
ENTRY_S = 50e-6
"""CPU of an entry apart from its token IDs: its message."""
PROMPT_ID_S = 1e-6
"""CPU of the first token ID, a token ID of the prompt: parsers look into it, detokenizers decode it."""
OPEN_PROMPT_ID_S = 0.2e-6
"""CPU of opening an answer, a token ID of the prompt."""
MAX_BODY_BYTES = MAX_PAYLOAD_BYTES - 2**20
"""Bytes of a whole answer: its terminal adds a little to it, and has to be published."""
PROMPT_LOGPROB_S = 7e-6
"""CPU of an entry of a prompt's logprobs in the first feed of a choice, and less at the close of a whole answer."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one entry brought about."""

    chunk: Chunk | None = (
        None  #: to publish; None: nothing, or it was published for an earlier owner
    )
    stopped: int | None = None  #: a choice that a stop string has ended, and decode still generates


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """What some entries brought about."""

    steps: list[Step] = []  #: of those up to the gap or the error
    has_gap: bool = False  #: an entry is missing
    error: RequestError | WireError | None = None  #: the answer can't be made from these token IDs


def open_s(job: Job) -> float:
    """Return about how much CPU it takes to open this job's answer."""
    return OPEN_PROMPT_ID_S * _num_prompt_ids(job)


def _num_prompt_ids(job: Job) -> int:
    return sum(token_ids.count(prompt.token_ids) for prompt in job.prompts)


class StreamHandler:
    """Feeds one answer. Entries must come in order; a gap is reported, a repeated entry ignored.

    Not for two threads at once.
    """

    def __init__(
        self,
        job: Job,
        answer: AnswerStream,
        *,
        instance: str,
        claim: OpenStream | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`claim` is decode's; None: a first owner's, and nobody goes on with the answer."""
        self.job = job
        self.out = subjects.out(job.tenant, job.request_id)  #: where its messages go
        self.claim = claim or OpenStream(stream_id=0, attempt=1, decode_instance="", job=job)
        self.next_index = 0
        self._answer = answer
        self._instance = instance
        self._entries: list[Tokens] = []
        """Those fed since the last chunk, where chunks carry them."""
        self._active_at = clock()
        self._now = now
        self.opened = now()  #: when it was claimed (Unix seconds)
        self._clock = clock
        self._cpu = cpu
        self._cpu_s = 0.0
        self._token_id_s = TOKEN_ID_S
        self._num_fed = 0
        self._prompt_entries: dict[int, int] = {}
        """Entries of the prompt's logprobs that a choice gets in its first feed, where another choice brought them."""
        self._num_prompt_entries = 0
        self._seq = 0
        self._resync_at = 0.0
        self._stopped: set[int] = set()
        self._closed: tuple[Chunk | None, Terminal] | None = None

    def work_off_s(self, entries: Sequence[Tokens]) -> float:
        """Return about how much CPU these entries will take."""
        num = 0
        taken = 0.0 if self.next_index else PROMPT_ID_S * _num_prompt_ids(self.job)
        for entry in entries:
            num += token_ids.count(entry.token_ids)
            if self._prompt_entries or entry.prompt_logprobs is not None:
                taken += PROMPT_LOGPROB_S * self._prompt_entries_of(entry)
        return taken + len(entries) * ENTRY_S + num * self._token_id_s

    def work_off(self, entries: Sequence[Tokens]) -> Worked:
        """Feed those of these entries that are next, up to a gap or an error."""
        steps: list[Step] = []
        for entry in entries:
            if entry.index > self.next_index:
                return Worked(steps=steps, has_gap=True)
            if entry.index == self.next_index:
                try:
                    steps.append(self.feed(entry))
                except (RequestError, WireError) as error:
                    return Worked(steps=steps, error=error)
        return Worked(steps=steps)

    def feed(self, entry: Tokens) -> Step:
        """Take the next entry, whose index must be `next_index`.

        Raises: RequestError when the answer can't be made from these token IDs.
        """
        self.next_index += 1
        if self.claim.keeps_entries:
            self._entries.append(entry)
        self._active_at = self._clock()
        started = self._cpu()
        new_ids = token_ids.unpack(entry.token_ids)
        fed = self._answer.feed(
            entry.choice,
            new_ids,
            finish_reason=entry.finish_reason,
            stop_reason=entry.stop_reason,
            logprobs=entry.logprobs,
            prompt_logprobs=entry.prompt_logprobs,
        )
        taken = self._cpu() - started
        self._cpu_s += taken
        if new_ids:
            self._num_fed += len(new_ids)
            if not self._note_prompt_logprobs(entry):
                self._token_id_s = taken / len(new_ids)
        if fed.stopped:
            self._stopped.add(entry.choice)
        chunk = self._chunk(fed.chunks) if fed.chunks else None
        goes_on = entry.choice in self._stopped and entry.finish_reason is None
        return Step(chunk=chunk, stopped=entry.choice if goes_on else None)

    def _prompt_entries_of(self, entry: Tokens) -> int:
        """Return how many entries of its prompt's logprobs this feed works off."""
        table = entry.prompt_logprobs
        if table is None:
            return self._prompt_entries.get(entry.choice, 0)
        return prompt_logprobs.num_entries(table)

    def _note_prompt_logprobs(self, entry: Tokens) -> bool:
        """Count what this feed worked off of its prompt's logprobs; return whether it was anything."""
        if entry.prompt_logprobs is None and not self._prompt_entries:
            return False
        num = self._prompt_entries_of(entry)
        if entry.prompt_logprobs is not None:
            first = entry.choice - entry.choice % self.job.n
            self._prompt_entries |= dict.fromkeys(range(first, first + self.job.n), num)
        self._prompt_entries.pop(entry.choice, None)
        self._num_prompt_entries += num
        return num > 0

    def has_been_idle(self, for_s: float) -> bool:
        """Whether nothing came for so long, since the last entry or the last time that this was true."""
        now = self._clock()
        if now - self._active_at < for_s:
            return False
        self._active_at = now
        return True

    def wants_resync(self) -> bool:
        """Return whether to ask for the missing entries now: once a gap, and again after `RESYNC_S`."""
        now = self._clock()
        if now - self._resync_at < RESYNC_S:
            return False
        self._resync_at = now
        return True

    def close_s(self) -> float:
        """Return about how much CPU the close will take: a whole answer is parsed there."""
        of_prompt = self._num_prompt_entries * PROMPT_LOGPROB_S
        return 0.0 if self.job.stream else self._num_fed * TOKEN_ID_S + of_prompt

    def close(self, end: StreamEnd) -> tuple[Chunk | None, Terminal]:
        """Return the last chunk message, if any, and the terminal; the same again when asked again.

        Raises: RequestError when the answer can't be made.
        """
        if self._closed is None:
            self._closed = self._close(end)
        return self._closed

    def _close(self, end: StreamEnd) -> tuple[Chunk | None, Terminal]:
        if end.failure is not None:
            return None, self.fail(end, error_of(end.failure))
        started = self._cpu()
        closed = self._answer.close()
        self._cpu_s += self._cpu() - started
        if len(closed.body) > MAX_BODY_BYTES:
            raise PayloadTooLargeError(
                f"the answer has {len(closed.body):,} bytes, and at most {MAX_BODY_BYTES:,} can be sent: ask for "
                "fewer choices, token IDs or logprobs, or for a stream"
            )
        chunk = self._chunk(closed.chunks) if closed.chunks else None
        terminal = Terminal(
            request_id=self.job.request_id,
            seq=self._seq,
            status="ok",
            http_status=200,
            body=closed.body,
            epoch=self.claim.epoch,
            result=closed.result if self.job.is_kept else b"",
        )
        return chunk, self._stamped(terminal, end)

    def fail(self, end: StreamEnd, error: RequestError) -> Terminal:
        """Return the terminal of an answer that ends with `error`, decode's or derender's own."""
        terminal = terminal_of(self.job.request_id, error, seq=self._seq, epoch=self.claim.epoch)
        if end.failure is not None:
            terminal = msgspec.structs.replace(terminal, status=end.status)
        return self._stamped(terminal, end)

    def _chunk(self, chunks: tuple[bytes, ...]) -> Chunk | None:
        entries, self._entries = tuple(self._entries), []
        seq, self._seq = self._seq, self._seq + 1
        if seq < self.claim.first_seq:
            return None
        return Chunk(
            request_id=self.job.request_id,
            seq=seq,
            chunks=chunks,
            epoch=self.claim.epoch,
            entries=entries,
        )

    def _stamped(self, terminal: Terminal, end: StreamEnd) -> Terminal:
        accepted = end.timings.accepted
        timings = msgspec.structs.replace(
            end.timings,
            derender_s=self._cpu_s,
            total_s=None if accepted is None else self._now() - accepted,
            workers={**end.timings.workers, "derender": self._instance},
        )
        return msgspec.structs.replace(terminal, timings=timings)
