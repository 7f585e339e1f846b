"""The layout of GPTQ checkpoints: ``custom_mode="gptq"`` and ``"gptq_v2"``.

    qweight   int32 [in * bits / 32, out]       unsigned codes, a stream of bits along the inputs, lowest bits first
    qzeros    int32 [groups, out * bits / 32]   unsigned zero points, a stream along the outputs
    scales    [groups, out]                     value = scale (code - zero point)
    g_idx     int32 [in]                        the group of each input

Version 1 (``checkpoint_format: gptq``) stores zero points lowered by one, so it has no zero point 0; version 2 stores
them as they are. Signed codes become unsigned: both they and their zero points are shifted by half the range.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from quark.errors import ConfigError
from quark.numerics.elements import Int
from quark.numerics.granularity import Group
from quark.numerics.packing import pack
from quark.torch.config.model import SLOTS, QConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import QSchemeType, ZeroPointType
from quark.torch.export.layout import CODES, ElementLayout, Form, Stored, scale_dtype
from quark.torch.export.storage import signed
from quark.torch.export.widths import WORD, check_words

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is taken from zero points
BITS = (2, 3, 4, 8)


def gptq_config(config: QConfig, mode: str, excluded: Iterable[str]) -> dict[str, Any]:
    """What a GPTQ checkpoint says about itself.

    Args:
        config: of the model; all layers are alike.
        mode: "gptq" or "gptq_v2".
        excluded: names of linear layers that stay float.

    Raises:
        ConfigError: a configuration that GPTQ cannot say.
    """
    layer = config.global_quant_config
    weight: Any = layer.weight
    others = [slot for slot in SLOTS if slot != "weight" and getattr(layer, slot) is not None]
    if others or config.kv_cache_quant_config or not fits(weight):
        raise ConfigError(
            f"custom_mode {mode!r} does not fit this configuration: only weights are quantized, to integers of 2, 3, 4 "
            f"or 8 bits, per_group along ch_axis=-1 or per_channel along ch_axis=0, with integer zero points"
        )
    names = [name for name in excluded if name.rpartition(".")[2] != "lm_head"]
    return {
        "quant_method": "gptq",
        "bits": weight.dtype.to_bitwidth(),
        "group_size": weight.group_size if weight.qscheme is QSchemeType.per_group else -1,
        "sym": bool(weight.to_stage().spec.symmetric),
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": mode,
        "pack_dtype": "int32",
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in names},
    }


def fits(weight: Any) -> bool:
    """Whether GPTQ has a layout for a weight."""
    row = weight.dtype.row if isinstance(weight, QTensorConfig) else None
    if not isinstance(row, Int) or row.bits not in BITS:
        return False
    grouped = weight.qscheme is QSchemeType.per_group and weight.ch_axis in (None, 1, -1)
    plain = weight.zero_point_type is ZeroPointType.int32
    return plain and (grouped or (weight.qscheme is QSchemeType.per_channel and weight.ch_axis in (None, 0)))


def gptq_form(name: str, layout: ElementLayout) -> Form:
    """Shapes and types of the tensors of the layer whose weight is ``name``.

    Raises:
        ConfigError: sides that words of 32 bits do not divide.
    """
    bits, (rows, columns) = layout.element.bits, layout.shape
    check_words(name, bits, {"outputs": rows, "inputs": columns})
    groups, prefix = groups_of(layout), name.removesuffix("weight")
    return {
        f"{prefix}qweight": ((columns * bits // WORD, rows), torch.int32),
        f"{prefix}qzeros": ((groups, rows * bits // WORD), torch.int32),
        f"{prefix}scales": ((groups, rows), scale_dtype(layout.stage)),
        f"{prefix}g_idx": ((columns,), torch.int32),
    }


def groups_of(layout: ElementLayout) -> int:
    """How many scales an output has."""
    return layout.granularity.grid(layout.shape)[1] if isinstance(layout.granularity, Group) else 1


def gptq_tensors(name: str, layout: ElementLayout, stored: Stored, lowered: int) -> Stored:
    """The tensors of a layer from our own.

    Args:
        name: of the weight.
        layout: of ``stored``.
        stored: codes, ``scale`` and ``zero_point``.
        lowered: what is taken from zero points, 1 or 0.

    Raises:
        ConfigError: a zero point of 0 where they are lowered.
    """
    prefix, element, (rows, columns) = name.removesuffix("weight"), layout.element, layout.shape
    kept = layout.codes.get(stored[CODES], element, layout.turned(layout.shape), layout.pack_method)
    shift = 1 << element.bits - 1 if signed(element) else 0
    codes = layout.turn(kept).to(torch.int32) + shift
    zeros = layout.zero_point(stored).reshape(rows, -1).to(torch.int32) + shift - lowered
    if bool((zeros < 0).any()):
        raise ConfigError(
            f"{name!r} has a zero point of 0, which version 1 of GPTQ cannot store; 'gptq_v2' can (--format gptq_v2)"
        )
    groups = groups_of(layout)
    size = layout.granularity.size if isinstance(layout.granularity, Group) else columns
    index = torch.arange(columns, dtype=torch.int32, device=codes.device) // min(size, columns)
    scale = layout.turn(stored["scale"]).reshape(rows, groups)
    return {
        f"{prefix}qweight": words(codes.T, element.bits, along=0),
        f"{prefix}qzeros": words(zeros.T, element.bits, along=1),
        f"{prefix}scales": scale.T.contiguous(),
        f"{prefix}g_idx": index,
    }


def words(codes: torch.Tensor, bits: int, along: int) -> torch.Tensor:
    """Unsigned codes as int32 words, a stream of bits along an axis."""
    rows = codes if along == 1 else codes.T
    packed = pack(rows.contiguous().to(torch.uint8), bits, "low", None, 4).view(torch.int32)
    return (packed if along == 1 else packed.T).contiguous()
