"""The whole of headrace, as `headrace up` starts it, asked over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from engines import Send

from headrace.cli.bench.run import calling

READY_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
SLOTS = 64  # of all decode workers together


@contextlib.asynccontextmanager
async def headrace(
    options: argparse.Namespace, arguments: dict[str, Any], *, num_colocated: int = 0
) -> AsyncIterator[Send]:
    """Give a stack: one prefill and one decode worker, or so many colocated ones.

    Raises: RuntimeError when it does not get ready.
    """
    async with _up(options, arguments, num_colocated) as url, calling(url) as caller:
        yield caller.ask


@contextlib.asynccontextmanager
async def _up(
    options: argparse.Namespace, arguments: dict[str, Any], num_colocated: int
) -> AsyncIterator[str]:
    engine = json.dumps(arguments)
    settings = {
        "up.batch": "0",
        "gateway.port": "0",
        "model.name": options.model,
        "model.block_size": str(options.block),
        "model.max_model_len": str(options.max_len),
        "prefill.engine": engine,
        "decode.engine": engine,
        "decode.local_prefill_threshold": "0",
        "decode.slots": str(SLOTS // max(1, num_colocated)),
        "up.ready_timeout_s": str(READY_TIMEOUT_S),
    }
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    flags += [flag for assignment in options.set for flag in ("--set", assignment)]
    if num_colocated:
        flags += ["--colocated", str(num_colocated)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace.cli.main", "up", *flags),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S + 30):
            line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise RuntimeError(f"the stack did not get ready: {line!r}")
        yield line.split()[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
