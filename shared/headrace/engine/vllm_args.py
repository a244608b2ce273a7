"""Settings to vLLM's `AsyncEngineArgs`."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig

from headrace.engine import nixl_connector, nixl_worker
from headrace.engine.vllm_env import on_cpu
from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

CPU_KV_CACHE_BYTES = 512 * 2**20

_CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
    "distributed_executor_backend": "uni",
}
# Prefill and decode must agree on these, so they have one place.
_ELSEWHERE = {
    "model": "model.name",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "block_size": "model.block_size",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "reasoning_parser": "model.reasoning_parser",
    "kv_transfer_config": "[nixl]",
    "worker_extension_cls": "nothing, as headrace uses it,",
}


def lease_s(settings: Settings) -> int:
    """Return how long vLLM keeps a handoff's blocks: whole seconds, at least one."""
    return max(1, round(settings.nixl.lease_s))


def engine_args(settings: Settings, role: Role) -> AsyncEngineArgs:
    """Return the arguments of a role's engine.

    Raises: SettingsError naming an argument that vLLM doesn't have, or that is set elsewhere.
    """
    overrides = settings.prefill.engine if role is Role.PREFILL else settings.decode.engine
    check_overrides(overrides, role)
    model = settings.model
    values: dict[str, Any] = {
        "model": model.name,
        "revision": model.revision or None,
        "dtype": model.dtype,
        "block_size": model.block_size,
        "max_model_len": model.max_model_len or None,
        "trust_remote_code": model.trust_remote_code,
        "reasoning_parser": model.reasoning_parser,
        "scheduling_policy": "priority",
        "disable_log_stats": True,  # our own logger takes the numbers instead
    }
    if role is Role.PREFILL or not settings.decode.colocated:
        values |= _kv_transfer(settings, role)
    if on_cpu():
        values |= _CPU_DEFAULTS
        if overrides.get("tensor_parallel_size", 1) > 1:
            values["distributed_executor_backend"] = "mp"
    return AsyncEngineArgs(**(values | overrides))


def _kv_transfer(settings: Settings, role: Role) -> dict[str, Any]:
    """Return what lets an engine's KV cache move; a colocated one's stays where it is."""
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=nixl_connector.HeadraceNixlConnector.__name__,
            kv_connector_module_path=nixl_connector.__name__,
            kv_role="kv_producer" if role is Role.PREFILL else "kv_consumer",
            kv_buffer_device="cpu" if on_cpu() else "cuda",
            kv_load_failure_policy=settings.nixl.load_failure_policy,
            kv_connector_extra_config={
                "kv_lease_duration": lease_s(settings),
                nixl_worker.PULL_TIMEOUT_KEY: settings.decode.pull_timeout_s,
            },
        ),
        "worker_extension_cls": (f"{nixl_worker.__name__}.{nixl_worker.WorkerCalls.__name__}"),
    }


def check_overrides(overrides: dict[str, Any], role: Role) -> None:
    """Check the names in `[prefill] engine` or `[decode] engine`.

    Raises: SettingsError.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in overrides:
        if name in _ELSEWHERE:
            raise SettingsError(f"{role}.engine.{name}: set {_ELSEWHERE[name]} instead")
        if name not in known:
            raise SettingsError(
                f"{role}.engine.{name}: vLLM's AsyncEngineArgs has no such argument; it has"
                f" {', '.join(sorted(known - _ELSEWHERE.keys()))}"
            )
