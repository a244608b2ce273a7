"""Where a text can be cut so that its pieces, tokenized apart, give the token IDs of the whole.

A tokenizer of the `tokenizers` library splits the raw text at its added tokens before anything else. Normalizer,
pre-tokenizer and model then see one piece at a time, and nothing of its neighbours (docs/adr/0012). So a cut in front
of an added token changes nothing, as long as the token is found there whatever else the text holds. `refusal` and
`cut_tokens` look at how a tokenizer is built, and take only what is known to be so.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

#: Each works on one piece, by that piece alone. `Metaspace` may also ask whether it is the first one of the text:
#: what comes behind a cut is not, for the token in front of it is cut off with it.
_NORMALIZERS = frozenset(
    "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence Strip"
    " StripAccents".split()
)
_PRE_TOKENIZERS = frozenset(
    "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation Sequence Split"
    " UnicodeScripts Whitespace WhitespaceSplit".split()
)
_MODELS = frozenset("BPE Unigram WordLevel WordPiece".split())
#: They add token IDs at the ends of a text, or none.
_POST_PROCESSORS = frozenset(
    "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing".split()
)


def refusal(tokenizer: Tokenizer) -> str:
    """Return why a text must not be cut for this tokenizer; empty: it may be."""
    for part, known in (
        (tokenizer.normalizer, _NORMALIZERS),
        (tokenizer.pre_tokenizer, _PRE_TOKENIZERS),
        (tokenizer.model, _MODELS),
        (tokenizer.post_processor, _POST_PROCESSORS),
    ):
        for name in _names(part):
            if name not in known:
                return f"nothing is known of its {name}"
    if _drops_merges(tokenizer.model):
        return "its model drops merges at random"
    if tokenizer.encode_special_tokens:
        return "it takes special tokens apart"
    if not cut_tokens(tokenizer):
        return "it has no added token at which to cut"
    return ""


def _drops_merges(model: Any) -> bool:
    """Whether the model drops merges at random; only BPE can."""
    return type(model).__name__ == "BPE" and bool(model.dropout)


def _names(part: Any) -> Iterator[str]:
    """Yield the type of a part of a tokenizer, and of the parts of a sequence. A custom one has the base's name."""
    if part is None:
        return
    yield type(part).__name__
    if type(part).__name__ == "Sequence":
        for inner in part:
            yield from _names(inner)


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens that are found wherever they stand in a text, and only by their own characters."""
    raw = [t for t in tokenizer.get_added_tokens_decoder().values() if not t.normalized]
    return sorted(token.content for token in raw if _is_cut(token, raw))


def _is_cut(token: AddedToken, raw: list[AddedToken]) -> bool:
    if token.lstrip or token.single_word:
        return False  # what it takes, or whether it is found at all, depends on the characters before it
    # A space would be taken by a token before it (`rstrip`), and beside a letter a token is not found (`single_word`).
    category = unicodedata.category(token.content[0])
    if category[0] not in "PS" or category == "Pc":
        return False
    return not any(_overlap(token.content, other.content) for other in raw)


def _overlap(one: str, other: str) -> bool:
    """Whether the two can stand in a text so that they share characters; one token too: `aba`, twice in `ababa`."""
    if one != other and (one in other or other in one):
        return True
    return any(
        one.endswith(other[:length]) or other.endswith(one[:length])
        for length in range(1, min(len(one), len(other)))
    )


class Cuts:
    """Cuts texts in front of these tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """`tokens`: as of `cut_tokens`, at least one."""
        words = sorted(token.encode() for token in tokens)
        self._tokens = re.compile(_alternatives(words))

    def pieces(self, text: bytes) -> list[bytes]:
        """Return the pieces of a text in UTF-8, in order; each but the first begins with a token."""
        starts = [match.start() for match in self._tokens.finditer(text)]
        return [text[a:b] for a, b in pairwise([0, *starts, len(text)]) if a < b]


def _alternatives(words: list[bytes]) -> bytes:
    """Return a pattern that matches any of the sorted words, of which none begins another; beginnings are shared.

    A plain alternation would try a thousand reserved tokens one by one at every `<`.
    """
    if len(words) == 1:
        return re.escape(words[0])
    same = next(at for at, (a, b) in enumerate(zip(words[0], words[-1], strict=False)) if a != b)
    rests = [word[same:] for word in words]
    branches = (_alternatives(list(group)) for _, group in groupby(rests, lambda rest: rest[0]))
    return re.escape(words[0][:same]) + b"(?:" + b"|".join(branches) + b")"
