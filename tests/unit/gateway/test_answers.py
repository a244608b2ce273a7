"""What the client gets, by what the pipeline answers."""

import json

import msgspec
import pytest

from headrace.gateway.pace import Pace
from headrace.shared.messages import Timings

FAILURE = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


async def test_a_streamed_answer_is_sent_as_events_and_ends_with_done(gateway, make):
    def script(s):
        gateway.broker.send(s, make.chunk(s, 0, "a", "b"), make.chunk(s, 1, "c"))
        gateway.broker.send(s, make.terminal(s, 2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"] == gateway.broker.submissions[0].request_id
    assert answer.events == ['{"text":"a"}', '{"text":"b"}', '{"text":"c"}', "[DONE]"]
    assert answer.done
    assert gateway.broker.cancels == []
    await gateway.broker.until(lambda: not gateway.broker.handlers)


async def test_each_message_is_sent_as_it_comes_in_one_write(gateway, make):
    answer = gateway.post(stream=True)
    await gateway.broker.until(lambda: gateway.broker.submissions)
    s = gateway.broker.submissions[0]
    gateway.broker.send(s, make.chunk(s, 0, "a", "b"))
    await answer.until(lambda: len(answer.writes) == 1)
    assert answer.writes == [b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\n']
    gateway.broker.send(s, make.chunk(s, 1, "c"))
    await answer.until(lambda: len(answer.writes) == 2)
    gateway.broker.send(s, make.terminal(s, 2))
    await answer.end()
    assert answer.events[-1] == "[DONE]"


async def test_a_whole_answer_is_the_terminals_body(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b'{"id":"x"}'))
    answer = await gateway.post().end()
    assert (answer.status, answer.body) == (200, b'{"id":"x"}')
    assert answer.headers["content-type"] == "application/json"


async def test_the_clients_json_is_published_untouched(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    body = b'{ "model":"m",  "prompt": "\\u00e9", "stream":false }'
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await gateway.post(
        body,
        path="/v1/completions",
        headers={"X-Request-Id": "mine-1", "traceparent": trace, "X-Request-Timeout": "30"},
    ).end()
    (s,) = gateway.broker.submissions
    assert (s.body, s.request_id, s.endpoint) == (body, "mine-1", "completions")
    assert s.subject == "hr.v1.req.default.m.rt"
    assert s.deadline - s.accepted == pytest.approx(30)
    assert s.traceparent == trace


async def test_a_timeout_in_the_body_counts_where_no_header_names_one(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post(request_timeout=30).end()
    await gateway.post(request_timeout=30, headers={"X-Request-Timeout": "5"}).end()
    await gateway.post().end()
    timeouts = [s.deadline - s.accepted for s in gateway.broker.submissions]
    assert timeouts == pytest.approx([30, 5, 600])


async def test_a_submission_names_the_gateway_that_waits_for_its_answer(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post().end()
    assert gateway.broker.submissions[0].reader == "gateway-1"


@pytest.mark.parametrize(("headers", "is_own"), [({"X-Request-Id": "mine"}, True), ({}, False)])
async def test_the_pipeline_is_told_whose_the_request_id_is(gateway, make, headers, is_own):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post(headers=headers).end()
    assert gateway.broker.submissions[0].is_own_id is is_own


async def test_an_error_before_the_first_byte_has_its_own_status(gateway, make):
    for stream in (True, False):
        gateway.broker.script = lambda s: gateway.broker.send(
            s,
            make.terminal(s, status="error", http_status=429, body=FAILURE, retry_after_s=1.2),
        )
        answer = await gateway.post(stream=stream).end()
        assert (answer.status, answer.body) == (429, FAILURE)
        assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("http_status", "advice"),
    [(400, None), (429, None), (500, None), (501, "false"), (503, None), (504, "false")],
)
async def test_a_client_is_told_where_another_attempt_is_in_vain(
    gateway, make, http_status, advice
):
    """OpenAI's SDK tries 409, 429 and every 5xx again by itself, unless this header says otherwise."""
    gateway.broker.script = lambda s: gateway.broker.send(
        s, make.terminal(s, status="error", http_status=http_status, body=FAILURE)
    )
    answer = await gateway.post().end()
    assert answer.headers.get("x-should-retry") == advice


async def test_an_error_after_the_first_byte_is_an_event_and_then_done(gateway, make):
    def script(s):
        gateway.broker.send(s, make.chunk(s, 0))
        gateway.broker.send(s, make.terminal(s, 0, status="error", http_status=400, body=FAILURE))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.status == 200
    assert answer.events == ['{"text":"t0"}', FAILURE.decode(), "[DONE]"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_ok_terminal_with_nothing_in_it_is_never_a_200(gateway, make, stream):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s))
    answer = await gateway.post(stream=stream).end()
    assert answer.status == 500
    assert "empty answer" in answer.error["message"]


async def test_an_error_terminal_without_a_reason_is_still_an_error(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, status="error"))
    answer = await gateway.post().end()
    assert (answer.status, answer.error["code"]) == (500, 500)


async def test_messages_out_of_order_and_twice_are_sent_in_order_and_once(gateway, make):
    def script(s):
        chunks = [make.chunk(s, seq) for seq in (1, 0, 1, 2, 0)]
        gateway.broker.send(s, *chunks, make.terminal(s, 3), make.terminal(s, 3))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == ['{"text":"t0"}', '{"text":"t1"}', '{"text":"t2"}', "[DONE]"]
    assert gateway.broker.replays == []


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1, 2)])
async def test_lost_chunks_are_read_again_at_once(gateway, make, lost):
    def script(s):
        chunks = [make.chunk(s, seq) for seq in range(3)]
        gateway.broker.send(s, *chunks, make.terminal(s, 3), lose=lost)

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == ['{"text":"t0"}', '{"text":"t1"}', '{"text":"t2"}', "[DONE]"]
    assert gateway.broker.cancels == []


async def test_what_was_lost_while_the_connection_was_away_is_read_again(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(
        s, make.terminal(s, body=b'{"id":"x"}'), lose=(0,)
    )
    answer = gateway.post()
    await gateway.broker.until(lambda: gateway.broker.submissions)
    gateway.handler.reread_all()
    assert (await answer.end()).body == b'{"id":"x"}'


async def test_only_the_first_terminal_counts(gateway, make):
    failed = {"status": "error", "http_status": 400, "body": FAILURE}
    gateway.broker.script = lambda s: gateway.broker.send(
        s, make.terminal(s, **failed), make.terminal(s, body=b'{"id":"x"}')
    )
    answer = await gateway.post().end()
    assert (answer.status, answer.body) == (400, FAILURE)


class TestSilence:
    @pytest.fixture
    def pace(self):
        return Pace(silence_s=0.001, max_silence_s=0.004, grace_s=1e6, cancel_interval_s=1e6)

    async def test_a_lost_terminal_is_found_by_reading_again(self, gateway, make):
        gateway.broker.script = lambda s: gateway.broker.send(
            s, make.terminal(s, body=b'{"id":"x"}'), lose=(0,)
        )
        assert (await gateway.post().end()).body == b'{"id":"x"}'

    async def test_reading_again_goes_on_while_nothing_comes(self, gateway, make):
        answer = gateway.post()
        await gateway.broker.until(lambda: len(gateway.broker.replays) > 3)
        s = gateway.broker.submissions[0]
        gateway.broker.send(s, make.terminal(s, body=b"{}"))
        assert (await answer.end()).status == 200

    async def test_reading_in_vain_during_silence_does_not_count_against_a_later_gap(
        self, gateway, make
    ):
        answer = gateway.post(stream=True)
        await gateway.broker.until(lambda: len(gateway.broker.replays) > 5)
        s = gateway.broker.submissions[0]
        gateway.broker.send(s, make.chunk(s, 0), make.chunk(s, 1), make.terminal(s, 2), lose=(0,))
        assert (await answer.end()).events == ['{"text":"t0"}', '{"text":"t1"}', "[DONE]"]

    async def test_chunks_that_nobody_has_end_the_stream_with_an_error(self, gateway, make):
        def script(s):
            gateway.broker.send(s, make.chunk(s, 0), make.chunk(s, 3))
            gateway.broker.send(s, make.terminal(s, 4))

        gateway.broker.script = script
        answer = await gateway.post(stream=True).end()
        first, error, done = answer.events
        assert (first, done) == ('{"text":"t0"}', "[DONE]")
        assert "messages 1 to 2 of this answer were lost" in json.loads(error)["error"]["message"]

    async def test_a_failed_answer_with_a_gap_ends_with_its_own_error(self, gateway, make):
        def script(s):
            gateway.broker.send(s, make.chunk(s, 0))
            end = make.terminal(s, 5, status="error", http_status=400, body=FAILURE)
            gateway.broker.send(s, end)

        gateway.broker.script = script
        answer = await gateway.post(stream=True).end()
        assert answer.events == ['{"text":"t0"}', FAILURE.decode(), "[DONE]"]

    async def test_captured_messages_are_read_again_until_the_broker_can_be_read(
        self, gateway, make
    ):
        gateway.broker.num_failing_replays = 5  # more than a gap is read again in vain
        gateway.broker.script = lambda s: gateway.broker.send(
            s, make.chunk(s, 0), make.chunk(s, 1), make.terminal(s, 2), lose=(0,)
        )
        answer = await gateway.post(stream=True).end()
        assert answer.events == ['{"text":"t0"}', '{"text":"t1"}', "[DONE]"]


async def test_an_unreadable_message_is_skipped(gateway, make):
    def script(s):
        subject = f"hr.v1.out.default.{s.request_id}"
        broken = type("R", (), {"subject": subject, "payload": b"\xc1", "headers": {}})()
        gateway.broker.handlers[subject](broken)
        gateway.broker.send(s, make.terminal(s, body=b"{}"))

    gateway.broker.script = script
    assert (await gateway.post().end()).status == 200


async def test_the_timings_of_a_request_can_be_read_for_a_while(gateway, make):
    timings = Timings(prefill_mode="remote", total_s=1.5)
    gateway.broker.script = lambda s: gateway.broker.send(
        s, make.terminal(s, body=b"{}", timings=timings)
    )
    await gateway.post(headers={"X-Request-Id": "r1"}).end()
    record = gateway.handler.recent.get("default", "r1")
    assert (record.status, record.http_status, record.timings) == ("ok", 200, timings)
    assert record.first_byte_s == 0.0


async def test_one_info_line_says_how_a_request_went_and_holds_no_prompt(gateway, make, caplog):
    caplog.set_level("INFO", logger="headrace")
    timings = Timings(render_s=0.25)
    gateway.broker.script = lambda s: gateway.broker.send(
        s, make.terminal(s, body=b"{}", timings=timings)
    )
    await gateway.post({"model": "m", "prompt": "my secret"}).end()
    (line,) = [r for r in caplog.records if getattr(r, "action", "") == "request_done"]
    assert line.levelname == "INFO"
    assert line.timings["render_s"] == 0.25
    assert "my secret" not in str(vars(line))


async def test_chunks_of_another_owner_are_dropped_and_its_end_is_an_error(gateway, make):
    def script(s):
        gateway.broker.send(s, make.chunk(s, 0, "mine"))
        other = msgspec.structs.replace(make.chunk(s, 1, "another answer"), epoch=2)
        gateway.broker.send(s, other, make.terminal(s, 2, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    first, error, done = answer.events
    assert (first, done) == ('{"text":"mine"}', "[DONE]")
    assert "two workers answered" in json.loads(error)["error"]["message"]


async def test_an_answer_of_a_second_owner_alone_is_a_whole_answer(gateway, make):
    def script(s):
        first = msgspec.structs.replace(make.chunk(s, 0, "again"), epoch=2)
        gateway.broker.send(s, first, make.terminal(s, 1, epoch=2))

    gateway.broker.script = script
    answer = await gateway.post(stream=True).end()
    assert answer.events == ['{"text":"again"}', "[DONE]"]
