from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from nats.aio.client import Client
from nats.aio.msg import Msg

from headrace.shared.broker.inboxes import MAX_FREE, Inbox, Inboxes


def message(subject: str, payload: bytes = b"") -> Msg:
    return Msg(cast("Client", None), subject=subject, data=payload)


class Subscriber:
    """What `Inboxes` needs of nats-py's client."""

    def __init__(self) -> None:
        self.subscribed: list[str] = []

    def new_inbox(self) -> str:
        return f"_INBOX.{len(self.subscribed)}"

    async def subscribe(self, subject: str, cb: Callable[..., Any]) -> None:
        self.subscribed.append(subject)


async def test_a_word_about_an_earlier_pull_is_not_taken_for_the_next_ones_answer() -> None:
    inbox, given_back = Inbox("_INBOX.a"), list[Msg]()
    first, one = inbox.expect(given_back.append)
    inbox.receive(message("hr.v1.req", b"1"))
    assert (await one).data == b"1"
    _, two = inbox.expect(given_back.append)
    inbox.receive(message(first, b"ended"))
    inbox.receive(message("hr.v1.req", b"2"))
    inbox.receive(message("hr.v1.req", b"one too many"))
    assert (await two).data == b"2"
    assert [late.data for late in given_back] == [b"one too many"]


async def test_a_pull_that_brings_nothing_is_ended_by_its_status() -> None:
    inbox = Inbox("_INBOX.a")
    subject, answer = inbox.expect(lambda late: None)
    inbox.receive(message(subject, b"408"))
    assert (await answer).data == b"408"


async def test_what_came_in_the_moment_in_which_its_caller_left_is_given_back_once() -> None:
    inbox, given_back = Inbox("_INBOX.a"), list[Msg]()
    subject, _ = inbox.expect(given_back.append)
    inbox.receive(message(subject, b"came"))
    inbox.leave()
    inbox.leave()
    inbox.receive(message(subject, b"later"))
    assert [late.data for late in given_back] == [b"came", b"later"]


async def test_nothing_is_given_back_where_nothing_came() -> None:
    inbox, given_back = Inbox("_INBOX.a"), list[Msg]()
    _, answer = inbox.expect(given_back.append)
    answer.cancel()
    inbox.leave()
    assert given_back == []


async def test_an_inbox_is_used_again_and_only_so_many_are_kept() -> None:
    subscriber = Subscriber()
    inboxes = Inboxes(cast("Client", subscriber))
    first = await inboxes.get("q")
    second = await inboxes.get("q")
    assert subscriber.subscribed == ["_INBOX.0.*", "_INBOX.1.*"]
    assert inboxes.put("q", first)
    assert await inboxes.get("another") not in (first, second)
    assert await inboxes.get("q") is first
    assert inboxes.put("q", first)
    assert inboxes.put("q", second)
    kept = [inboxes.put("q", Inbox(f"_INBOX.{number}")) for number in range(MAX_FREE - 1)]
    assert kept == [True] * (MAX_FREE - 2) + [False]
