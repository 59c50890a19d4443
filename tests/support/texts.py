"""Texts that a tokenizer must give back unchanged."""

AWKWARD = [
    "", " ", "  lead and trail  ", "a\n\n\n\tb\r\n", "\x00\x01", "▁", " ▁▁ x▁", "é漢字😀\ufeff\u2028",
    "<|endoftext|><unk></s><0x41>",
]  # fmt: skip
