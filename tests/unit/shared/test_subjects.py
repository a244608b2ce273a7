"""Subjects: what a user names can never reach another user's messages."""

from __future__ import annotations

import pytest

from headrace.shared import subjects
from headrace.shared.errors import MalformedMessageError
from headrace.shared.subjects import Lane


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "é", "x" * 129, "a\nb"])
def test_a_name_that_would_change_the_subject_is_refused(bad: str) -> None:
    with pytest.raises(MalformedMessageError, match="request_id must be"):
        subjects.out("default", bad)
    with pytest.raises(MalformedMessageError, match="tenant must be"):
        subjects.req(bad, "m", Lane.RT)
    with pytest.raises(MalformedMessageError, match="tenant must be"):
        subjects.job("m_0", bad, Lane.RT)


def test_a_submission_subject_comes_apart_as_it_was_put_together() -> None:
    assert subjects.parse_req(subjects.req("acme", "m", Lane.STD)) == ("acme", "m", Lane.STD)


@pytest.mark.parametrize("bad", ["hr.v1.req.a.m", "hr.v1.req.a.m.soon", "hr.v1.job.a.m.rt"])
def test_no_other_subject_is_read_as_a_submission(bad: str) -> None:
    with pytest.raises(MalformedMessageError):
        subjects.parse_req(bad)


def test_two_model_names_never_share_a_slug() -> None:
    names = ["qwen/Qwen3", "Qwen/Qwen3", "qwen-qwen3", "qwen qwen3", "ü", "a" * 200, "a" * 201]
    slugs = {subjects.model_slug(name) for name in names}
    assert len(slugs) == len(names)
    for slug in slugs:
        subjects.check_token(slug, "slug")
