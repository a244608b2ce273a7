"""Whose messages of one answer count, where its job had more than one owner. Both readers of `out` use it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.shared import subjects, wire
from headrace.shared.errors import MalformedMessageError, WireError
from headrace.shared.messages import Chunk, Takeover, Terminal

if TYPE_CHECKING:
    from headrace.shared.broker import Received

logger = logging.getLogger(__name__)


class Owners:
    """The takeovers of one answer that its reader knows of.

    A takeover is stored only behind the last message that its sender has read (`takeover.v1`). So the rule
    needs no order, which live messages of two publishers don't have: of an older epoch the chunks before the
    takeover's `seq` count, and nothing else. Every owner but the first has a takeover.
    """

    def __init__(self) -> None:
        self.epoch = 0  #: of the latest owner that was heard; 0: none was
        self._seqs: dict[int, int] = {}

    def take_over(self, takeover: Takeover) -> None:
        """Heed a takeover; a repeated one changes nothing."""
        self._seqs[takeover.epoch] = takeover.seq
        self.epoch = max(self.epoch, takeover.epoch)

    def has(self, takeover: Takeover) -> bool:
        """Whether this takeover is known."""
        return self._seqs.get(takeover.epoch) == takeover.seq

    def heard(self, message: Chunk | Terminal) -> None:
        """Note whose message it is that counts."""
        self.epoch = max(self.epoch, message.epoch)

    def is_void(self, message: Chunk | Terminal) -> bool:
        """Whether a later owner has made this message void."""
        if not self._seqs:  # as in nearly every answer, at each token ID
            return False
        if isinstance(message, Chunk):
            return self.voids(message.epoch, message.seq)
        if _stands_alone(message):
            return False
        return any(later > message.epoch for later in self._seqs)

    def voids(self, epoch: int, seq: int) -> bool:
        """Whether a chunk of this epoch and number is void."""
        return any(later > epoch and first <= seq for later, first in self._seqs.items())

    def is_stranger(self, message: Chunk | Terminal) -> bool:
        """Whether it can't be told yet if this message counts: a takeover was missed, and is in `HR_OUT`."""
        if isinstance(message, Terminal) and _stands_alone(message):
            return False
        if self.epoch in (0, message.epoch):
            return False
        return max(self.epoch, message.epoch) not in self._seqs


def message_of(received: Received) -> Chunk | Terminal | Takeover | None:
    """Return what was published on an `out` subject; None: it can't be read, and so is missing."""
    try:
        message = wire.decode(received.payload, Chunk, Terminal, Takeover)
        if isinstance(message, Takeover):
            _check_subject(received, subjects.out(message.tenant, message.request_id))
    except WireError as error:
        logger.warning(
            "unreadable answer on %s: %s",
            received.subject,
            error,
            extra={"action": "answer_unreadable", "subject": received.subject},
        )
        return None
    return message


def is_ended_by(received: Received, epoch: int) -> bool:
    """Whether this message of an `out` subject ends its request, also for the `epoch`-th owner (0: nobody's end)."""
    message = message_of(received)
    if not isinstance(message, Terminal):
        return False
    return _stands_alone(message) or message.epoch >= epoch


def announced(received: Received) -> Takeover | None:
    """Return the takeover that decode tells everybody of; None: it can't be read."""
    try:
        takeover = wire.decode(received.payload, Takeover)
        _check_subject(received, subjects.takeover(takeover.tenant, takeover.request_id))
    except WireError as error:
        logger.warning("unreadable takeover: %s", error, extra={"action": "takeover_unreadable"})
        return None
    return takeover


def _check_subject(received: Received, subject: str) -> None:
    """What a message says of itself counts only where the broker let its sender say it. Raises: WireError."""
    if received.subject != subject:
        raise MalformedMessageError(f"what belongs on {subject} came on {received.subject}")


def _stands_alone(terminal: Terminal) -> bool:
    """Whether it is an end with whatever went before: no owner's, or a whole answer in one piece."""
    return terminal.epoch == 0 or (terminal.status == "ok" and bool(terminal.body))
