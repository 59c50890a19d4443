"""Small models of transformers, and a network like torchvision's ResNet."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, ROWS = 32, 2
_SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class BasicBlock(nn.Module):
    """The block of torchvision's ResNet-18, with the same names."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + (x if self.downsample is None else self.downsample(x)))


class TorchvisionResNet(nn.Module):
    """torchvision's ResNet-18, with the same names and another width."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        for stage in range(4):
            inputs, outputs = width * 2 ** max(0, stage - 1), width * 2**stage
            blocks = [BasicBlock(inputs, outputs, 2 if stage else 1), BasicBlock(outputs, outputs, 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(8 * width, WORDS)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.bn1(self.conv1(pixel_values)))
        for stage in range(4):
            hidden = self.get_submodule(f"layer{stage + 1}")(hidden)
        return F.cross_entropy(self.fc(hidden.mean((2, 3))), labels)


def _eager_model(hf: Any, kind: str) -> nn.Module:
    """A model whose blocks return attention weights without being asked for them."""
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt = {"n_embd": 8, "n_layer": 3, "n_head": 2}
    name, sizes = {
        "gptj": ("GPTJ", gpt | quiet | {"rotary_dim": 4}),
        "gpt-neo": ("GPTNeo", {"hidden_size": 8, "num_layers": 3, "num_heads": 2, "attention_types": [[["global"], 3]],
            "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 16}),
        "bloom": ("Bloom", {"hidden_size": 8, "n_layer": 3, "n_head": 2}),
        "falcon": ("Falcon", {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}),
    }[kind]  # fmt: skip
    settings = {"vocab_size": WORDS, "attn_implementation": "eager", "use_cache": False} | _TOKENS | sizes
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**settings))


def build(kind: str, blocks: int = 3) -> nn.Module:
    """Build the model ``kind`` without dropout, with seed 0. Chains have two blocks, or ``blocks``.

    The "albert" has one block that it applies four times, the "albert-of-two" applies each of two
    blocks twice.
    """
    hf: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    layers = _SIZES | {"num_hidden_layers": blocks}
    match kind:
        case "torchvision-resnet":
            return TorchvisionResNet()
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **layers))
        case "gpt2":
            quiet = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=blocks, n_head=2, **quiet, **_TOKENS)
            )
        case "gptj" | "gpt-neo" | "bloom" | "falcon":
            return _eager_model(hf, kind)
        case "albert" | "albert-of-two":
            shared = {"embedding_size": 8, "num_hidden_groups": 2 if kind == "albert-of-two" else 1}
            return hf.AlbertForMaskedLM(
                hf.AlbertConfig(vocab_size=WORDS, **(layers | {"num_hidden_layers": 4}), **_DRY, **shared)
            )
        case "mixtral":
            return hf.MixtralForCausalLM(
                hf.MixtralConfig(vocab_size=WORDS, num_key_value_heads=1, num_local_experts=2, **layers)
            )
        case "bert":
            return hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, max_position_embeddings=16, **layers, **_DRY))
        case "vit":
            return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, num_labels=WORDS, **layers))
        case "t5":
            sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 3, "num_heads": 2}
            return hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=WORDS, dropout_rate=0, decoder_start_token_id=0, **sizes)
            )
        case "whisper":
            halves = {
                f"{half}_{key}": value
                for half in ("encoder", "decoder")
                for key, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 12}.items()
            }
            sizes = {"d_model": 8, "num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 8}
            return hf.WhisperForConditionalGeneration(
                hf.WhisperConfig(vocab_size=WORDS, dropout=0, decoder_start_token_id=1, **_TOKENS, **halves, **sizes)
            )
        case "swin":
            return hf.SwinForImageClassification(
                hf.SwinConfig(
                    image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
                    num_labels=WORDS, drop_path_rate=0, **_DRY,
                )
            )  # fmt: skip
        case "resnet":
            sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 3], "num_labels": WORDS}
            return hf.ResNetForImageClassification(hf.ResNetConfig(layer_type="basic", **sizes))
    raise ValueError(kind)


def make_batch(kind: str, seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, WORDS, (rows, 5), generator=generator)
    sides = {"vit": 8, "swin": 16, "resnet": 16, "torchvision-resnet": 32}
    if kind in sides:
        return {
            "pixel_values": torch.randn(rows, 3, sides[kind], sides[kind], generator=generator),
            "labels": labels[:, 0],
        }
    if kind == "whisper":
        return {"input_features": torch.randn(rows, 4, 12, generator=generator), "labels": labels}
    return {"input_ids": torch.randint(1, WORDS, (rows, 5), generator=generator), "labels": labels}
