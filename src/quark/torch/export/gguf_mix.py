"""A float language model as a GGUF file of types that are asked for: which linear layer gets which, and its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from quark.errors import ConfigError, check_name, unknown
from quark.torch.export.gguf_tensors import FLOATS, TYPES, check_rows, rounded


def read_types(texts: Sequence[str]) -> dict[str, str]:
    """Types by glob of layers, of ``TYPE`` (all layers) and ``GLOB=TYPE``; a later one goes before an earlier one.

    Raises:
        ConfigError: no type of GGUF.
    """
    found: dict[str, str] = {}
    for text in texts:
        glob, _, kind = text.rpartition("=")
        check_name("--gguf-type", kind, TYPES)
        found[glob or "*"] = kind
    return found


def types_of(model: nn.Module, wanted: Mapping[str, str], floats: Sequence[str]) -> dict[str, str]:
    """The type of every linear layer but the output, of a model whose experts are taken apart.

    Layers with one output (the gate of a shared expert) are vectors in the file, which llama.cpp keeps whole.

    Args:
        model: float.
        wanted: types by glob; the last that fits counts.
        floats: globs of layers that stay F16.

    Raises:
        ConfigError: a glob that fits no layer, layers without a type, or rows that blocks do not divide.
    """
    linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    lengths = {name: one.in_features for name, one in linear.items() if one.out_features > 1}
    names = [name for name in lengths if "lm_head" not in name]
    given = [*wanted.items(), *((glob, "F16") for glob in floats if glob != "lm_head")]
    found: dict[str, str] = {}
    for glob, kind in given:
        matched = [name for name in names if fnmatchcase(name, glob)]
        if not matched:
            raise ConfigError(unknown("layer", glob, names))
        found |= dict.fromkeys(matched, kind)
    if left := [name for name in names if name not in found]:
        raise ConfigError(f"{left[0]!r} has no type; --gguf-type TYPE without a glob is that of all other layers")
    for name, kind in found.items():
        check_rows(f"{name}.weight", kind, lengths[name])
    return found


@torch.no_grad()
def take_values(model: nn.Module, types: Mapping[str, str], whole: Collection[str]) -> None:
    """Give layers the values that a file of ``types`` holds, so that what is measured is what the file has.

    Args:
        model: as for ``types_of``; changed.
        types: of its layers.
        whole: tensors that were kept as F32.
    """
    import gguf

    for name, kind in types.items():
        weight = model.get_submodule(name)._parameters["weight"]
        if kind == "F32" or weight is None or f"{name}.weight" in whole:
            continue
        data = rounded(weight.detach().float().numpy(force=True), kind)
        values = data if kind == "F16" else gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        weight.copy_(torch.from_numpy(values.astype("float32").reshape(weight.shape)))


def stored_bytes(model: nn.Module, types: Mapping[str, str], whole: Collection[str]) -> tuple[dict[str, int], ...]:
    """Bytes of the tensors that become codes, and of the others, in the model's type."""
    sizes = {name: one.numel() * one.element_size() for name, one in model.named_parameters()}
    codes = {f"{name}.weight" for name, kind in types.items() if kind not in FLOATS} - set(whole)
    return (
        {name: size for name, size in sizes.items() if name in codes},
        {name: size for name, size in sizes.items() if name not in codes},
    )
