"""Which handoffs a decode engine has taken: each may be pulled once, and given back only if it was not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from headrace.shared.errors import HandoffError

MAX_REMEMBERED = 10_000  # a lease ends long before so many others were made


class UsedHandoffs:
    """The latest handoffs, by prefill engine and request."""

    def __init__(self) -> None:
        self._is_held: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def take(self, kv: Mapping[str, Any]) -> None:
        """Note that a handoff goes to the engine.

        Raises: HandoffError with reason `used` when it went there before.
        """
        key = _key(kv)
        if key in self._is_held:
            raise HandoffError(
                "used", f"handoff refused before the engine: {key[1]} was taken before"
            )
        self._is_held[key] = True
        if len(self._is_held) > MAX_REMEMBERED:
            self._is_held.popitem(last=False)

    def failed(self, kv: Mapping[str, Any]) -> None:
        """Nothing reads its blocks, and nothing will: they may be given back."""
        self._is_held[_key(kv)] = False

    def may_release(self, kv: Mapping[str, Any]) -> bool:
        """Return False for one that is being pulled, or was: giving it back would free blocks in use."""
        return not self._is_held.get(_key(kv), False)


def _key(kv: Mapping[str, Any]) -> tuple[str, str]:
    return kv["remote_engine_id"], kv["remote_request_id"]
