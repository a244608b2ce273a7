"""The environment that torch, vLLM and NIXL read once, when they are imported: import this first.

Every variable is a default: what the process was started with stays.
"""

from __future__ import annotations

import importlib.metadata
import os

CPU_DEFAULTS = {
    # Two engines that share two cores are a hundred times slower with two threads each than with one.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The worker runs inside the engine's own process: one import of vLLM less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
DEFAULTS = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to the program
    "NIXL_LOG_LEVEL": "WARN",  # it writes to stdout, too
    # Without NVLink, UCX would not read another process's GPU memory directly: 0.5 GB/s, and not 45 (docs/adr/0011).
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # as vLLM sets it, where NIXL is imported before vLLM
}


def on_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False


def set_defaults() -> None:
    """Set what is not set."""
    for name, value in {**DEFAULTS, **(CPU_DEFAULTS if on_cpu() else {})}.items():
        os.environ.setdefault(name, value)


set_defaults()
