"""Until when the blocks that a decode engine reads are certainly still those of the handoff.

A read that ends after its lease finds blocks which prefill may have given to another prompt: wrong text, a
normal finish reason, and a poisoned prefix cache. Neither vLLM nor NIXL notices. All times are of one
monotonic clock of the reader, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MARGIN_S = 0.25
"""A lease counts as over this long before its end: how well the two clocks are known, many times over."""


@dataclass(slots=True)
class _Extension:
    first: float  # the first heartbeat, which must have come before the handoff's own end
    until: float


@dataclass(slots=True)
class _Read:
    began: float
    ends: float | None = None  # of the lease; None: not posted yet
    is_told: bool = False


class LeaseBook:
    """The leases of one decode worker: what its heartbeats have extended, and what it reads.

    Heartbeats go out for requests that wait in the engine. Prefill heeds one only while the lease runs, so
    that one which came too late, or after a gap, extends nothing here either.
    """

    def __init__(self, extension_s: float, stalled_s: float) -> None:
        """`extension_s`: what one heartbeat gives; `stalled_s`: after which a read counts as stalled."""
        self._extension_s = extension_s
        self._stalled_s = stalled_s
        self._extensions: dict[str, _Extension] = {}  # by prefill's request ID
        self._reads: dict[str, _Read] = {}  # by decode's request ID

    def heartbeat(self, remote_request_ids: Collection[str], now: float) -> None:
        """Heartbeats went out for these, and all others that wait are gone."""
        wanted = set(remote_request_ids)
        self._extensions = {key: e for key, e in self._extensions.items() if key in wanted}
        for request_id in wanted:
            known = self._extensions.get(request_id)
            if known is None:
                self._extensions[request_id] = _Extension(now, now + self._extension_s)
            elif now < known.until - MARGIN_S:
                known.until = now + self._extension_s

    def begin(self, request_id: str, now: float) -> None:
        """The engine has asked for a request's blocks."""
        self._reads[request_id] = _Read(now)

    def may_read(
        self, request_id: str, remote_request_id: str, expiry: float | None, now: float
    ) -> bool:
        """Return whether the lease runs still; from here on no heartbeat extends it for this read.

        `expiry` is what the handoff says; None, as it does not say it, is no.
        """
        if expiry is None:
            return False
        ends = expiry
        extension = self._extensions.get(remote_request_id)
        if extension is not None and extension.first < expiry - MARGIN_S:
            ends = max(ends, extension.until)
        read = self._reads.setdefault(request_id, _Read(now))
        read.ends = ends
        return now < ends - MARGIN_S

    def is_late(self, request_id: str, now: float) -> bool:
        """Return whether a read that ends now ends after its lease."""
        read = self._reads.get(request_id)
        return read is not None and read.ends is not None and now >= read.ends - MARGIN_S

    def end(self, request_id: str) -> None:
        """The read has ended, however it did."""
        self._reads.pop(request_id, None)

    def stalled(self, now: float) -> list[str]:
        """Return the requests whose blocks take too long, each once."""
        found = []
        for request_id, read in self._reads.items():
            if not read.is_told and now - read.began >= self._stalled_s:
                read.is_told = True
                found.append(request_id)
        return found
