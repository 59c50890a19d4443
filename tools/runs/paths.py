"""``sdp.load_paths``: loads the models that a run with ``sdp.paths`` trained, and their router."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.clusters import Router, load_router
from ...engine.errors import ConfigError, DataError, ModelError, shorten

ROUTER = "router"  # the folder of an export with the router


def path_folder(out: Path, path: int) -> Path:
    """Return the folder of the path with number ``path`` in an export."""
    return out / f"path-{path}"


def load_paths(folder: str | Path, device: str | torch.device = "cpu") -> Paths:
    """Load the models (paths) of a run with ``sdp.paths``, as ``sdp export`` wrote them.

    Args:
        folder: The folder of the export. It has a folder for each path, and the router if the run
            had one.
        device: The device that models are loaded to.

    Raises:
        ConfigError: The folder has no paths.
        DataError: The router is damaged.
    """
    folder = Path(folder)
    count = len([*folder.glob("path-*/config.json")])
    if not count or not all((path_folder(folder, path) / "config.json").is_file() for path in range(count)):
        raise ConfigError(
            f"{folder}: has no path-0, path-1, …; give the folder that sdp export wrote for a run of paths"
        )
    router = load_router(folder / ROUTER) if (folder / ROUTER).exists() else None
    if router is not None and router.count != count:
        raise ConfigError(f"{folder}: has {count} paths, but a router for {router.count}; export the run again")
    return Paths(folder, count, router, torch.device(device))


class Paths:
    """The models of a run with ``sdp.paths``, which share blocks, and a router.

    The router chooses a model for a text. A model is loaded when it is first needed, and stays in
    memory. :func:`load_paths` makes this object.

    Args:
        folder: The folder of the export.
        count: The number of paths.
        router: Chooses a path for a text. If None, the caller must name a path.
        device: The device that models are loaded to.
    """

    def __init__(self, folder: Path, count: int, router: Router | None, device: torch.device):
        self.folder, self.count, self.router, self.device = folder, count, router, device
        self._models: dict[int, nn.Module] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of all paths. It is a tokenizer of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path_folder(self.folder, 0), local_files_only=True)

    def model(self, path: int) -> Any:
        """Return the transformers model of a path, in evaluation mode.

        Raises:
            ConfigError: There is no such path.
            ModelError: The model cannot be loaded.
        """
        if path not in range(self.count):
            raise ConfigError(f"{self.folder}: path {path!r} does not exist; there are paths 0 to {self.count - 1}")
        if path not in self._models:
            from transformers import AutoModelForCausalLM

            folder = path_folder(self.folder, path)
            try:
                model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
            except (OSError, ValueError, RuntimeError) as error:
                raise ModelError(f"{folder}: cannot be loaded ({shorten(error)}); export the run again") from error
            self._models[path] = model.to(self.device).eval()
        return self._models[path]

    def route(self, text: str) -> int:
        """Return the number of the path that the router chooses from the first tokens of ``text``.

        Raises:
            ConfigError: There is no router.
            DataError: The text has fewer than two tokens, which is too little for the router.
        """
        if self.router is None:
            raise ConfigError(
                f"{self.folder}: has no router, because each path was trained on one source; name the path"
            )
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # as the corpus was made
        if len(tokens) < 2:
            raise DataError(
                "load_paths: the router needs a text of two tokens or more; give a longer text, or name a path"
            )
        return int(self.router.route(np.array([tokens]))[0])

    def generate(self, prompt: str, path: int | None = None, max_new_tokens: int = 64, **options: Any) -> str:
        """Return ``prompt`` with its continuation by one path.

        Args:
            prompt: The text to continue.
            path: The number of the path. If None, the router chooses one from the prompt.
            max_new_tokens: The largest number of tokens to add.
            **options: Further options of the model's ``generate``.

        Raises:
            ConfigError: There is no such path, or no router.
            DataError: The prompt is too short for the router.
        """
        model = self.model(self.route(prompt) if path is None else path)
        given = self.tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.device)
        settings = {"pad_token_id": self.tokenizer.eos_token_id, "max_new_tokens": max_new_tokens} | options
        with torch.no_grad():
            made = model.generate(given, attention_mask=torch.ones_like(given), **settings)
        return self.tokenizer.decode(made[0], skip_special_tokens=True)
