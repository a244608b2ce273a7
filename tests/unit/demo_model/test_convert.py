"""The conversion from GGUF: order of rows, rounding, names, tokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.demo.convert import _write_safetensors, to_bfloat16, unpermute
from headrace.cli.demo.model import NAME, ensure
from headrace.shared import settings

Array = np.ndarray[Any, Any]


def permute(weight: Array, num_heads: int) -> Array:
    """Return rows as GGUF stores them: the two halves of a head interleaved."""
    half = weight.shape[0] // num_heads // 2
    order = [
        head * 2 * half + part * half + row
        for head in range(num_heads)
        for row in range(half)
        for part in range(2)
    ]
    return weight[order]


@given(st.integers(1, 9), st.integers(1, 32), st.integers(1, 8))
def test_unpermute_takes_back_what_gguf_did_to_the_rows(
    num_heads: int, half: int, columns: int
) -> None:
    rows = num_heads * half * 2
    weight = np.arange(rows * columns).reshape(rows, columns)
    assert np.array_equal(unpermute(permute(weight, num_heads), num_heads), weight)


def test_unpermute_puts_the_even_rows_of_a_head_before_the_odd_ones() -> None:
    weight = np.arange(8).reshape(8, 1)
    assert unpermute(weight, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@given(
    st.floats(
        width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126
    )
)
def test_bfloat16_is_the_nearest_one(value: float) -> None:
    bits = int(to_bfloat16(np.array([value], dtype=np.float32))[0])

    def as_float(number: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", number << 16))[0])

    neighbours = [bits - 1, bits, bits + 1] if bits & 0x7FFF else [bits, bits + 1]
    assert abs(as_float(bits) - value) == min(abs(as_float(near) - value) for near in neighbours)


@pytest.mark.parametrize(("bits", "rounded"), [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82)])
def test_bfloat16_rounds_a_tie_to_even(bits: int, rounded: int) -> None:
    value = np.array([bits], dtype=np.uint32).view(np.float32)
    assert to_bfloat16(value).tolist() == [rounded]


def test_safetensors_reads_back_what_is_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    _write_safetensors(tmp_path / "model.safetensors", {"a": bits, "bee": bits[:1] + 7})
    read = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert [read[name]["shape"] for name in ("a", "bee")] == [[2, 3], [1, 3]]
    assert read["a"]["dtype"] == "BF16"
    assert bytes(read["bee"]["data"]) == (bits[:1] + 7).tobytes()


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the demo model in its usual place; seconds, where it was not made yet."""
    return ensure(settings.home())


def test_the_config_is_smollm2s(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert folder.name == NAME
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (
        576,
        30,
        49152,
    )
    assert (config["bos_token_id"], config["eos_token_id"], config["rope_theta"]) == (1, 2, 100000)


def test_the_tokenizer_splits_digits_and_knows_the_chat_tokens(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12 345").tokens == ["1", "2", "Ġ", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[0] == 1
    assert tokenizer.encode("Hi<|im_end|>").ids[-1] == 2
    text = "  Größe 日本 👩‍🚀\n\n don't\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([1, *tokenizer.encode("Hi").ids, 2]) == "Hi"


def test_the_tokenizer_class_is_one_that_keeps_tokenizer_json_as_it_is(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["eos_token"] == "<|im_end|>"
    assert "<|im_start|>assistant" in config["chat_template"]
