"""What `headrace doctor` says of a stack on these GPUs: both roles on one, or prefill on the first of two.

    python benchmarks/gpu/doctor.py --model FOLDER --gpus 0 --out doctor.json

FOLDER and the environment are those of run.py. The stack is started with a broker of its own, examined once it is
ready, and ended. The report is what `headrace doctor --json` prints; a check that fails makes the status 1. With
`--chats`, the stack answers people meanwhile, one chat after another; one that fails makes the status 1, too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from engines import Send, engine_arguments
from stack import headrace

from headrace.cli.bench.measures import Measured
from headrace.cli.bench.prompts import Ask
from headrace.shared.nats_server import NatsServer

DOCTOR_TIMEOUT_S = 300.0
CHATS_TIMEOUT_S = 120.0
CHAT = [
    {"role": "user", "content": "Which countries does the Danube cross, and where does it end?"}
]


async def examine(options: argparse.Namespace) -> int:
    """Start the stack, write the report, and return doctor's status."""
    with tempfile.TemporaryDirectory() as home:
        server = NatsServer(Path(home))
        await server.start()
        try:
            options.set.append(f"up.nats_url={server.url}")
            async with headrace(options, engine_arguments(options)) as send:
                chatting = asyncio.create_task(chats(send, options.chats))
                status = await doctor(options, server.url)
                async with asyncio.timeout(CHATS_TIMEOUT_S):
                    return max(status, tell(await chatting))
        finally:
            await server.stop()


async def chats(send: Send, num: int) -> list[Measured]:
    """Hold so many chats of one turn, one after another."""
    ask = Ask(turns=(CHAT,), num_output_token_ids=64)
    return [one for _ in range(num) for one in await send(ask)]


def tell(held: list[Measured]) -> int:
    """Print what became of the chats to stderr; return 1 where one failed."""
    for one in held:
        ttft = "none" if one.ttft_s is None else f"{one.ttft_s * 1e3:.1f} ms"
        line = f"chat: TTFT {ttft}, {one.num_output_token_ids} token IDs {one.error}\n"
        sys.stderr.write(line)
    return 1 if any(one.error for one in held) else 0


async def doctor(options: argparse.Namespace, nats_url: str) -> int:
    """Run the command beside the stack, with the settings that matter to it. Raises: TimeoutError."""
    settings = {
        "model.name": options.model,
        "model.block_size": str(options.block),
        "model.max_model_len": str(options.max_len),
        "decode.local_prefill_threshold": "0",
    }
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    flags += [flag for assignment in options.set for flag in ("--set", assignment)]
    command = [sys.executable, "-m", "headrace.cli.main", "doctor", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, "--nats-url", nats_url, *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DOCTOR_TIMEOUT_S):
            report, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    options.out.write_bytes(report)
    sys.stdout.write(report.decode())
    return await process.wait()


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json and the tokenizer")
    add("--gpus", type=lambda text: text.split(","), default=["0"], help="prefill's first (0)")
    add("--block", type=int, default=128, help="token IDs a KV block (128)")
    add("--max-len", type=int, default=16_384)
    add("--memory", type=float, default=0.4, help="gpu_memory_utilization of each engine (0.4)")
    add("--kv-gib", type=int, default=24, help="KV cache of each engine (24)")
    add("--batched-tokens", type=int, default=8192, help="max_num_batched_tokens (8192)")
    add("--chats", type=int, default=0, help="held beside it (0)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the stack")
    add("--real-weights", dest="dummy", action="store_false", help="load the model's own weights")
    add("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(examine(parse())))
