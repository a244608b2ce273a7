"""Turns SmolLM2's GGUF file into what vLLM and transformers load: weights, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

CONTROL = 3  #: a special token, as GGUF numbers the kinds of tokens
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert(source: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
    """Write the model in the GGUF file `source` into an empty folder.

    Raises: ImportError without gguf and numpy.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    for name, content in _text_files(facts).items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
    tensors = dict(_tensors(reader, facts, progress))
    _write_safetensors(folder / "model.safetensors", tensors)


def unpermute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return q's or k's rows in Hugging Face's order: the two halves of a head one after the other.

    GGUF interleaves them, because llama.cpp rotates neighbouring pairs, not halves.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return finite float32 values as the bits of bfloat16, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write bfloat16 bits: length of the header in 8 bytes, the header as JSON, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, bits in tensors.items():
        begin, end = end, end + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin on a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.data)


def _tensors(
    reader: GGUFReader, facts: dict[str, Any], progress: Callable[[str], None]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    from gguf import dequantize

    heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    for number, tensor in enumerate(reader.tensors):
        if number % 90 == 0:
            progress(f"converting tensor {number + 1} of {len(reader.tensors)}")
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        yield _hub_name(tensor.name), to_bfloat16(weight)


def _hub_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return f"{TOP_NAMES[parts[0]]}.weight"


def _text_files(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what stands beside the weights: file name to JSON content."""
    bos, eos, pad = (facts[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding"))
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    hidden, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **ids,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": facts["llama.vocab_size"],
    }
    return {
        "config.json": config,
        "generation_config.json": {"_from_model_config": True, **ids},
        "tokenizer.json": _tokenizer(facts),
        "tokenizer_config.json": _tokenizer_config(facts),
    }


def _tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """Return SmolLM2's tokenizer: every digit alone, then byte-level BPE as GPT-2's."""
    tokens = facts["tokenizer.ggml.tokens"]
    kinds = facts["tokenizer.ggml.token_type"]
    plain = {
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **plain}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
            ],
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in facts["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    named = {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    return {
        # SmolLM2 says GPT2Tokenizer. transformers 5 rebuilds that one, without the split of digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        **named,
        "additional_special_tokens": [named["bos_token"], named["eos_token"]],
        "chat_template": facts["tokenizer.chat_template"],
    }
