"""What a colocated engine is started with: it is a plain one, whatever moves a KV cache elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from headrace.shared.settings import Settings
from headrace.shared.subjects import Role


def test_a_colocated_engine_has_no_connector_and_a_prefill_engine_always_has(
    engine_settings: Settings,
) -> None:
    from headrace.engine.vllm_args import engine_args

    plain = msgspec.structs.replace(engine_settings.decode, colocated=True)
    settings = msgspec.structs.replace(engine_settings, decode=plain)
    of = {role: engine_args(settings, role) for role in (Role.PREFILL, Role.DECODE)}
    assert of[Role.DECODE].kv_transfer_config is None
    assert not of[Role.DECODE].worker_extension_cls
    assert of[Role.PREFILL].kv_transfer_config is not None
    usual = engine_args(engine_settings, Role.DECODE)
    assert usual.kv_transfer_config is not None
    assert of[Role.DECODE].block_size == usual.block_size


def test_a_colocated_engine_is_described_under_a_name_of_its_own(
    engine_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engine.vllm_args import engine_args
    from headrace.engine.vllm_start import describe

    # vLLM sets it while it makes a configuration
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    plain = msgspec.structs.replace(engine_settings.decode, colocated=True)
    settings = msgspec.structs.replace(engine_settings, decode=plain)
    config = engine_args(settings, Role.DECODE).create_engine_config()
    config.cache_config.num_gpu_blocks = 9
    first, second = (describe(config, settings) for _ in range(2))
    assert first.num_blocks == 8
    assert first.engine_id
    assert first.engine_id != second.engine_id
