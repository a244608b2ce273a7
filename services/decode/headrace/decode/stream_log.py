"""What one request has emitted, so that any part of it can be sent again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from headrace.engine.interface import DecodeOutput
from headrace.shared import token_ids
from headrace.shared.messages import FinishReason, PromptLogprobs, Tokens

MAX_MERGED = 32
"""Token IDs of an entry that has waited for its frame through several steps."""


class StreamLog:
    """The entries of one stream in order; about 12 bytes an entry and 4 a token ID.

    Entries keep their cuts: a derender worker that is fed them again makes the same chunks with the same
    sequence numbers, so that the client sees each character once. What a step adds to an entry that nobody has
    been given yet is no cut: when derender lags, it gets the token IDs of several steps as one entry.
    """

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self._token_ids = array("I")
        self._ends = array("Q")
        self._choices = array("I")
        self._finishes: dict[int, tuple[FinishReason, int | str | None]] = {}
        self._logprobs: dict[int, list[list[tuple[int, float, int | None]]]] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._num_given = 0  # entries that somebody has seen, and that therefore stay as they are

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def num_token_ids(self) -> int:
        """Token IDs of all choices."""
        return len(self._token_ids)

    def add(self, choice: int, output: DecodeOutput) -> None:
        """Append what one step gave one choice."""
        index = len(self._ends)
        if self._goes_on(choice, output):
            index -= 1
            self._token_ids.extend(output.token_ids)
            self._ends[index] = len(self._token_ids)
        else:
            self._token_ids.extend(output.token_ids)
            self._ends.append(len(self._token_ids))
            self._choices.append(choice)
        if output.finish_reason is not None:
            self._finishes[index] = (output.finish_reason, output.stop_reason)
        if output.logprobs is not None:
            self._logprobs[index] = output.logprobs
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs

    def preset(self, entries: Iterable[Tokens]) -> None:
        """Begin with what another worker's log began with. Raises: MalformedMessageError."""
        for entry in entries:
            output = DecodeOutput(
                token_ids=token_ids.unpack(entry.token_ids),
                finish_reason=entry.finish_reason,
                stop_reason=entry.stop_reason,
                logprobs=entry.logprobs,
                prompt_logprobs=entry.prompt_logprobs,
            )
            self.add(entry.choice, output)
            self._num_given = len(self)

    def _goes_on(self, choice: int, output: DecodeOutput) -> bool:
        """Whether this is more of the last entry: plain token IDs of the same choice, and the entry not given yet."""
        last = len(self._ends) - 1
        if last < self._num_given or self._choices[last] != choice:
            return False
        if output.logprobs is not None or output.prompt_logprobs is not None:
            return False
        if last in self._finishes or last in self._logprobs or last in self._prompt_logprobs:
            return False
        begin = self._ends[last - 1] if last else 0
        return len(self._token_ids) - begin + len(output.token_ids) <= MAX_MERGED

    def entries(self, start: int) -> Iterator[Tokens]:
        """Yield the entries from `start` on, as they go on the wire."""
        begin = self._ends[start - 1] if start else 0
        for index in range(start, len(self._ends)):
            if index >= self._num_given:
                self._num_given = index + 1
            end = self._ends[index]
            finish_reason, stop_reason = self._finishes.get(index, (None, None))
            yield Tokens(
                stream_id=self.stream_id,
                index=index,
                choice=self._choices[index],
                token_ids=token_ids.pack(self._token_ids[begin:end]),
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                logprobs=self._logprobs.get(index),
                prompt_logprobs=self._prompt_logprobs.get(index),
            )
            begin = end
