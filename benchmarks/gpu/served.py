"""`vllm serve` on these GPUs, asked over HTTP: one server with an engine a GPU, as vLLM's own balancer has them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from engines import Send, on_gpu

from headrace.cli.bench.compare.server import running
from headrace.cli.bench.compare.setups import setups
from headrace.cli.bench.run import calling
from headrace.cli.process import Guard
from headrace.shared.settings import DecodeSettings, ModelSettings, Settings, UpSettings

READY_TIMEOUT_S = 240.0


@contextlib.asynccontextmanager
async def coupled(options: argparse.Namespace, arguments: dict[str, Any]) -> AsyncIterator[Send]:
    """Give the server; its log is `coupled.log` beside the file of `--out`.

    Raises: NotStartedError when it does not get ready.
    """
    num = len(set(options.gpus))
    settings = Settings(
        model=ModelSettings(
            name=options.model, block_size=options.block, max_model_len=options.max_len
        ),
        up=UpSettings(prefill=0, decode=num, engine="vllm"),
        decode=DecodeSettings(engine=arguments),
    )
    setup = next(one for one in setups(settings, (), num) if one.name == "coupled")
    folder: Path = options.out.resolve().parent
    with Guard() as guard, on_gpu(",".join(options.gpus)):
        async with (
            running(setup, folder, READY_TIMEOUT_S, guard) as url,
            calling(url) as caller,
        ):
            yield caller.ask
