"""Texts that a tokenizer must give back unchanged, and a tokenizer made on the spot."""

from pathlib import Path

import pytest

AWKWARD = [
    "", " ", "  lead and trail  ", "a\n\n\n\tb\r\n", "\x00\x01", "▁", " ▁▁ x▁", "é漢字😀\ufeff\u2028",
    "<|endoftext|><unk></s><0x41>",
]  # fmt: skip


def save_byte_level(
    folder: Path, texts: list[str], vocab_size: int = 300, *, prefix: bool = False, **special: str
) -> Path:
    """Train a byte-level BPE of ``transformers`` with special tokens; nothing is downloaded."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet, words = tokenizers.pre_tokenizers.ByteLevel.alphabet(), list(special.values())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=words, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder
