"""`headrace batch submit|status|cancel|results|list` at a real gateway; the batch worker is played by the test."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.batch import remote
from headrace.cli.main import main
from headrace.shared.batches import BatchCounts, BatchError, BatchRecord
from headrace.shared.broker import Broker
from headrace.shared.files import BrokerFiles
from headrace.shared.records import Records
from headrace.shared.settings import BrokerSettings

from .conftest import RunningGateway, connected

WATCHDOG_S = 60
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": []},
}
INPUT = f"{json.dumps(LINE)}\n".encode()


class Command:
    """Runs `headrace batch …` as a user does, in a thread."""

    def __init__(self, url: str, capfd: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capfd = capfd

    async def __call__(self, *words: str | Path) -> tuple[int, str, str]:
        """Return exit code, stdout, stderr."""
        line = ["batch", *map(str, words), "--base-url", self._url]
        async with asyncio.timeout(WATCHDOG_S):
            code = await asyncio.to_thread(main, line)
        out, err = self._capfd.readouterr()
        return code, out, err


@pytest.fixture
async def edge(
    broker_settings: BrokerSettings, start_gateway: Callable[..., Any], slug: str
) -> AsyncIterator[RunningGateway]:
    async with start_gateway(broker_settings, tenant=slug) as gateway:
        await connected(gateway.client)
        yield gateway


@pytest.fixture
def command(edge: RunningGateway, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(edge.url, capfd)


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(INPUT)
    return path


async def change(broker: Broker, tenant: str, batch_id: str, **changes: Any) -> None:
    """Do to a batch what its worker does."""
    found = await Records(broker).get("batch", tenant, batch_id, BatchRecord)
    assert found is not None
    record = msgspec.structs.replace(found[0], **changes)
    await Records(broker).put("batch", tenant, batch_id, record, expect=found[1])


async def submitted(command: Command, input_file: Path) -> str:
    code, out, _ = await command("submit", "-i", input_file, "--metadata", "who=me")
    assert code == 0
    return out.strip()


async def test_a_file_becomes_a_batch_of_the_endpoint_that_its_first_line_names(
    command: Command, input_file: Path, broker: Broker, slug: str
) -> None:
    batch_id = await submitted(command, input_file)
    code, out, _ = await command("status", batch_id, "--json")
    batch = json.loads(out)
    assert (code, batch["status"], batch["endpoint"]) == (0, "validating", LINE["url"])
    assert batch["metadata"] == {"who": "me"}
    parts = BrokerFiles(broker).parts(slug, batch["input_file_id"])
    assert b"".join([part.data async for part in parts]) == INPUT
    _, out, _ = await command("list")
    assert batch_id in out


async def test_following_a_batch_tells_of_each_step_and_ends_with_it(
    command: Command,
    input_file: Path,
    broker: Broker,
    slug: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch_id = await submitted(command, input_file)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    words = remote._words

    def told(batch: Any) -> str:
        if batch["status"] == "in_progress":
            loop.call_soon_threadsafe(asked.set)
        return words(batch)

    monkeypatch.setattr(remote, "_words", told)
    monkeypatch.setattr(remote, "POLL_S", 0.01)
    counts = BatchCounts(total=3, completed=1)
    await change(broker, slug, batch_id, status="in_progress", counts=counts)
    following = asyncio.create_task(command("status", batch_id, "--follow"))
    await asked.wait()
    counts = BatchCounts(total=3, completed=2, failed=1)
    await change(broker, slug, batch_id, status="completed", counts=counts)
    code, out, err = await following
    assert code == 1  # not every line has its answer
    assert "in_progress, 1 of 3 lines, 0 failed" in err
    assert "completed, 3 of 3 lines, 1 failed" in out


async def test_results_are_written_as_they_are_and_those_of_a_running_batch_too(
    command: Command,
    input_file: Path,
    broker: Broker,
    slug: str,
    edge: RunningGateway,
    tmp_path: Path,
) -> None:
    batch_id = await submitted(command, input_file)
    output = tmp_path / "out.jsonl"
    code, _, err = await command("results", batch_id, "-o", output)
    assert (code, output.exists()) == (0, False)
    assert "nothing for" in err
    upload = await edge.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("x", b'{"custom_id": "a"}\n')}
    )
    await change(broker, slug, batch_id, status="in_progress", output_file_id=upload.json()["id"])
    code, out, _ = await command("results", batch_id, "-o", output)
    assert (code, output.read_bytes()) == (0, b'{"custom_id": "a"}\n')
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    code, out, _ = await command("results", batch_id, "-o", "-")
    assert out == '{"custom_id": "a"}\n'


async def test_a_batch_is_cancelled(command: Command, input_file: Path) -> None:
    batch_id = await submitted(command, input_file)
    code, out, _ = await command("cancel", batch_id)
    assert code == 0
    assert "cancel" in out


async def test_a_batch_that_failed_says_which_line_is_wrong(
    command: Command, input_file: Path, broker: Broker, slug: str
) -> None:
    batch_id = await submitted(command, input_file)
    wrong = BatchError(code="invalid_json_line", message="this is no JSON", line=7)
    await change(broker, slug, batch_id, status="failed", errors=(wrong,))
    code, _, err = await command("status", batch_id)
    assert code == 1
    assert "line 7: this is no JSON" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", "batch_none"), "batch_none"),
        (("status", "../files"), "'../files' is no ID"),
        (("results", "batch_none"), "say where to: --output-file, --errors, or both"),
        (("submit", "-i", "/none"), "--input-file /none: No such file"),
        (("submit", "-i", "/dev/null"), "say --endpoint"),
    ],
)
async def test_what_can_not_be_done_is_said_in_words(
    command: Command, words: tuple[str, ...], message: str
) -> None:
    code, out, err = await command(*words)
    assert code != 0
    assert message in err
    assert out == ""
