"""``sdp generate DIR PROMPT``: continues a text with the full model of a run.

DIR may also be a model in Hugging Face's format. ``generate`` of transformers does the work.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from ..data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from ..engine.errors import ConfigError, escape, shorten
from ..models.huggingface import build_from
from ..models.registry import build_model, huggingface_config
from .runs import saved_run
from .runs.saved_run import CheckpointChoice, SavedRun
from .runs.start_files import has_tokenizer
from .runs.whole_model import IN_ONE_PROCESS, check_exportable, whole_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    saved_run.add_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=64, help="largest number of tokens to add (default: 64)"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="sample with this temperature; 0 takes the likeliest token (default: as generation_config.json says)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the random numbers (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Continue a text and print it.

    Raises an SDPError if the model or its tokenizer cannot be read.
    """
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {args.max_new_tokens}: at least one token is needed")
    if args.temperature is not None and not 0 <= args.temperature < 100:
        raise ConfigError(f"--temperature {args.temperature:g}: give 0 or more; 0 takes the likeliest token")
    choice = CheckpointChoice.from_args(args)
    print(escape(saved_run.use(choice, lambda saved: _generate(saved, args), IN_ONE_PROCESS)))
    return 0


def _generate(saved: SavedRun, args: argparse.Namespace) -> str:
    check_exportable(saved, "sdp generate")
    if saved.config.sdp.paths is not None and saved.config.sdp.paths.count > 1:
        raise ConfigError(
            f"sdp generate: {saved.dump_dir} has several paths; run sdp export, and give the folder of one path"
        )
    text = _tokenizer(saved)
    if isinstance(text, HuggingFaceTokenizer):
        begin, ids = text.begin_of_text, text.encode_prompt(args.prompt)
    else:
        begin, ids = text.end_of_text, text.encode(args.prompt)
    with whole_model(saved, _model(saved, text.vocab_size)) as model:
        given = torch.tensor([ids or [begin]], device=model.device)
        torch.manual_seed(args.seed)
        made = model.module.generate(  # type: ignore[operator]
            given, attention_mask=torch.ones_like(given), **_settings(saved, text, args)
        )
    return text.decode([token for token in made[0].tolist() if token != begin])


def _tokenizer(saved: SavedRun) -> Tokenizer:
    if has_tokenizer(saved.described_in):
        return HuggingFaceTokenizer(str(saved.described_in))
    return load_tokenizer(saved.data)


def _model(saved: SavedRun, vocab_size: int) -> nn.Module:
    if saved.config.model["name"] == "huggingface":
        return build_model(saved.config.model)
    return build_from(huggingface_config(saved.config.model, vocab_size))


def _settings(saved: SavedRun, text: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import GenerationConfig

    settings, file = GenerationConfig(eos_token_id=text.end_of_text), saved.described_in / "generation_config.json"
    try:
        if file.is_file():
            settings = GenerationConfig.from_pretrained(saved.described_in)
        end = settings.eos_token_id
        settings.pad_token_id = end[0] if isinstance(end, list) else end
    except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
        reason = shorten(str(error).strip().partition("\n")[0])
        raise ConfigError(
            f"{file}: not settings for generation that transformers can use ({reason}); correct it"
        ) from None
    if args.temperature is not None:
        settings.do_sample = args.temperature > 0
        settings.temperature = args.temperature or None
    settings.max_length, settings.max_new_tokens, settings.use_cache = None, args.max_new_tokens, True
    return {"generation_config": settings}
