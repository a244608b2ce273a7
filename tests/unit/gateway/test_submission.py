import pytest

from headrace.shared.errors import MalformedMessageError
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission, valid_traceparent

SUBJECT = "hr.v1.req.acme.m.rt"
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_a_submission_survives_the_wire():
    sent = Submission(
        request_id="r1",
        tenant="acme",
        slug="m",
        lane=Lane.STD,
        endpoint="completions",
        deadline=1_800_000_600.25,
        accepted=1_800_000_000.125,
        body=b'{"a": 1}',
        traceparent=TRACE,
        reply_to="hr.v1.reply.acme.here",
        reader="gateway-1",
        is_own_id=False,
    )
    headers = sent.to_headers() | {"Nats-Msg-Id": "r1"}
    assert Submission.from_received(sent.subject, headers, sent.body, now=5.0) == sent


@pytest.mark.parametrize(("lane", "seconds"), [("rt", 600), ("std", 3_600), ("bulk", 86_400)])
def test_a_body_with_an_id_is_all_that_another_service_needs(lane, seconds):
    subject = f"hr.v1.req.acme.m.{lane}"
    taken = Submission.from_received(subject, {"Nats-Msg-Id": "r1"}, b"{}", now=1_000.0)
    assert (taken.endpoint, taken.accepted) == ("chat.completions", 1_000.0)
    assert taken.deadline == 1_000.0 + seconds
    assert (taken.tenant, taken.slug, taken.lane) == ("acme", "m", Lane(lane))
    assert taken.traceparent is None
    assert taken.is_own_id


@pytest.mark.parametrize(
    ("subject", "headers", "word"),
    [
        (SUBJECT, {}, "Nats-Msg-Id"),
        (SUBJECT, None, "Nats-Msg-Id"),
        (SUBJECT, {"Nats-Msg-Id": "a.b"}, "Nats-Msg-Id"),
        (SUBJECT, {"Nats-Msg-Id": "r", "Hr-Endpoint": "images"}, "Hr-Endpoint"),
        (SUBJECT, {"Nats-Msg-Id": "r", "Hr-Deadline": "soon"}, "Hr-Deadline"),
        (SUBJECT, {"Nats-Msg-Id": "r", "Hr-Deadline": "inf"}, "Hr-Deadline"),
        (SUBJECT, {"Nats-Msg-Id": "r", "Hr-Accepted": "nan"}, "Hr-Accepted"),
        (SUBJECT, {"Nats-Msg-Id": "r", "Hr-Reader": "a.*"}, "Hr-Reader"),
        ("hr.v1.req.acme.m", {"Nats-Msg-Id": "r"}, "hr.v1.req"),
        ("hr.v1.req.acme.m.now", {"Nats-Msg-Id": "r"}, "lane"),
        ("hr.v1.req.*.m.rt", {"Nats-Msg-Id": "r"}, "tenant"),
    ],
)
def test_what_is_wrong_with_a_submission_is_named(subject, headers, word):
    with pytest.raises(MalformedMessageError, match=word):
        Submission.from_received(subject, headers, b"{}", now=0.0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "00-abc",
        TRACE.upper(),
        TRACE + "\n",
        TRACE.replace("a", "0"),
        TRACE.replace("b", "0"),
        "ff" + TRACE[2:],
    ],
)
def test_a_broken_trace_context_is_dropped(value):
    assert valid_traceparent(value) is None


def test_a_submission_can_not_be_changed():
    taken = Submission.from_received(SUBJECT, {"Nats-Msg-Id": "r1"}, b"{}", now=0.0)
    with pytest.raises(AttributeError):
        taken.body = b""


@pytest.mark.parametrize(
    ("headers", "body", "deadline"),
    [
        ({}, b'{"request_timeout": 5}', 1_005.0),
        ({}, b'{"request_timeout": null}', 1_060.0),
        ({}, b'{"messages": "request_timeout"}', 1_060.0),
        ({}, b'{"request_timeout": 5', 1_060.0),  # no JSON: render says so
        ({"Hr-Deadline": "1001"}, b'{"request_timeout": 5}', 1_001.0),
        ({"Hr-Accepted": "990"}, b'{"request_timeout": 5}', 995.0),
    ],
)
def test_a_header_names_the_deadline_or_the_body_or_the_lane(headers, body, deadline):
    taken = Submission.from_received(
        SUBJECT,
        {"Nats-Msg-Id": "r1", **headers},
        body,
        now=1_000.0,
        default_deadline_s={Lane.RT: 60.0},
    )
    assert taken.deadline == deadline


@pytest.mark.parametrize("value", [b"0", b"-1", b"86401", b'"5"', b"true", b"[]", b"9" * 400])
def test_a_timeout_in_the_body_that_is_none_is_named(value):
    with pytest.raises(MalformedMessageError, match="request_timeout"):
        Submission.from_received(
            SUBJECT, {"Nats-Msg-Id": "r1"}, b'{"request_timeout": %b}' % value, now=0.0
        )


@pytest.mark.parametrize("headers", [{"Hr-Deadline": "1061"}, {"Hr-Accepted": "9000"}])
def test_a_deadline_that_is_too_far_away_is_refused_by_the_name_of_its_setting(headers):
    def submitted(max_deadline_s):
        return Submission.from_received(
            SUBJECT,
            {"Nats-Msg-Id": "r1", **headers},
            b"{}",
            now=1_000.0,
            default_deadline_s={Lane.RT: 60.0},
            max_deadline_s=max_deadline_s,
        )

    assert submitted(8_060.0).deadline > 1_060.0
    with pytest.raises(MalformedMessageError, match=r"at most 60 s .*render\.max_deadline_s"):
        submitted(60.0)
