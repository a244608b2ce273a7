"""How a vLLM engine's process ends: with its parent, and loudly."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from headrace.engine.interface import EngineStats
from headrace.shared import settings as settings_module
from headrace.shared.errors import EngineDeadError, SettingsError
from headrace.shared.settings import DecodeSettings, Settings
from headrace.shared.subjects import Role

PARENT = """
import asyncio, multiprocessing, sys
from headrace.shared.settings import load
from pathlib import Path

async def main():
    from headrace.engine.vllm_engine import VllmDecodeEngine
    engine = VllmDecodeEngine(load(Path(sys.argv[1]), env={}))
    await engine.start()
    print("PIDS", *(child.pid for child in multiprocessing.active_children()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_engines_processes_die_with_a_killed_parent(
    engine_settings: Settings, tmp_path: os.PathLike[str]
) -> None:
    path = os.path.join(tmp_path, "settings.json")
    with open(path, "wb") as file:
        file.write(settings_module.dump(engine_settings))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        line = next((line for line in parent.stdout if line.startswith("PIDS")), "")
        children = [os.pidfd_open(int(pid)) for pid in line.split()[1:]]
        assert children
        parent.kill()
        poller = select.poll()
        for child in children:
            poller.register(child, select.POLLIN)
            assert poller.poll(10_000), "an engine process outlived its parent by 10 s"
            poller.unregister(child)
            os.close(child)


async def test_a_killed_engine_is_dead_for_every_request_and_leaves_nothing_open(
    engine_settings: Settings,
) -> None:
    from headrace.engine.vllm_engine import VllmDecodeEngine

    others = set(multiprocessing.active_children())
    engine = VllmDecodeEngine(engine_settings)
    await engine.start()
    context = engine._process.engine.engine_core.resources.ctx
    try:
        (process,) = set(multiprocessing.active_children()) - others
        outputs = engine.generate(
            "sequence",
            [1, 2, 3],
            msgspec.msgpack.encode({"max_tokens": 900, "ignore_eos": True}),
            kv_transfer_params=None,
            cache_salt=None,
            priority=0,
        )
        await anext(outputs)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.release_handoff(
                {
                    "do_remote_prefill": True,
                    "remote_engine_id": "e",
                    "remote_request_id": "r",
                    "remote_host": "127.0.0.1",
                    "remote_port": 1,
                    "tp_size": 1,
                }
            )
    finally:
        async with asyncio.timeout(60):
            await engine.shutdown()
    assert context.closed


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ({"max_num_seq": 4}, r"decode\.engine\.max_num_seq: .*max_num_seqs"),
        ({"dtype": "float32"}, r"decode\.engine\.dtype: set model\.dtype"),
        ({"kv_transfer_config": {}}, r"set \[nixl\]"),
        ({"gpu_memory_utilization": 7.0}, "refuses the decode engine's settings"),
    ],
)
async def test_wrong_engine_arguments_stop_the_start_and_are_named(
    engine_settings: Settings, engine: dict[str, object], what: str
) -> None:
    from headrace.engine.vllm_engine import VllmDecodeEngine

    settings = msgspec.structs.replace(engine_settings, decode=DecodeSettings(engine=engine))
    wrong = VllmDecodeEngine(settings)
    with pytest.raises(SettingsError, match=what):
        await wrong.start()
    await asyncio.gather(wrong.shutdown(), wrong.shutdown())


async def test_a_model_that_is_not_there_stops_the_start(engine_settings: Settings) -> None:
    from headrace.engine.vllm_engine import VllmPrefillEngine

    model = msgspec.structs.replace(engine_settings.model, name="/no/such/model")
    wrong = VllmPrefillEngine(msgspec.structs.replace(engine_settings, model=model))
    with pytest.raises(SettingsError, match="/no/such/model"):
        await wrong.start()
    assert wrong.stats() == EngineStats()
    with pytest.raises(EngineDeadError):
        await wrong.check_health()
    await wrong.shutdown()


@pytest.mark.parametrize("size", [128, 64])
async def test_an_engine_says_when_its_blocks_are_not_of_the_set_size(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.engine import vllm_start
    from headrace.engine.interface import EngineInfo

    info = EngineInfo(
        engine_id="e",
        block_size=size,
        num_blocks=1,
        max_model_len=1,
        vocab_size=1,
        block_bytes=1,
        lease_s=1.0,
    )
    monkeypatch.setattr(vllm_start, "describe", lambda config, settings: info)
    process = vllm_start.EngineProcess(Settings(), Role.DECODE)
    launched = SimpleNamespace(vllm_config=None)
    monkeypatch.setattr(process, "_launch", lambda: launched)
    assert await process.start() == info
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (size != 128)
    if said:
        assert said[0].getMessage().startswith("a KV block holds 64 token IDs, not the 128")
