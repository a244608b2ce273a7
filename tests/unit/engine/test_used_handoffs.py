from __future__ import annotations

import pytest

from headrace.engine.used_handoffs import MAX_REMEMBERED, UsedHandoffs
from headrace.shared.errors import HandoffError


def handoff(request_id: str = "task-0a1b2c3d", engine_id: str = "engine") -> dict[str, str]:
    return {"remote_engine_id": engine_id, "remote_request_id": request_id}


def test_a_handoff_is_taken_once() -> None:
    used = UsedHandoffs()
    used.take(handoff())
    used.take(handoff(engine_id="another"))
    with pytest.raises(HandoffError) as caught:
        used.take(handoff())
    assert caught.value.reason == "used"


def test_a_failed_handoff_is_not_taken_again_either() -> None:
    used = UsedHandoffs()
    used.take(handoff())
    used.failed(handoff())
    with pytest.raises(HandoffError):
        used.take(handoff())


def test_a_handoff_may_be_given_back_before_it_is_taken_and_after_it_failed() -> None:
    used = UsedHandoffs()
    assert used.may_release(handoff())
    used.take(handoff())
    assert not used.may_release(handoff())
    used.failed(handoff())
    assert used.may_release(handoff())


def test_the_oldest_are_forgotten() -> None:
    used = UsedHandoffs()
    for number in range(MAX_REMEMBERED + 1):
        used.take(handoff(str(number)))
    used.take(handoff("0"))
    with pytest.raises(HandoffError):
        used.take(handoff("2"))
