from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from nats.aio.client import Client
from nats.aio.msg import Msg

from headrace.shared.broker.direct import Inline
from headrace.shared.broker.replies import Replies


class Wire:
    """What `Replies` needs of nats-py's client."""

    def __init__(self) -> None:
        self.subscribed: list[str] = []
        self.callback: Inline | None = None

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def subscribe(self, subject: str, cb: Callable[..., Any]) -> None:
        self.subscribed.append(subject)
        assert isinstance(cb, Inline)
        self.callback = cb

    def answer(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        assert self.callback is not None
        self.callback.handle(
            Msg(cast("Client", self), subject=subject, data=payload, headers=headers)
        )


async def started() -> tuple[Wire, Replies]:
    wire = Wire()
    replies = Replies(cast("Client", wire))
    await replies.start()
    return wire, replies


async def test_each_answer_goes_to_its_own_request_over_one_subscription() -> None:
    wire, replies = await started()
    first, one = replies.expect()
    second, two = replies.expect()
    wire.answer(second, b"2")
    wire.answer(first, b"", {"Status": "503"})
    assert (await two).data == b"2"
    assert (await one).headers == {"Status": "503"}
    assert wire.subscribed == ["_INBOX.x.*"]


async def test_an_answer_is_taken_once_and_one_for_nobody_is_dropped() -> None:
    wire, replies = await started()
    subject, answer = replies.expect()
    wire.answer(subject, b"first")
    wire.answer(subject, b"second")
    assert (await answer).data == b"first"
    replies.forget(subject)
    wire.answer(subject, b"third")
    gone, left = replies.expect()
    left.cancel()
    wire.answer(gone, b"late")
    replies.forget(gone)
    assert replies.expect()[0] not in (subject, gone)
