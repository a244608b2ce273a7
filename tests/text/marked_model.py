"""A model folder for parser tests: the demo model's tokenizer, with parsers' markers in place of reserved tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from headrace.shared.contract import model_path
from headrace.shared.settings import Settings

#: the reserved tokens' IDs run from 3 to 16; those that real tokenizers call special come first
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
PLAIN = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
MARKERS = SPECIAL + PLAIN


def make(folder: Path, *, without: frozenset[str] = frozenset()) -> Path:
    """Make the folder; no weights. A marker of `without` is no token of its own."""
    source = Path(model_path(Settings()))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    reserved = [token for token in tokenizer["added_tokens"] if token["id"] >= 3]
    vocab = tokenizer["model"]["vocab"]
    for token, marker in zip(reserved, (m for m in MARKERS if m not in without), strict=False):
        vocab[marker] = vocab.pop(token["content"])
        token["content"], token["special"] = marker, marker in SPECIAL
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder
