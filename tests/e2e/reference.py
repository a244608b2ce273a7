"""One plain `AsyncLLM`, without headrace: reads prompts (token IDs) as JSON, writes greedy answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


async def main(model: str, max_tokens: int, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=4096,
            block_size=128,
            enforce_eager=True,
            distributed_executor_backend="uni",
            kv_cache_memory_bytes=512 * 2**20,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, output_kind=RequestOutputKind.FINAL_ONLY
    )
    answers = []
    try:
        for number, prompt in enumerate(prompts):
            async for output in engine.generate(tokens_input(prompt), params, str(number)):
                answers.append(list(output.outputs[0].token_ids))
    finally:
        engine.shutdown()
    return answers


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))  # noqa: T201
