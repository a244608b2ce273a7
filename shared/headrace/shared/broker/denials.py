"""Who waits for an answer that will not come, because the broker denies this process the subject."""

from __future__ import annotations

import asyncio
import re

_DENIED = re.compile(r'permissions violation for (publish|subscription) (?:to )?"([^"]+)"', re.I)


class Denials:
    """Tells the broker's denials, which come on their own, to whoever asked on that subject."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def expect(self, subject: str) -> asyncio.Future[None]:
        """Return what completes when the broker denies this process the subject; `forget` it at last."""
        denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # nats-py hands on the broker's words in lower case, so that is how subjects are compared.
        self._waiting.setdefault(subject.lower(), set()).add(denied)
        return denied

    def forget(self, subject: str, denied: asyncio.Future[None]) -> None:
        """Wait for it no more."""
        waiting = self._waiting[subject.lower()]
        waiting.discard(denied)
        if not waiting:
            del self._waiting[subject.lower()]

    def heard(self, text: str) -> bool:
        """Take one of the broker's errors; return whether it is a denial."""
        match = _DENIED.search(text)
        if match is None:
            return False
        for denied in self._waiting.get(match[2].lower(), ()):
            if not denied.done():
                denied.set_result(None)
        return True
