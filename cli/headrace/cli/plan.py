"""What `headrace up` is going to start: worker processes, their environments, their run folder."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli import gpus
from headrace.cli.logs import LogFormat, LogLevel
from headrace.cli.worker import Worker
from headrace.shared import settings as settings_module
from headrace.shared.errors import SettingsError
from headrace.shared.settings import ENV_PREFIX, Settings
from headrace.shared.subjects import Role

ENGINE_ROLES = (Role.PREFILL, Role.DECODE)
RENDER_DRAIN_S = 30.0  # render finishes what it took, which is quick
NUM_RUN_FOLDERS = 20

METRICS_PORT_VARIABLE = f"{ENV_PREFIX}METRICS_PORT"

_RUN_FOLDER = re.compile(r"\d{8}-\d{6}-\d+")
_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # where vLLM puts its sockets, which it never removes
_MAX_SOCKETS_PATH = 107 - len(
    "/00000000-0000-0000-0000-000000000000"
)  # the kernel's limit, less a name


def make_run_folder(home: Path) -> Path:
    """Return a new `run/<time>-<pid>` with an empty `logs` in it; the oldest folders there are removed.

    Raises: SettingsError when it can't be made.
    """
    folder = home / "run" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise SettingsError(
            f"HEADRACE_HOME={home}: no run folder can be made there: {error}"
        ) from None
    for old in sorted(folder.parent.iterdir())[:-NUM_RUN_FOLDERS]:
        if _RUN_FOLDER.fullmatch(old.name) and not _is_running(int(old.name.rpartition("-")[2])):
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def write_settings(settings: Settings, folder: Path) -> Path:
    """Write the resolved settings for the workers; only this user may read the password in them."""
    path = folder / "settings.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(settings_module.dump(settings))
    return path


def workers(
    settings: Settings,
    settings_file: Path,
    *,
    env: Mapping[str, str],
    visible_gpus: list[str],
    log_format: LogFormat,
    log_level: LogLevel,
) -> list[Worker]:
    """Return every process of the stack, the gateway first.

    Raises: SettingsError when an engine needs more GPUs than there are.
    """
    up = settings.up
    nums = {
        Role.GATEWAY: up.gateway,
        Role.RENDER: up.render,
        Role.PREFILL: 0 if settings.decode.colocated else up.prefill,  # nobody would ask one
        Role.DECODE: up.decode,
        Role.DERENDER: up.derender,
        Role.BATCH: up.batch,
    }
    base = worker_env(env)
    for_engines = _with_sockets_in(settings_file.parent, base)
    numbers = itertools.count()
    engine_envs = iter(_engine_envs(settings, nums, for_engines, visible_gpus))
    return [
        Worker(
            role=role,
            index=index,
            command=[
                *(sys.executable, "-m", "headrace.cli.main", "serve", role),
                *("--config", str(settings_file), "--instance-index", str(index)),
                *("--log-format", log_format, "--log-level", log_level),
            ],
            env=with_metrics_port(
                next(engine_envs) if role in ENGINE_ROLES else base, settings, next(numbers)
            ),
            log=settings_file.parent / "logs" / f"{role}-{index}.log",
            drain_timeout_s=drain_timeout_s(settings, role),
        )
        for role, num in nums.items()
        for index in range(num)
    ]


def with_metrics_port(env: dict[str, str], settings: Settings, number: int) -> dict[str, str]:
    """Return the environment with a port of its own for the stack's `number`-th process, if they have any."""
    if not settings.metrics.port:
        return env
    return {**env, METRICS_PORT_VARIABLE: str(settings.metrics.port + number)}


def _with_sockets_in(folder: Path, env: dict[str, str]) -> dict[str, str]:
    """Let vLLM's sockets go away with the run folder, where the path is short enough for a socket."""
    if len(os.fsencode(folder)) > _MAX_SOCKETS_PATH:
        return env
    return {_SOCKETS_VARIABLE: str(folder), **env}


def worker_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without headrace's settings: they are in the file, resolved.

    A worker that read them again would let the environment win over the command line of `up`.
    """
    variables = {
        f"{ENV_PREFIX}{section.name}_{setting.name}".upper()
        for section in msgspec.structs.fields(Settings)
        for setting in msgspec.structs.fields(section.type)
    }
    return {name: text for name, text in env.items() if name not in variables}


def drain_timeout_s(settings: Settings, role: Role) -> float:
    """Return how long a role may take to end after SIGTERM."""
    return {
        Role.GATEWAY: settings.gateway.drain_timeout_s,
        Role.RENDER: RENDER_DRAIN_S,
        Role.PREFILL: settings.prefill.drain_timeout_s,
        Role.DECODE: settings.decode.drain_timeout_s,
        Role.DERENDER: settings.derender.drain_timeout_s,
        Role.BATCH: settings.batch.drain_timeout_s,
    }[role]


def num_gpus(engine_arguments: Mapping[str, Any]) -> int:
    """Return how many GPUs an engine with these arguments takes."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    num = 1
    for size in sizes:
        num *= int(engine_arguments.get(size, 1))
    return num


def with_port(settings: Settings) -> Settings:
    """Return the settings with a real port for port 0.

    Raises: SettingsError when the address can't be listened on.
    """
    gateway = settings.gateway
    port = listenable_port(gateway.host, gateway.port)
    return msgspec.structs.replace(settings, gateway=msgspec.structs.replace(gateway, port=port))


def listenable_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0.

    Raises: SettingsError when the port is taken, or `host` is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            hint = "choose another gateway.port, or 0 for a free one"
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(f"{host}:{port} is in use: {hint}") from None
            raise SettingsError(f"can't listen on {host}:{port}: {error.strerror}") from None
        return int(probe.getsockname()[1])


def _engine_envs(
    settings: Settings, nums: Mapping[Role, int], base: dict[str, str], visible_gpus: list[str]
) -> list[dict[str, str]]:
    arguments = {Role.PREFILL: settings.prefill.engine, Role.DECODE: settings.decode.engine}
    engines = [arguments[role] for role in ENGINE_ROLES for _ in range(nums[role])]
    if settings.up.engine == "fake":
        return [base for _ in engines]
    if not visible_gpus:
        num_threads = max(1, (os.cpu_count() or 1) // len(engines))
        return [{"OMP_NUM_THREADS": str(num_threads), **base} for _ in engines]
    given = gpus.assign(visible_gpus, [num_gpus(arguments) for arguments in engines])
    return [{**base, gpus.VARIABLE: ",".join(ids)} for ids in given]
