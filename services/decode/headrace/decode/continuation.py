"""Going on with an answer that another decode worker began, where that is exact. Knows no broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.engine.interface import DecodeEngine
from headrace.shared import token_ids
from headrace.shared.messages import Chunk, Job, Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What was emitted of an answer, and what is left to generate."""

    entries: tuple[Tokens, ...]  #: what the chunks that count were made of, in its cuts
    first_seq: int  #: how many chunks there are
    rest: (
        Job | None
    )  #: the job as the engine gets it: those IDs behind the prompt. None: all was generated


def may_continue(job: Job, engine: DecodeEngine) -> bool:
    """Whether another worker could go on with this job's answer: what its chunks must carry depends on it.

    One choice of one prompt. A whole answer is not continued: nobody has seen a part of it, so it starts anew.
    Raises: BadRequestError for parameters that the engine can't read.
    """
    return (
        job.stream
        and job.n == 1
        and len(job.prompts) == 1
        and job.prompts[0].prompt_logprobs is None
        and engine.continuation(job.prompts[0].sampling_params, 0) is not None
    )


def is_whole(chunks: Sequence[Chunk]) -> bool:
    """Whether these chunks, in order, begin with the first one of their answer and miss none between."""
    return all(chunk.seq == seq for seq, chunk in enumerate(chunks))


def continued(job: Job, chunks: Sequence[Chunk], engine: DecodeEngine) -> Continuation | None:
    """Return how to go on behind these chunks, or None where that is not exact.

    `chunks` are the messages of the answer that count, in order. Raises: BadRequestError as `may_continue`.
    """
    entries = tuple(entry for chunk in chunks for entry in chunk.entries)
    # Of all of them the last one may be the usage.
    have_entries = all(chunk.entries for chunk in chunks[:-1])
    is_in_order = all(entry.index == index for index, entry in enumerate(entries))
    if not (
        entries and is_whole(chunks) and have_entries and is_in_order and may_continue(job, engine)
    ):
        return None
    if entries[-1].finish_reason is not None:
        return Continuation(entries=entries, first_seq=len(chunks), rest=None)
    emitted = b"".join(entry.token_ids for entry in entries)
    prompt = job.prompts[0]
    params = engine.continuation(prompt.sampling_params, token_ids.count(emitted))
    if params is None:
        return None
    rest = msgspec.structs.replace(
        prompt, token_ids=prompt.token_ids + emitted, sampling_params=params
    )
    return Continuation(
        entries=entries,
        first_seq=len(chunks),
        rest=msgspec.structs.replace(job, prompts=(rest,)),
    )
