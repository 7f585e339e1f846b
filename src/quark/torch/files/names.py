"""The names that stored tensors have in a model.

transformers renames tensors of some architectures while it loads them, and so does the model in memory. A new name is
taken where the model has it and has not the old one. Experts get the names of the layers that stacked experts are taken
apart into. Not handled: conversions that compute (they join experts, which stay apart here).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

Rename = Callable[[str], str]


def names_in_memory(
    stored: Iterable[str], known: Collection[str], renames: Iterable[Rename], layers: Mapping[str, str]
) -> dict[str, str]:
    """The name in memory of every stored tensor.

    Args:
        stored: names in files.
        known: names that the model has.
        renames: what the architecture's loader does to a name, in order.
        layers: names in memory of layers by those outside (``quark.torch.export.original``).
    """
    found, steps = {}, list(renames)
    for name in stored:
        owner, _, own = name.rpartition(".")
        new = f"{layers[owner]}.{own}" if owner in layers else name
        new = renamed(new, steps) if new == name else new
        found[name] = new if name not in known and new in known else name
    return found


def renamed(name: str, steps: Iterable[Rename]) -> str:
    """A name after all steps."""
    for rename in steps:
        name = rename(name)
    return name


def renames_of(model: nn.Module) -> list[Rename]:
    """What transformers does to the names of this architecture; nothing where it does not say."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        return []
    if not hasattr(model, "base_model_prefix"):
        return []
    library: Any = model
    steps: list[Any] = get_model_conversion_mapping(library)
    return [rename_of(step) for step in steps if isinstance(step, WeightRenaming)]


def rename_of(step: Any) -> Rename:
    """One renaming of transformers as a function."""
    return lambda name: str(step.rename_source_key(name)[0])
