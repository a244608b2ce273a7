"""Calls that end before the pipeline ends them."""

import asyncio
import json

import pytest

from headrace.gateway.pace import Pace


async def test_a_client_that_leaves_before_the_first_byte_cancels_its_request(gateway):
    for stream in (True, False):
        answer = gateway.post(stream=stream)
        await gateway.broker.until(
            lambda: gateway.handler.num_running == 1 and gateway.broker.submissions
        )
        answer.hang_up()
        await gateway.broker.until(lambda: gateway.broker.cancels)
        (cancel,) = gateway.broker.cancels
        assert cancel.request_id == gateway.broker.submissions[0].request_id
        assert cancel.reason == "the client disconnected"
        await answer.end()
        assert gateway.handler.recent.get("default", cancel.request_id).status == "cancelled"
        assert gateway.handler.num_running == 0
        gateway.broker.cancels.clear()
        gateway.broker.submissions.clear()


async def test_a_client_that_leaves_in_the_middle_cancels_its_request(gateway, make):
    answer = gateway.post(stream=True)
    await gateway.broker.until(lambda: gateway.broker.submissions)
    s = gateway.broker.submissions[0]
    gateway.broker.send(s, make.chunk(s, 0))
    await answer.until(lambda: answer.writes)
    answer.hang_up()
    await gateway.broker.until(lambda: gateway.broker.cancels)


async def test_a_client_that_leaves_after_the_end_cancels_nothing(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    answer = await gateway.post().end()
    answer.hang_up()
    await gateway.broker.until(lambda: not gateway.broker.handlers)
    assert gateway.broker.cancels == []


async def test_the_terminal_of_a_cancelled_request_is_awaited_and_its_timings_are_kept(
    gateway, make
):
    answer = gateway.post()
    await gateway.broker.until(lambda: gateway.broker.submissions)
    s = gateway.broker.submissions[0]
    answer.hang_up()
    await gateway.broker.until(lambda: gateway.broker.cancels)
    assert gateway.broker.handlers
    end = make.terminal(s, status="cancelled", http_status=499)
    gateway.broker.send(s, end)
    await gateway.broker.until(lambda: not gateway.broker.handlers)
    assert len(gateway.broker.cancels) == 1


async def test_a_server_that_ends_a_request_cancels_it(gateway):
    answer = gateway.post()
    await gateway.broker.until(lambda: gateway.broker.submissions)
    answer.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer.task
    await gateway.broker.until(lambda: gateway.broker.cancels)


class TestDeadline:
    @pytest.fixture
    def pace(self):
        return Pace(silence_s=1e6, grace_s=0.01, cancel_interval_s=1e6)

    async def test_a_request_that_nobody_ends_is_a_504(self, gateway):
        answer = await gateway.post(headers={"X-Request-Timeout": "1"}).end()
        assert answer.status == 504
        assert answer.error["type"] == "TimeoutError"
        await gateway.broker.until(lambda: gateway.broker.cancels)
        await gateway.broker.until(lambda: not gateway.broker.handlers)
        request_id = gateway.broker.submissions[0].request_id
        assert gateway.handler.recent.get("default", request_id).status == "expired"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_broker_that_hangs_past_the_deadline_is_a_504_as_well(self, gateway, stream):
        gateway.broker.hang = asyncio.Event()
        answer = gateway.post(stream=stream, headers={"X-Request-Timeout": "1"})
        await answer.end()
        assert answer.status == 504
        assert answer.error["type"] == "TimeoutError"
        await gateway.broker.until(lambda: gateway.broker.cancels)
        assert gateway.handler.num_running == 0

    async def test_a_stream_that_nobody_ends_gets_an_error_event(self, gateway, make):
        gateway.broker.script = lambda s: gateway.broker.send(s, make.chunk(s, 0))
        answer = gateway.post(stream=True, headers={"X-Request-Timeout": "1"})
        _, error, done = (await answer.end()).events
        assert json.loads(error)["error"]["code"] == 504
        assert done == "[DONE]"
        await gateway.broker.until(lambda: gateway.broker.cancels)

    async def test_a_client_that_does_not_read_is_dropped_at_the_deadline(self, gateway, make):
        answer = gateway.post(stream=True, headers={"X-Request-Timeout": "1"})
        blocked = asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.body":
                blocked.set()
                await asyncio.Event().wait()

        answer.send_to(send)
        await gateway.broker.until(lambda: gateway.broker.submissions)
        s = gateway.broker.submissions[0]
        gateway.broker.send(s, make.chunk(s, 0))
        await blocked.wait()
        await answer.end()
        await gateway.broker.until(lambda: gateway.broker.cancels)
        assert gateway.handler.recent.get("default", s.request_id).status == "expired"


class TestStoodStill:
    @pytest.fixture
    def pace(
        self,
    ):  # both ends of a call are due at once, as in a process that was stopped meanwhile
        return Pace(silence_s=1e6, grace_s=0.0, cancel_interval_s=1e6)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_process_that_stood_still_answers_504_all_the_same(self, gateway, stream):
        answer = await gateway.post(stream=stream, headers={"X-Request-Timeout": "1"}).end()
        assert answer.status == 504
        assert answer.error["type"] == "TimeoutError"
        await gateway.broker.until(lambda: gateway.broker.cancels)

    async def test_a_stream_that_had_begun_gets_its_error_event(self, gateway, make):
        gateway.broker.script = lambda s: gateway.broker.send(s, make.chunk(s, 0))
        answer = gateway.post(stream=True, headers={"X-Request-Timeout": "1"})
        _, error, done = (await answer.end()).events
        assert json.loads(error)["error"]["code"] == 504
        assert done == "[DONE]"


class TestRepeatedCancel:
    @pytest.fixture
    def pace(self):
        return Pace(silence_s=1e6, grace_s=1e6, cancel_interval_s=0.001)

    async def test_a_cancel_is_repeated_until_the_pipeline_ends_the_request(self, gateway, make):
        answer = gateway.post()
        await gateway.broker.until(lambda: gateway.broker.submissions)
        answer.hang_up()
        await gateway.broker.until(lambda: len(gateway.broker.cancels) > 2)
        s = gateway.broker.submissions[0]
        gateway.broker.send(s, make.terminal(s, status="cancelled", http_status=499))
        await gateway.broker.until(lambda: not gateway.broker.handlers)


async def test_draining_waits_for_running_requests_and_refuses_new_ones(gateway, make):
    running = gateway.post()
    await gateway.broker.until(lambda: gateway.broker.submissions)
    draining = asyncio.create_task(gateway.handler.drain(1e6))
    refused = await gateway.post().end()
    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert not draining.done()
    s = gateway.broker.submissions[0]
    gateway.broker.send(s, make.terminal(s, body=b"{}"))
    assert (await running.end()).status == 200
    await draining


async def test_draining_ends_what_takes_too_long(gateway):
    running = gateway.post()
    await gateway.broker.until(lambda: gateway.broker.submissions)
    await gateway.handler.drain(0.001)
    assert (await running.end()).status == 503
    await gateway.broker.until(lambda: gateway.broker.cancels)
