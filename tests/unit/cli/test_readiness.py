from __future__ import annotations

import asyncio

import pytest

from headrace.cli import readiness
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings, Settings


def test_a_broker_that_does_not_answer_is_named_with_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "BROKER_TIMEOUT_S", 0.05)
    settings = Settings(broker=BrokerSettings(url="nats://127.0.0.1:1"))

    async def scenario() -> None:
        async with readiness.watch(settings, "http://127.0.0.1:1"):
            raise AssertionError("there is no broker")

    with pytest.raises(BrokerError, match=r"no broker at nats://127\.0\.0\.1:1 .*up\.nats_url"):
        asyncio.run(scenario())
