"""Names and types of the tensors of a GGUF file: known before a value is.

A scheme whose integers have a scale in each 32, MXFP4 and the types of GGML have a type; the table is in
``gguf_tensors.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, as_a
from quark.numerics.elements import Int
from quark.numerics.ggml import GGML
from quark.numerics.ggml_bytes import BLOCK
from quark.numerics.granularity import Channel, Group, Tensor, normal_axis
from quark.torch.config.model import QConfig
from quark.torch.export.gguf_row import Architecture
from quark.torch.export.gguf_size import type_of
from quark.torch.export.layout import BlockLayout, ElementLayout, GgmlLayout, Layout, PairLayout, layout_of
from quark.torch.export.original import FileNames
from quark.torch.export.upright import upright_stages
from quark.torch.matching import match
from quark.torch.quantized_layer import OWN

FLOATS = ("F32", "F16", "BF16")
KINDS = {row.kind: row for row in GGML.values()}
TYPES = (*FLOATS, *KINDS)
WHOLE_NAMES = (  # tensors that llama.cpp has in float32
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight", "conv1d.weight",
    "shortconv.conv.weight", *(f"ssm_conv1d_{name}.weight" for name in "qkv"), "ssm_a", "ssm_d", "ssm_norm.weight",
)  # fmt: skip
WITHIN = re.compile(r"\.block_sparse_moe\.|(\.mixer|(?<=\d))\.(?=experts\.)")  # what the package calls "mlp"
EXPERT = re.compile(r"\.(experts|altup_projections|altup_unembed_projections)\.\d+\.")  # which a file stacks


@dataclass(frozen=True)
class GGUFTarget:
    """What a file is to be made of.

    Attributes:
        row: the architecture.
        config: of the model.
        names: what the package makes of a name.
        outside: names of the original checkpoint, for those that transformers has renamed.
        weight_type: of all linear layers, or None: that of their scheme.
        layer_types: by name or glob of layers, before ``weight_type``.
        float_type: of embeddings and layers that are not quantized.
        is_float: no layer of the model is quantized.
    """

    row: Architecture
    config: Any
    names: tuple[Any, ...]
    outside: FileNames
    weight_type: str | None
    layer_types: Mapping[str, str]
    float_type: str
    is_float: bool

    def type_of(self, layer: str) -> str | None:
        """The type that is asked for, for a layer."""
        found = (kind for glob, kind in self.layer_types.items() if fnmatchcase(layer, glob))
        return next(found, self.weight_type)


def file_names(name: str, choice: GGUFTarget) -> tuple[str, ...]:
    """The names of a tensor in the file: one, or those of its parts.

    Raises:
        ModelError: there is none.
    """
    parts = choice.row.parts_of(name)
    layer = re.search(r"\.(\d+)\.", name)
    if not (layer and parts):
        return (file_name(name, choice),)
    return tuple(f"blk.{layer[1]}.{part}{'' if '.' in part else '.weight'}" for part in parts)


def file_name(name: str, choice: GGUFTarget) -> str:
    """The name of a tensor in the file; experts of a layer have one.

    Raises:
        ModelError: there is none.
    """
    layer, _, slot = name.rpartition(".")
    own = EXPERT.sub(r".\1.", name)
    outside = (f"{choice.outside.layer(layer)}.{slot}", choice.outside.outside(name))
    given = (own, *outside, WITHIN.sub(".mlp.", own), own.removeprefix("transformer."))
    spelled = [
        text.replace("_correction_bias", "_correction.bias").replace("dt_bias", "dt_proj.bias") for text in given
    ]
    tried = (
        (names.get_name(text, try_suffixes=(".weight", ".bias")), text in names and text.endswith(".weight"))
        for names in choice.names
        for text in spelled
    )
    found, whole = next((one for one in tried if one[0] is not None), (None, False))
    if found is None:
        raise ModelError(f"GGUF has no name for the tensor {name!r} of a {choice.config.model_type} model")
    ending = (
        ".bias"
        if slot == "expert_bias"
        else ""
        if whole or found.endswith((".weight", ".bias", "ssm_a", "ssm_d"))
        else ".weight"
    )
    return f"{found}{ending}"


def float_type_of(slot: str, target: str, shape: Sequence[int], choice: GGUFTarget) -> str:
    """The type of a tensor that is not quantized."""
    return "F32" if len(shape) == 1 or slot == "bias" or target.endswith(WHOLE_NAMES) else choice.float_type


def coded_type(name: str, layout: Layout | PairLayout) -> str:
    """The type that holds the codes of a weight.

    Raises:
        ConfigError: none does, or its blocks do not divide the rows.
    """
    if isinstance(layout, GgmlLayout):
        kind = layout.row.kind
    elif isinstance(layout, BlockLayout) and layout.block.name.startswith("mxfp4") and layout.block.size == BLOCK:
        kind = "MXFP4"
    elif isinstance(layout, ElementLayout) and isinstance(layout.element, Int) and fits(layout):
        kind = type_of((layout.stage,))
    else:
        raise ConfigError(
            f"{name!r} is {layout_name(layout)}, which no GGUF type holds; integers of 2 to 4 bits and symmetric int8 "
            f"in groups of a multiple of 32 along the inputs can be, and MXFP4; weight_type rounds to another type"
        )
    check_rows(name, kind, layout.shape[-1])
    return kind


def check_rows(name: str, kind: str, length: int) -> None:
    """Blocks divide the rows."""
    if length % block_of(kind):
        raise ConfigError(
            f"{name!r} has rows of {length} numbers, and {kind} has blocks of {block_of(kind)}; leave it float "
            f"(--exclude {name.removesuffix('.weight')!r}), or use another format"
        )


def block_of(kind: str) -> int:
    """Numbers in a block of a type."""
    return 1 if kind in FLOATS else KINDS[kind].size if kind in KINDS else BLOCK


def check_heads(name: str, kind: str, choice: GGUFTarget) -> None:
    """No block crosses heads of columns that move, and no exponent would have to hold a factor.

    Raises:
        ConfigError: one does.
    """
    if any(part.startswith("attn_k_b") for part in choice.row.parts_of(name)):
        raise ConfigError(
            f"{name!r} has codes of {kind} along its inputs, and llama.cpp has a part of it turned; leave it float "
            f"(--exclude {name.removesuffix('.weight')!r})"
        )
    if kind == "MXFP4" and choice.row.factor_of(name, choice.config) is not None:
        raise ConfigError(
            f"{name!r} is multiplied by a number of config.json that llama.cpp does not read, and scales of MXFP4 are "
            f"powers of two, which cannot hold it; give it another type (--layer '*.{name.split('.')[-2]}=Q8_0')"
        )
    key = next((key for ending, key in choice.row.across.items() if name.endswith(ending)), None)
    size = getattr(choice.config, key) if key else 0
    if size % block_of(kind):
        raise ConfigError(
            f"{name!r} has heads of {size} columns ({key}), which llama.cpp orders otherwise, and {kind} has blocks "
            f"of {block_of(kind)}; give it another type (--layer '*.{name.split('.')[-2]}=Q8_0')"
        )


def fits(layout: ElementLayout) -> bool:
    """Whether blocks of 32 have one scale, and a type has the codes."""
    row, granularity = as_a(Int, layout.element), layout.granularity
    whole = isinstance(granularity, Tensor) or (isinstance(granularity, Channel) and granularity.axis in (0, -2))
    if isinstance(granularity, Group):
        grouped = normal_axis(granularity.axis, layout.shape) == len(layout.shape) - 1
        whole = grouped and (granularity.size % BLOCK == 0 or granularity.size >= layout.shape[-1])
    wide = row.bits == 8 and not (layout.stage.spec.symmetric and row.signed)
    return whole and row.bits in (2, 3, 4, 8) and not wide and not layout.stage.real_zero


def layout_name(layout: Any) -> str:
    """A layout in words."""
    stage = layout.stage if hasattr(layout, "stage") else layout.second.stage
    return stage.spec.describe()


def check_alike(name: str, kinds: Collection[str]) -> None:
    """Experts of a layer have one type.

    Raises:
        ConfigError: they have several.
    """
    if len(kinds) > 1:
        raise ConfigError(f"{name!r}: experts of one layer have the types {', '.join(sorted(kinds))}; GGUF stacks them")


def check_weights_alone(config: QConfig | None, layers: Iterable[tuple[str, Collection[str]]]) -> None:
    """Refuse what a file has no place for: llama.cpp rounds inputs and caches by rules of its own.

    Args:
        config: how the model is, or will be, quantized; None: it is float.
        layers: the slots of layers that are quantized, by name.

    Raises:
        ConfigError: something else than a weight is quantized.
    """
    caches = config is not None and config.kv_cache_quant_config
    scores = config is not None and config.softmax_quant_spec is not None
    found = [
        *(["keys and values are quantized"] if caches else []),
        *(["attention probabilities are quantized"] if scores else []),
        *(f"{name!r} has quantized inputs or outputs" for name, slots in layers if not {*slots} <= {*OWN}),
    ]
    if found:
        raise ConfigError(
            f"{found[0]}, and GGUF holds quantized weights alone: what llama.cpp runs would not be what was evaluated. "
            f"A scheme of the weights alone, such as int4_wo_32, goes into it, without --kv-cache"
        )


def check_types(
    model: nn.Module,
    whole: nn.Module,
    config: QConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    choice: GGUFTarget,
) -> None:
    """Refuse, before any work, tensors that a file has no name or no type for.

    Args:
        model: float; its tensors need no values, its experts are taken apart.
        whole: the model that it is a part of, or itself.
        config: how the whole will be quantized.
        tensors: of the model that go into the file.
        choice: what the file is to be made of.

    Raises:
        ConfigError: a scheme that no type holds, rows that its blocks do not divide, experts of several types.
        ModelError: a tensor without a name.
    """
    items = {item.layer.module: item for item in match(whole, config, skeleton=True).quantized}
    inside = {module: name for name, module in model.named_modules()}
    slots = {module: [slot for slot, stages in item.stages.items() if stages] for module, item in items.items()}
    check_weights_alone(config, ((inside[module], found) for module, found in slots.items() if module in inside))
    coded = {f"{name}.weight": items[module] for name, module in model.named_modules() if module in items}
    kinds: dict[str, set[str]] = {}
    for name, value in tensors:
        target, shape = file_names(name, choice)[0], tuple(value.shape)
        stages = coded[name].stages["weight"] if name in coded else ()
        if stages and coded[name].layer.kind.transposed:
            stages, shape = upright_stages(stages, coded[name].layer.kind), shape[::-1]
        if stages:
            kind = coded_type(name, layout_of(stages, shape, "order"))
            check_heads(name, kind, choice)
        else:
            kind = float_type_of(name.rpartition(".")[2], target, [size for size in shape if size != 1], choice)
        if EXPERT.search(name):
            kinds.setdefault(target, set()).add(kind)
    for target, found in kinds.items():
        check_alike(target, found)
