"""A text is cut only where its pieces have the token IDs of the whole."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.render import cuts_check
from headrace.render.cuts import Cuts, cut_tokens, refusal

tokenizers = pytest.importorskip("tokenizers")

PLAIN = {"normalized": False, "special": True}
TEXTS = ("the dog and the log", "user: what's up, dog?", "naïve café 12345", "\u212b e\u0301")


def made(*added: Any, prepend: str = "first", normalizer: Any = None) -> Any:
    """Return a tokenizer of SentencePiece's kind with these added tokens, `(content, options)`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.train_from_iterator(TEXTS * 9, tokenizers.trainers.BpeTrainer(vocab_size=200))
    tokenizer.add_tokens([tokenizers.AddedToken(text, **options) for text, options in added])
    return tokenizer


CHAT = (("<|start|>", PLAIN), ("<|end|>", PLAIN))


def token_ids_of(tokenizer: Any) -> cuts_check.TokenIdsOf:
    def of(pieces: list[bytes]) -> list[array[int]]:
        texts = [piece.decode() for piece in pieces]
        return [
            array("I", encoding.ids)
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

    return of


def holds(tokenizer: Any, tokens: list[str]) -> bool:
    return cuts_check.holds(Cuts(tokens), token_ids_of(tokenizer), tokenizer)


def test_each_piece_but_the_first_begins_with_a_token() -> None:
    pieces = Cuts(["<|start|>", "<|end|>", "[X]"]).pieces("é<|start|>a[X]<|end|><|end".encode())
    assert pieces == ["é".encode(), b"<|start|>a", b"[X]", b"<|end|><|end"]
    assert Cuts(["[X]"]).pieces(b"[X]") == [b"[X]"]
    assert Cuts(["[X]"]).pieces(b"") == []


def test_many_tokens_that_begin_alike_are_each_found() -> None:
    tokens = [f"<|reserved_{n:03}|>" for n in range(300)] + ["[INST]", "[/INST]", "<s>", "<é>"]
    text = "a".join(tokens).encode()
    assert Cuts(tokens).pieces(text) == [f"{t}a".encode() for t in tokens[:-1]] + ["<é>".encode()]


@pytest.mark.parametrize("prepend", ["first", "always", "never"])
def test_a_text_may_be_cut_at_plain_added_tokens(prepend: str) -> None:
    tokenizer = made(*CHAT, prepend=prepend)
    assert refusal(tokenizer) == ""
    assert cut_tokens(tokenizer) == ["<|end|>", "<|start|>"]
    assert holds(tokenizer, cut_tokens(tokenizer))


UNSAFE = {
    "takes spaces before it": [("<mask>", {"lstrip": True})],
    "found only beside no letter": [("<w>", {"single_word": True})],
    "found in normalized text": [("<n>", {"normalized": True})],
    "begins with a letter": [("w>", {}), ("dog", {"single_word": True})],
    "begins with a space": [(" <b>", {}), ("<r>", {"rstrip": True})],
    "part of a longer one": [("<c>", {}), ("<a><c>", {})],
    "its end begins another": [("<a|", {}), ("|b>", {})],
    "two of it share characters": [("[|[", {})],
}


@pytest.mark.parametrize("added", UNSAFE.values(), ids=UNSAFE)
def test_a_token_whose_neighbours_matter_is_no_place_to_cut(added: list[Any]) -> None:
    tokenizer = made(*CHAT, *((text, {**PLAIN, **more}) for text, more in added))
    unsafe = added[0][0]
    assert unsafe not in cut_tokens(tokenizer)
    assert {"<|end|>", "<|start|>"} <= set(cut_tokens(tokenizer))
    assert holds(tokenizer, cut_tokens(tokenizer))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("takes spaces before it", "the  <mask> dog"),
        ("found only beside no letter", "x<w>"),
        ("part of a longer one", "<a><c>"),
        ("its end begins another", "<a|b>"),
    ],
)
def test_a_cut_there_would_give_other_token_ids(name: str, text: str) -> None:
    added = UNSAFE[name]
    tokenizer = made(*CHAT, *((token, {**PLAIN, **more}) for token, more in added))
    assert any(differs(tokenizer, token, text) for token, _ in added)


def differs(tokenizer: Any, token: str, text: str) -> bool:
    """Return whether a cut at a token changes the token IDs of a text."""
    of = token_ids_of(tokenizer)
    pieces = of(Cuts([token]).pieces(text.encode()))
    return [i for piece in pieces for i in piece] != of([text.encode()])[0].tolist()


def test_a_tokenizer_of_which_something_is_unknown_is_refused() -> None:
    class Own:
        def normalize(self, normalized: Any) -> None:
            normalized.uppercase()

        def pre_tokenize(self, pretok: Any) -> None:
            pass

    own = tokenizers.normalizers.Normalizer.custom(Own())
    assert refusal(made(*CHAT, normalizer=own)) == "nothing is known of its Normalizer"
    both = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC(), own])
    assert refusal(made(*CHAT, normalizer=both)) == "nothing is known of its Normalizer"
    tokenizer = made(*CHAT)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Own())
    assert refusal(tokenizer) == "nothing is known of its PreTokenizer"


def test_a_tokenizer_that_gives_other_token_ids_each_time_is_refused() -> None:
    tokenizer = made(*CHAT)
    tokenizer.model.dropout = 0.5
    assert "at random" in refusal(tokenizer)


def test_a_tokenizer_that_takes_special_tokens_apart_is_refused() -> None:
    tokenizer = made(*CHAT)
    tokenizer.encode_special_tokens = True
    assert "takes special tokens apart" in refusal(tokenizer)


def test_a_tokenizer_without_a_place_to_cut_is_refused() -> None:
    assert "no added token" in refusal(made())


def test_the_check_finds_a_tokenizer_that_sees_across_a_cut() -> None:
    tokenizer = made(*CHAT, ("<mask>", {**PLAIN, "lstrip": True}))
    assert not holds(tokenizer, ["<mask>"])


@pytest.fixture(scope="module")
def families() -> list[Any]:
    """Tokenizers of other kinds: what they do to a piece differs."""
    kinds = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.models
    normalizers, pre_tokenizers, models = kinds
    found = [made(*CHAT), made(*CHAT, prepend="always", normalizer=normalizers.NFKC())]
    bytes_level = tokenizers.Tokenizer(models.BPE())
    bytes_level.normalizer = normalizers.NFC()
    bytes_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bytes_level.train_from_iterator(TEXTS * 9, trainer)
    words = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(
        TEXTS * 9, tokenizers.trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"])
    )
    llama = tokenizers.Tokenizer(models.BPE(fuse_unk=True))
    llama.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    llama.train_from_iterator(TEXTS * 9, tokenizers.trainers.BpeTrainer(vocab_size=300))
    for tokenizer in (bytes_level, words, llama):
        tokenizer.add_tokens([tokenizers.AddedToken(text, **options) for text, options in CHAT])
        tokenizer.add_tokens([tokenizers.AddedToken("<r>", rstrip=True, **PLAIN)])
        tokenizer.add_tokens([tokenizers.AddedToken("<m>", lstrip=True, **PLAIN)])
    return [*found, bytes_level, words, llama]


PARTS = st.sampled_from(
    ["<|start|>", "<|end|>", "<r>", "<m>", "<|", "|>", "dog", " ", "  ", "\n", "\u0301", "\u2581"]
)


@given(st.lists(PARTS | st.text(max_size=4), max_size=12).map("".join))
def test_pieces_have_the_token_ids_of_the_whole(families: list[Any], text: str) -> None:
    data = text.encode(errors="ignore")
    for tokenizer in families:
        of = token_ids_of(tokenizer)
        pieces = of(Cuts(cut_tokens(tokenizer)).pieces(data))
        assert [i for piece in pieces for i in piece] == of([data])[0].tolist(), tokenizer
