"""What the client gets of an answer that had more than one owner."""

import json

import msgspec
import pytest

from headrace.gateway.pace import Pace
from headrace.shared.messages import Takeover


def of(epoch, message):
    return msgspec.structs.replace(message, epoch=epoch)


def takeover(s, epoch, seq):
    return Takeover(
        request_id=s.request_id, tenant="default", epoch=epoch, seq=seq, decode_instance="decode-2"
    )


def error_of(answer):
    *_, error, done = answer.events
    assert done == "[DONE]"
    return json.loads(error)["error"]["message"]


async def test_the_next_owner_goes_on_and_its_remade_messages_are_dropped(gateway, make):
    def script(s):
        gateway.broker.send(s, make.chunk(s, 0), make.chunk(s, 1), takeover(s, 2, 2))
        gateway.broker.send(s, *(of(2, make.chunk(s, seq)) for seq in range(4)))
        gateway.broker.send(s, make.terminal(s, 4, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == [*(f'{{"text":"t{seq}"}}' for seq in range(4)), "[DONE]"]


async def test_what_the_older_owner_still_says_is_dropped_its_end_too(gateway, make):
    def script(s):
        gateway.broker.send(s, make.chunk(s, 0), takeover(s, 2, 1), make.chunk(s, 1, "void"))
        gateway.broker.send(s, make.terminal(s, 2, epoch=1))
        gateway.broker.send(s, make.terminal(s, 2, epoch=1, status="error", http_status=500))
        gateway.broker.send(s, of(2, make.chunk(s, 1, "new")), make.terminal(s, 2, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == ['{"text":"t0"}', '{"text":"new"}', "[DONE]"]


async def test_a_void_message_that_waits_behind_a_gap_is_dropped_with_the_end_that_it_had(
    gateway, make
):
    """The takeover comes after what it voids, as messages of two publishers may."""

    def script(s):
        gateway.broker.send(s, make.chunk(s, 0), lose=(0,))
        gateway.broker.send(s, make.chunk(s, 1, "void"), make.terminal(s, 2, epoch=1))
        gateway.broker.send(s, takeover(s, 2, 1))
        gateway.broker.send(s, of(2, make.chunk(s, 1, "new")), make.terminal(s, 2, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == ['{"text":"t0"}', '{"text":"new"}', "[DONE]"]


async def test_a_void_message_that_the_client_has_got_ends_the_answer_with_an_error(gateway, make):
    answer = gateway.post(stream=True)
    await gateway.broker.until(lambda: gateway.broker.submissions)
    s = gateway.broker.submissions[0]
    gateway.broker.send(s, make.chunk(s, 0), make.chunk(s, 1, "void"))
    await answer.until(lambda: answer.writes)
    gateway.broker.send(s, takeover(s, 2, 1), of(2, make.chunk(s, 1, "new")))
    gateway.broker.send(s, make.terminal(s, 2, epoch=2))
    await answer.end()
    assert "new" not in "".join(answer.events)
    assert "two workers answered" in error_of(answer)


async def test_a_takeover_that_was_lost_is_read_again_when_its_owner_is_heard(gateway, make):
    def script(s):
        chunks = [of(2, make.chunk(s, seq)) for seq in (1, 2)]
        gateway.broker.send(s, make.chunk(s, 0), takeover(s, 2, 1), *chunks, lose=(1,))
        gateway.broker.send(s, make.terminal(s, 3, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == [*(f'{{"text":"t{seq}"}}' for seq in range(3)), "[DONE]"]


async def test_a_takeover_that_the_broker_refused_to_store_voids_nothing(gateway, make):
    """It was sent before its sender had read the last message; the broker delivers it all the same."""

    def script(s):
        gateway.broker.send(s, make.chunk(s, 0), make.chunk(s, 1))
        gateway.broker.refuse_to_store(s, takeover(s, 2, 1))
        gateway.broker.send(s, make.chunk(s, 2), takeover(s, 2, 3))
        gateway.broker.send(s, of(2, make.chunk(s, 3)), make.terminal(s, 4, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == [*(f'{{"text":"t{seq}"}}' for seq in range(4)), "[DONE]"]


async def test_an_end_behind_a_refused_takeover_is_the_end(gateway, make):
    """The new owner came a moment too late, and found that."""

    def script(s):
        gateway.broker.send(s, make.chunk(s, 0), make.terminal(s, 1, epoch=1), lose=(1,))
        gateway.broker.refuse_to_store(s, takeover(s, 2, 1))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == ['{"text":"t0"}', "[DONE]"]


async def test_a_whole_answer_of_an_older_owner_is_an_answer(gateway, make):
    def script(s):
        gateway.broker.send(s, takeover(s, 2, 0), make.terminal(s, body=b'{"id":1}', epoch=1))
        gateway.broker.send(s, make.terminal(s, body=b'{"id":2}', epoch=2))

    gateway.broker.script = script
    answer = await gateway.post().end()
    assert (answer.status, answer.body) == (200, b'{"id":1}')


class TestAlone:
    @pytest.fixture
    def pace(self):
        return Pace(silence_s=0.001, max_silence_s=0.004, grace_s=1e6, cancel_interval_s=1e6)

    async def test_an_error_of_an_owner_that_nobody_tells_of_ends_the_answer(self, gateway, make):
        def script(s):
            gateway.broker.send(s, make.chunk(s, 0))
            body = b'{"error":{"message":"late","type":"e","param":null,"code":504}}'
            failed = {"status": "expired", "http_status": 504, "body": body}
            gateway.broker.send(s, make.terminal(s, 1, epoch=2, **failed))

        gateway.broker.script = script
        answer = await gateway.post(stream=True).end()
        assert error_of(answer) == "late"
