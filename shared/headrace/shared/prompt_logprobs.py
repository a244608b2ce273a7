"""Logprobs of a prompt: how they are packed, what a right table is, and how many an answer may have."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from headrace.shared import token_ids as packed
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import PromptLogprobs

LOGPROB_BYTES = 4
MAX_ENTRIES = 400_000
"""Entries an answer. Each is about 110 bytes of its JSON, which has to fit into one payload of 64 MiB."""
_BIG_ENDIAN = sys.byteorder == "big"


def pack(
    token_ids: Sequence[int], logprobs: Iterable[float], ranks: Iterable[int], *, num_rows: int
) -> PromptLogprobs:
    """Return a table of `num_rows` rows from its entries, row by row, and the rank of each row's first one."""
    return PromptLogprobs(
        width=len(token_ids) // num_rows if num_rows else 0,
        token_ids=packed.pack(token_ids),
        logprobs=_swapped(array("f", logprobs)).tobytes(),
        ranks=packed.pack(ranks),
    )


def unpack_logprobs(table: PromptLogprobs) -> list[float]:
    """Return the logprobs, row by row; the table must be a right one (`problem`)."""
    numbers = array("f")
    numbers.frombytes(table.logprobs)
    return _swapped(numbers).tolist()


def num_entries(table: PromptLogprobs) -> int:
    """Return how many logprobs a table has."""
    return packed.count(table.token_ids)


def problem(table: PromptLogprobs | None, prompt_token_ids: Sequence[int]) -> str | None:
    """Return what is wrong with the table of a prompt for which logprobs were asked; None: nothing."""
    if table is None:
        return "logprobs of the prompt were asked for, and did not come"
    num_rows = len(prompt_token_ids) - 1
    sizes = [len(table.token_ids), len(table.logprobs), len(table.ranks)]
    expected = [
        num_rows * table.width * packed.TOKEN_ID_BYTES,
        num_rows * table.width * LOGPROB_BYTES,
    ]
    expected.append(num_rows * packed.TOKEN_ID_BYTES)
    if sizes != expected or (num_rows and table.width < 1):
        return (
            f"logprobs of a prompt of {len(prompt_token_ids)} token IDs, {table.width} a row, take "
            f"{expected} bytes (IDs, logprobs, ranks); got {sizes}"
        )
    if num_rows and packed.unpack(table.token_ids)[:: table.width] != list(prompt_token_ids[1:]):
        return "logprobs of another prompt: a row must start with the prompt's own token ID"
    return None


def check_size(
    lengths: Iterable[int], asked: int | None, *, num_choices: int, vocab_size: int
) -> None:
    """Check that an answer with the logprobs of prompts of these lengths can be sent.

    Raises: BadRequestError.
    """
    if asked is None:
        return
    width = 1 + (vocab_size if asked == -1 else asked)
    entries = sum(length - 1 for length in lengths) * width * num_choices
    if entries > MAX_ENTRIES:
        raise BadRequestError(
            f"prompt_logprobs {asked} would give {entries:,} entries (token IDs of the prompts, {width} entries "
            f"each, n={num_choices}); at most {MAX_ENTRIES:,} fit into an answer: ask for fewer, or shorten the "
            "prompt",
            param="prompt_logprobs",
        )


def _swapped(numbers: array[float]) -> array[float]:
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers
