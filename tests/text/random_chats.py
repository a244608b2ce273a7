"""Chats of many turns, made of what could come out otherwise when a text is tokenized in pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_WORDS = (
    *("the", " the", "The ", "quick", " brown ", "word's", "user\n", "12345", "3.14159", "x = 1;"),
    *("...", "'s", "_", "-", " dog ", "dogs", "https://example.com/a?b=c", "antidisestablishment"),
    *("", " ", "  ", "     ", "\n", "\n\n\n", "\t ", "\u00a0", "\u3000", "\u200b", "\r\n", "\x00"),
    *("e\u0301", "\u0301", "\u00e9", "\u212b", "\ufb01", "\u1112\u1161\u11ab", "\uc548\ub155"),
    *("\u8a9e\u5b66", "\U0001f469\u200d\U0001f4bb", "\ufe0f", "\u05e9\u05dc\u05d5\u05dd", "\ufffd"),
    *("\u2581", "\u2581the", "\u0120the", "##ing", "<0x0A>", "<", "<|", "|>", "[", "]", "/", "</"),
)
#: added tokens of some family, and halves of them
_MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|im_", "|><|", "_end|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "<SPECIAL_20>", "<mask>", " <mask>", "<tool>", "[A]", "[A][A]", "[A][A][A]"),
    *(
        "<|endoftext|>",
        "<repo_name>",
        "[UNK]",
        "<unk>",
        "ST]",
        "<|im_end|>  ",
        "\u0301<|im_end|>\u0301",
    ),
)


def chats(num: int, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Yield so many chats of 1 to 6 turns; some go on from an earlier one, as a client's next turn does."""
    chance = random.Random(seed)
    earlier: list[list[dict[str, str]]] = []
    for _ in range(num):
        messages: list[dict[str, str]] = []
        if earlier and chance.random() < 0.7:
            base = chance.choice(earlier)
            messages = base[: chance.randint(1, len(base))]
        elif chance.random() < 0.6:
            messages = [{"role": "system", "content": _text(chance)}]
        while messages and messages[-1]["role"] == "user":
            messages.pop()
        for turn in range(chance.randint(1, 6)):
            if turn:
                messages.append({"role": "assistant", "content": _text(chance)})
            messages.append({"role": "user", "content": _text(chance)})
        earlier = [*earlier[-20:], messages]
        yield messages


def body(messages: list[dict[str, str]], **more: Any) -> bytes:
    """Return a request for the chat's next message."""
    return json.dumps({"messages": messages, "max_tokens": 8, **more}).encode()


def _text(chance: random.Random) -> str:
    kinds = (_WORDS, _WORDS, _WORDS, _MARKERS)
    return "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(0, 40)))
