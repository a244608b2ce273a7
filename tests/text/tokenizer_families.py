"""Model folders without weights, each with a tokenizer of another make: what packages bring, and some trained here.

They differ in what could reach across a cut: prefix spaces, normalizers, bytes as a last resort, how words are cut.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.shared.contract import model_path
from headrace.shared.settings import Settings

MAX_MODEL_LEN = 65_536

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_CORPUS = (
    "the quick brown fox jumps over a lazy dog while seven small planets orbit around bright suns",
    "The user asked: what's the weather in Paris? The assistant answered, it's 21.5 degrees.",
    "def main(argv):\n    return {'x': 1}  # naïve café, Ångström, ﬁne\n",
    "語学 한국어 Ελληνικά русский עברית e\u0301 \u212b \U0001f469\u200d\U0001f4bb",
)


def _demo(folder: Path) -> tuple[Any, str]:
    """Byte-level BPE, digits one by one: SmolLM2."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path(Settings()))
    return tokenizer, tokenizer.chat_template


def _tekken(folder: Path) -> tuple[Any, str]:
    """Byte-level BPE on words of a regular expression, 1,000 special tokens: Mistral's Tekken."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    return convert_tekken_tokenizer(str(_mistral_data() / "tekken_240911.json")), _MISTRAL


def _sentencepiece(prepend: str) -> Callable[[Path], tuple[Any, str]]:
    def make(folder: Path) -> tuple[Any, str]:
        """SentencePiece's BPE with bytes as a last resort, whole texts at once: Mistral 7B v0.3."""
        from transformers import LlamaTokenizer

        source = _mistral_data() / "mistral_instruct_tokenizer_240323.model.v3"
        shutil.copy(source, folder / "tokenizer.model")
        tokenizer = LlamaTokenizer.from_pretrained(str(folder), legacy=prepend == "always")
        (folder / "tokenizer.model").unlink()
        return tokenizer, _MISTRAL

    return make


def _mistral_data() -> Path:
    import mistral_common

    return Path(mistral_common.__file__).parent / "data"


def _unigram(folder: Path) -> tuple[Any, str]:
    """SentencePiece's unigram model as T5 has it: NFKC, runs of spaces made one, a space before the text."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"], unk_token="<unk>"
    )
    return _trained(backend, trainer), _CHATML


def _wordpiece(folder: Path) -> tuple[Any, str]:
    """WordPiece in lower case without accents, with a token ID of its own at either end of a text: BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]", "<|im_start|>", "<|im_end|>"]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return _trained(backend, trainer), _CHATML


def _odd(folder: Path) -> tuple[Any, str]:
    """Byte-level BPE with every kind of added token: they take spaces, overlap, or are found in normalized text."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[
            AddedToken("<|im_start|>", normalized=False, special=True),
            AddedToken("<|im_end|>", rstrip=True, normalized=False, special=True),
            AddedToken("<mask>", lstrip=True, normalized=False, special=True),
            AddedToken("dog", single_word=True, normalized=False),
            AddedToken("|><|", normalized=False),
            AddedToken("<|im_", normalized=False),
            AddedToken("\u00e9", normalized=True),
            AddedToken("[A]", normalized=False),
            AddedToken("[A][A]", normalized=False),
            AddedToken("<tool>", normalized=False),
        ],
    )
    return _trained(backend, trainer), _CHATML


def _trained(backend: Any, trainer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend.train_from_iterator(_CORPUS * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


FAMILIES: dict[str, Callable[[Path], tuple[Any, str]]] = {
    "demo": _demo,
    "tekken": _tekken,
    "sentencepiece, spaced once": _sentencepiece("first"),
    "sentencepiece, spaced always": _sentencepiece("always"),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "odd": _odd,
}


def make(family: str, folder: Path) -> Path:
    """Make the folder of a family."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, template = FAMILIES[family](folder)
    tokenizer.chat_template = template
    tokenizer.model_max_length = MAX_MODEL_LEN
    tokenizer.save_pretrained(str(folder))
    config = json.loads((Path(model_path(Settings())) / "config.json").read_text())
    config |= {"max_position_embeddings": MAX_MODEL_LEN, "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
