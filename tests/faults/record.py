"""What was seen of one request, from its sending to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .orders import Order

End = Literal["ok", "error", "cut", "left", "refused", "none"]
"""`cut`: the connection broke. `left`: the client went away on purpose. `refused`: it was not accepted.
`none`: nothing came, long after its deadline."""


@dataclass(slots=True)
class Record:
    """One attempt to have an order answered. Times are Unix seconds."""

    order: Order
    request_id: str
    sent: float
    gateway: str = ""  #: which one it went through; empty: straight over NATS
    accepted: float | None = None  #: first byte of a 200, or the publish ack. None: it was not
    deadline: float = 0.0
    ended: float | None = None
    end: End = "none"
    http_status: int | None = None  #: of the answer, or of the error in it
    message: str = ""  #: the error's
    num_events: int = 0  #: streamed: events before the end
    problems: list[str] = field(default_factory=list)  #: what was wrong with the answer itself
    workers: dict[str, str] = field(default_factory=dict)  #: who served it, as the terminal says
    result: bytes | None = None  #: the message on `res`, byte for byte

    @property
    def late_s(self) -> float:
        """By how many seconds it outlived its deadline."""
        return (self.ended or 0.0) - self.deadline
