"""A detokenizer that knows the end of a long prompt gives the text of one that knows all of it."""

from __future__ import annotations

import random

import pytest

from headrace.shared.contract import model_path
from headrace.shared.settings import Settings

pytestmark = pytest.mark.vllm

WORDS = ["plain ", "Ünïcödé ", "日本語", "🎉🇫🇷", "\n\n", "<|im_start|>user", " tab\t", "12345"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_text_is_the_same_wherever_the_prompt_ends(
    monkeypatch: pytest.MonkeyPatch, seed: int, skip_special_tokens: bool
) -> None:
    from transformers import AutoTokenizer
    from vllm.sampling_params import SamplingParams

    from headrace.engine import vllm_outputs
    from headrace.engine.vllm_outputs import Outputs, PromptParams

    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path(Settings()))
    ids = tokenizer("".join(rng.choice(WORDS) for _ in range(2_000)))["input_ids"]
    cut = rng.randrange(vllm_outputs.LONG_PROMPT + 1, len(ids) - 50)
    params = SamplingParams(max_tokens=50, skip_special_tokens=skip_special_tokens)

    def text() -> str:
        prompt = PromptParams(token_ids=ids[:cut], sampling_params=params, text=None)
        outputs = Outputs(tokenizer, [prompt], 1)
        results, _ = outputs.add(
            0,
            ids[cut : cut + 50],
            finish_reason="length",
            stop_reason=None,
            logprobs=None,
            num_cached_token_ids=0,
        )
        return "".join(output.outputs[0].text for _, output in results[-1:])

    of_the_end = text()
    monkeypatch.setattr(vllm_outputs, "LONG_PROMPT", 10**9)
    assert of_the_end == text()
