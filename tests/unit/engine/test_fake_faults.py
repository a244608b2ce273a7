from __future__ import annotations

import pytest

from headrace.engine import fake_faults
from headrace.engine.fake_faults import VARIABLE, FaultPlan
from headrace.shared.errors import SettingsError
from headrace.shared.subjects import Role


def test_each_role_reads_its_own_part() -> None:
    env = {VARIABLE: '{"prefill": {"hang_pulls": true}, "decode": {"fail_next": 2}}'}
    assert fake_faults.from_env(Role.PREFILL, env) == FaultPlan(hang_pulls=True)
    assert fake_faults.from_env(Role.DECODE, env) == FaultPlan(fail_next=2)


def test_nothing_set_is_no_fault() -> None:
    assert fake_faults.from_env(Role.DECODE, {}) == FaultPlan()


@pytest.mark.parametrize("text", ["{", '{"render": {}}', '{"decode": {"fail_nxt": 1}}'])
def test_a_wrong_plan_names_the_variable(text: str) -> None:
    with pytest.raises(SettingsError, match=VARIABLE):
        fake_faults.from_env(Role.DECODE, {VARIABLE: text})
