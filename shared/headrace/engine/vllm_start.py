"""Starting and ending one vLLM engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM

from headrace.engine.interface import EngineInfo
from headrace.engine.nixl_connector import PROGRESS_DELAY_VARIABLE
from headrace.engine.vllm_args import engine_args, lease_s
from headrace.engine.vllm_env import on_cpu
from headrace.engine.vllm_scheduler import look_first
from headrace.engine.vllm_stats import Recorder
from headrace.shared.errors import EngineDeadError, SettingsError
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

logger = logging.getLogger(__name__)

_starting = threading.Lock()  # vLLM reads the environment while it starts, and there is one
T = TypeVar("T")


TELL_S = 5.0
"""For the requests of a dead engine to hear of its death."""


class EngineProcess:
    """One AsyncLLM, started and ended in a thread of its own.

    The kernel ties vLLM's processes to the *thread* that made them, so this one lives as long as they.
    """

    def __init__(self, settings: Settings, role: Role) -> None:
        self._settings = settings
        self._role = role
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"vllm-{role}")
        self._engine: AsyncLLM | None = None
        self._recorder: Recorder | None = None

    @property
    def engine(self) -> AsyncLLM:
        """vLLM. Raises: EngineDeadError before the start and after the end."""
        if self._engine is None:
            raise EngineDeadError(f"the {self._role} engine is not running")
        return self._engine

    @property
    def recorder(self) -> Recorder:
        """The engine's statistics. Raises: EngineDeadError before the start."""
        if self._recorder is None:
            raise EngineDeadError(f"the {self._role} engine was not started")
        return self._recorder

    async def start(self) -> EngineInfo:
        """Start the engine, and return what it is.

        Raises: SettingsError for arguments that vLLM refuses, EngineDeadError when it can't start.
        """
        engine = await self._in_thread(self._launch)
        self._engine = engine
        info = describe(engine.vllm_config, self._settings)
        if info.block_size != self._settings.model.block_size:
            logger.warning(
                "a KV block holds %d token IDs, not the %d of model.block_size: this model's attention needs it so",
                info.block_size,
                self._settings.model.block_size,
                extra={"action": "block_size_changed", "role": str(self._role)},
            )
        return info

    async def shutdown(self) -> None:
        """End the engine, its processes and the thread."""
        engine, self._engine = self._engine, None
        if engine is not None:
            if (handler := engine.output_handler) is not None:
                if engine.errored:  # it is telling those who wait, and then it ends
                    await asyncio.wait({handler}, timeout=TELL_S)
                # First: it takes the end of the engine's process for a failure, and logs a traceback.
                handler.cancel()
                await asyncio.gather(handler, return_exceptions=True)
            await self._in_thread(engine.shutdown)
            # vLLM would leave it, and its threads, to the garbage collector. Closes what is open: nothing waits.
            await self._in_thread(partial(engine.engine_core.resources.ctx.destroy, linger=0))
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _launch(self) -> AsyncLLM:
        with _starting, _environment(self._settings):
            try:
                config = engine_args(self._settings, self._role).create_engine_config()
            except (ValueError, TypeError, OSError) as error:
                what = f"vLLM refuses the {self._role} engine's settings: {error}"
                raise SettingsError(what) from error
            look_first(config)
            if on_cpu():
                # vLLM set "spawn" while it made the configuration. A fork has all of vLLM imported.
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            try:
                return AsyncLLM.from_vllm_config(
                    config, stat_loggers=[self._make_recorder], disable_log_stats=True
                )
            except (RuntimeError, ValueError, OSError) as error:
                raise EngineDeadError(f"the {self._role} engine did not start: {error}") from error

    def _make_recorder(self, config: VllmConfig, engine_index: int) -> Recorder:
        self._recorder = Recorder(config, engine_index)
        return self._recorder


def describe(config: VllmConfig, settings: Settings) -> EngineInfo:
    """Return a started engine's facts."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    transfer = config.kv_transfer_config
    assert cache.num_gpu_blocks is not None
    per_token = model.get_head_size() * model.get_num_kv_heads(parallel) * model.dtype.itemsize
    keys_and_values = 1 if model.use_mla else 2
    return EngineInfo(
        # a colocated engine has no connector, and so no name of vLLM's
        engine_id=(transfer.engine_id if transfer else None) or uuid.uuid4().hex,
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1,  # vLLM keeps one as the null block
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        block_bytes=keys_and_values * per_token * cache.block_size * model.get_num_layers(parallel),
        lease_s=float(lease_s(settings)),
    )


@contextlib.contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """Set what vLLM and our connector read while an engine starts; put the old values back."""
    nixl = settings.nixl
    values: dict[str, str | None] = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": nixl.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl.port or free_port(nixl.host)),
        PROGRESS_DELAY_VARIABLE: str(nixl.progress_delay_us),
    }
    if on_cpu():
        values["VLLM_CPU_KVCACHE_SPACE"] = None  # it would win over kv_cache_memory_bytes
    old = {name: os.environ.get(name) for name in (*values, "VLLM_WORKER_MULTIPROC_METHOD")}
    _set(values)
    try:
        yield
    finally:
        _set(old)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def free_port(host: str) -> int:
    """Return a port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
