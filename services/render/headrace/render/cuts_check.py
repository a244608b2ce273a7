"""A look, at start, whether pieces of text give what the whole gives, with this release of the tokenizers library.

What `cuts` knows of tokenizers is read off their code. This tries it, on texts that put beside a cut what could reach
across it: spaces, half tokens, combining marks, other added tokens.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from headrace.render.cuts import Cuts, cut_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_TEXTS = 256
PARTS_A_TEXT = 12
_PARTS = (
    *("", " ", "  ", "\n", "\n\n", "\t ", "\u00a0", "\u3000", "\u200b", "\r\n"),
    *("the", " the", "The ", "word's", "user\n", "12345", "3.14", "x=1;", "...", "'s", "_", "-"),
    *(
        "e\u0301",
        "\u0301",
        "\u212b",
        "\ufb01",
        "\u1112\u1161\u11ab",
        "\uc548",
        "\u8a9e",
        "\U0001f469\u200d\U0001f4bb",
        "\ufe0f",
    ),
    *(
        "\u2581",
        "\u2581the",
        "\u0120the",
        "##ing",
        "<0x0A>",
        "\x00",
        "\ufffd",
        "<",
        "<|",
        "|>",
        "[",
        "/",
    ),
)

TokenIdsOf: TypeAlias = "Callable[[list[bytes]], list[array[int]]]"


def holds(cut: Cuts, token_ids_of: TokenIdsOf, tokenizer: Tokenizer) -> bool:
    """Whether random texts have the same token IDs in pieces and as a whole.

    `token_ids_of`: the token IDs of each of some texts.
    """
    chance = random.Random(0)
    tokens = cut_tokens(tokenizer)
    others = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    halves = [token[: len(token) // 2] for token in tokens] + [token[1:] for token in tokens]
    kinds = (_PARTS, _PARTS, tokens, tokens, others, halves)
    texts = [
        "".join(chance.choice(chance.choice(kinds)) for _ in range(PARTS_A_TEXT)).encode()
        for _ in range(NUM_TEXTS)
    ]
    for text, whole in zip(texts, token_ids_of(texts), strict=True):
        pieces = token_ids_of(cut.pieces(text))
        if [token_id for piece in pieces for token_id in piece] != whole.tolist():
            return False
    return True
