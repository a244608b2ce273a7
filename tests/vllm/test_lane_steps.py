"""Batch work beside people who wait, on vLLM's own scheduler; no model runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.engine.priorities import engine_priority
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role

BLOCK = 32
NUM_SEQS = 8


class Steps:
    """A scheduler, and an engine that gives each request that is through its prompt a token ID a step."""

    def __init__(self, settings: Settings, num_blocks: int) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from headrace.engine.vllm_args import engine_args
        from headrace.engine.vllm_scheduler import look_first

        plain = msgspec.structs.replace(
            settings.decode,
            colocated=True,
            engine={"max_num_seqs": NUM_SEQS, "enable_prefix_caching": False},
        )
        settings = msgspec.structs.replace(settings, decode=plain)
        config = engine_args(settings, Role.DECODE).create_engine_config()
        look_first(config)
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )

    def add(self, name: str, lane: Lane, num_token_ids: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=list(range(num_token_ids)),
            sampling_params=SamplingParams(max_tokens=500, ignore_eos=True),
            pooling_params=None,
            priority=engine_priority(lane, 0),
        )
        self.scheduler.add_request(request)

    def step(self) -> set[str]:
        """Return whom a step was for."""
        from vllm.v1.outputs import ModelRunnerOutput

        step = self.scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        ids = []
        for name in names:
            request = self.scheduler.requests[name]
            is_through = request.num_computed_tokens >= request.num_tokens
            ids.append([7] if is_through else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=ids,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(step, output)
        return set(names)


@pytest.fixture
def steps(engine_settings: Settings) -> Any:
    return lambda num_blocks: Steps(engine_settings, num_blocks)


def test_a_first_token_id_is_computed_in_a_step_without_the_batch(steps: Any) -> None:
    engine = steps(200)
    for name in ("b1", "b2"):
        engine.add(name, Lane.BULK, 40)
    assert engine.step() == {"b1", "b2"}
    engine.add("rt", Lane.RT, 300)
    engine.add("b3", Lane.BULK, 40)
    assert engine.step() == {"rt"}
    assert engine.step() == {"b1", "b2", "b3", "rt"}


def test_a_batchs_steps_are_short(steps: Any) -> None:
    engine = steps(200)
    engine.add("b1", Lane.BULK, 900)
    most = engine.scheduler.num_bulk_step_token_ids
    engine.step()
    assert engine.scheduler.requests["b1"].num_computed_tokens == most
    engine.add("rt", Lane.RT, 900)
    assert engine.step() == {"rt"}
    assert engine.scheduler.requests["rt"].num_computed_tokens == 900


def test_there_is_room_for_all_that_the_batch_makes_room_for(steps: Any) -> None:
    engine = steps(200)
    for number in range(NUM_SEQS - 2):
        engine.add(f"b{number}", Lane.BULK, 10)
    engine.step()
    for number in range(6):
        engine.add(f"rt{number}", Lane.RT, 10)
    for _ in range(5):
        engine.step()
        assert len(engine.scheduler.running) == NUM_SEQS


def test_an_answer_gets_the_batchs_blocks_where_none_are_free(steps: Any) -> None:
    engine = steps(9)  # one is the null block
    engine.add("rt0", Lane.RT, 2 * BLOCK - 1)
    engine.step()
    for number in range(3):
        engine.add(f"b{number}", Lane.BULK, 2 * BLOCK - 2)
        engine.step()
    engine.add("rt1", Lane.RT, 10)
    seen = [engine.step() for _ in range(3)]
    assert all("rt0" in names for names in seen)
    assert "rt1" in seen[-1]
