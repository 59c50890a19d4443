"""``sdp.utils.z3_leaf_module``: modules that ZeRO 3 gathers as a whole.

DeepSpeed's own engine reads the mark. FSDP2 gathers whole blocks, so it needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .namespace import attributes

__path__: list[str] = []


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, and return them.

    Args:
        model: The model.
        leaf_module_classes: Classes, or their names, also with the module's path.
        raise_if_not_found: Whether to raise ValueError if the model has no such module.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark off the modules of these classes, and return them."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this one module, or take its mark off."""
    vars(model)["_z3_leaf"] = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed's engine treats the parameter as one of a marked module."""
    return hasattr(parameter, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for module in model.modules() if _is_one_of(module, classes)]
    if not found and raise_if_not_found:
        names = ", ".join(each if isinstance(each, str) else each.__name__ for each in classes)
        raise ValueError(f"the model ({type(model).__name__}) has no module of the classes {names}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_one_of(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> bool:
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return any(each in names if isinstance(each, str) else isinstance(module, each) for each in classes)


__getattr__ = attributes(__name__)
