from __future__ import annotations

from headrace.cli.guard import watch


def test_groups_that_have_ended_are_not_killed() -> None:
    assert watch(["+10\n", "+11\n", "-10\n"]) == {11}


def test_a_group_that_was_started_again_is_killed() -> None:
    assert watch(["+10\n", "-10\n", "+10\n"]) == {10}
