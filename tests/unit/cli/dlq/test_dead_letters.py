from __future__ import annotations

import pytest

from headrace.cli.dlq import run as dlq
from headrace.cli.dlq.letters import read
from headrace.cli.dlq.replay import renewed
from headrace.cli.main import build_parser, main
from headrace.shared import subjects, token_ids, wire
from headrace.shared.broker import Kept, Received
from headrace.shared.messages import DeadLetter, Job, PrefillTask, Prompt, Timings
from headrace.shared.subjects import Lane, Role

SECRET = "what nobody else may read"
JOB = Job(
    request_id="r1",
    tenant="acme",
    model="m",
    lane=Lane.STD,
    endpoint="completions",
    created=0,
    published=110.0,
    deadline=400.0,
    contract="c0ffee00",
    body=SECRET.encode(),
    stream=False,
    prompts=(Prompt(token_ids=token_ids.pack([71, 72]), sampling_params=SECRET.encode()),),
    reader="gateway-1",
    timings=Timings(accepted=100.0, render_s=2.0),
)


def kept(subject: str, payload: bytes, stage: Role = Role.DECODE, **headers: str) -> Kept:
    letter = DeadLetter(
        stage=stage,
        reason="broken",
        subject=subject,
        headers=headers,
        payload=payload,
        num_delivered=5,
    )
    return kept_as_is(wire.encode(letter), stage)


def kept_as_is(payload: bytes, stage: Role = Role.DECODE) -> Kept:
    received = Received(subjects.dead_letter(stage, "m"), payload, {}, "")
    return Kept(sequence=7, stored=1_000.0, received=received)


def test_a_letter_says_who_put_what_aside_and_why() -> None:
    subject = subjects.job("m_c0ffee00", "acme", Lane.STD)
    row = read(kept(subject, wire.encode(JOB))).row()
    assert row == {
        "id": 7,
        "time": "1970-01-01T00:16:40.000+00:00",
        "stage": "decode",
        "subject": subject,
        "reason": "broken",
        "num_delivered": 5,
        "request_id": "r1",
        "size_bytes": len(wire.encode(JOB)),
    }


def test_details_hold_what_the_caller_wrote_only_on_demand() -> None:
    letter = read(kept(subjects.job("m_c0ffee00", "acme", Lane.STD), wire.encode(JOB)))
    shown = letter.details(with_payload=False)
    assert SECRET not in str(shown)
    assert "71" not in str(shown["request"])
    assert shown["request"]["num_prompt_token_ids"] == [2]
    assert letter.details(with_payload=True)["payload"] == {
        "body": SECRET,
        "prompt_token_ids": [[71, 72]],
    }


def test_a_submission_and_a_prefill_task_are_read_as_well() -> None:
    submission = read(
        kept(subjects.req("acme", "m", Lane.BULK), b"{}", Role.RENDER, **{"Nats-Msg-Id": "acme.r2"})
    )
    assert submission.request is None  # a dot in its request ID: that is why it is here
    named = {"Hr-Request-Id": "r2"}
    submission = read(kept(subjects.req("acme", "m", Lane.BULK), b"{}", Role.RENDER, **named))
    assert submission.row()["request_id"] == "r2"
    assert submission.details(with_payload=False)["request"]["lane"] == "bulk"
    task = PrefillTask(
        task_id="t",
        request_id="r3",
        tenant="acme",
        decode_instance="decode-1",
        published=1.0,
        expires=2.0,
        contract="c0ffee00",
        token_ids=b"\1\0\0\0\2",  # half an ID too many
        prompt_hash="",
    )
    letter = read(kept(subjects.prefill("m_c0ffee00", Lane.RT), wire.encode(task), Role.PREFILL))
    assert letter.row()["request_id"] == "r3"
    payload = letter.details(with_payload=True)["payload"]
    assert payload == {"prompt_token_ids": [[1]]}


@pytest.mark.parametrize("payload", [b"", b"rubbish", b"\x81\xa1t\xabjob.v9"])
def test_what_can_not_be_read_is_listed_all_the_same(payload: bytes) -> None:
    unread = read(kept_as_is(payload))
    assert unread.row()["reason"].startswith("unreadable: ")
    inside = read(kept(subjects.job("m_c0ffee00", "acme", Lane.RT), payload))
    assert inside.row()["request_id"] is None
    assert inside.row()["reason"] == "broken"
    for letter in (unread, inside):
        letter.details(with_payload=True)


def test_a_replayed_job_has_as_much_time_as_it_had_and_no_reader_that_is_gone() -> None:
    again = renewed(JOB, 5_000.0)
    assert (again.published, again.deadline, again.timings.accepted) == (5_000.0, 5_300.0, 5_000.0)
    assert again.reader is None
    assert again.body == JOB.body
    assert again.timings.render_s == 2.0


def test_columns_stand_under_one_another_and_do_nothing_to_the_terminal() -> None:
    assert dlq.table([["ID", "REASON"], [7, "\x1b[2Jgone\nx"], [10, None]]) == [
        "ID  REASON",
        "7   \\x1b[2Jgone\\x0ax",
        "10  -",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["dlq"],
        ["dlq", "show"],
        ["dlq", "show", "0"],
        ["dlq", "drop", "x"],
        ["dlq", "list", "--stage", "gateway"],
        ["top", "--once", "--json"],
        ["top", "--interval", "0"],
    ],
)
def test_a_wrong_argument_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(arguments)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_top_wants_a_terminal_or_a_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "--once or --json" in capsys.readouterr().err
