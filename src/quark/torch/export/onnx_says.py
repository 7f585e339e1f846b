"""What ONNX has no nodes for: asked before any work, of what a model will have, and again where nodes are made."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from quark.errors import ConfigError
from quark.numerics.blocks import Block
from quark.numerics.elements import Float, Int
from quark.numerics.granularity import WHOLE, Channel, Group, Tensor, Token
from quark.operators.block_operators import operator_of
from quark.torch.config.model import QConfig
from quark.torch.export.layout import BlockLayout, ElementLayout, Layout, PairLayout, layout_of
from quark.torch.matching import match
from quark.torch.quantized_layer import OWN
from quark.torch.stage import Stage

STANDARD = ("INT8", "UINT8", "INT16", "UINT16", "INT32", "INT4", "UINT4")  # types of DequantizeLinear
FP8 = PACKED = 8  # bits of codes, and the most that are packed


def refuse(name: str, sentence: str) -> NoReturn:
    """Raise ``ConfigError``."""
    raise ConfigError(f"ONNX cannot hold {name!r}: {sentence}")


def check_before(model: nn.Module, config: QConfig) -> None:
    """Refuse, before any work, tensors of a model that have no nodes.

    Args:
        model: float; its tensors need no values, its experts are taken apart.
        config: how it will be quantized.

    Raises:
        ConfigError: the first; the tensor is named.
    """
    for item in match(model, config, skeleton=True).quantized:
        for slot, stages in item.stages.items():
            value = item.layer.module._parameters.get(slot) if slot in OWN else None
            name = f"{item.layer.name}.{slot.removesuffix('_tensors')}"
            if stages and value is not None:
                check_constant(name, layout_of(stages, tuple(value.shape), "order"))
            for stage in () if slot in OWN else stages:
                check_activation(name, stage)
    caches = {f"caches of {name}": one for name, one in config.kv_cache_quant_config.items()}
    for name, one in caches.items() if config.kv_cache_post_rope else ():
        for stage in one.stages("output_tensors"):
            check_activation(name, stage)


def check_activation(name: str, stage: Stage) -> None:
    """One stage of an activation.

    Raises:
        ConfigError: a scale, block or rounding without nodes.
    """
    if stage.real_zero or stage.spec.rounding != "half_even":
        refuse(name, "real zero points and roundings other than half_even are not written for activations")
    row, spec, granularity = stage.format, stage.spec, stage.spec.granularity
    if isinstance(row, Block):
        if row.size == WHOLE:
            refuse(name, "blocks as long as an axis of an activation have no operator: give group_size")
        check_operator(name, row)
        if not operator_of(row).rounds and row.tensor_scale and not stage.calibrated:
            refuse(name, "the scale above the blocks must be static")
    elif row.unit_scale:
        return
    elif stage.calibrated:
        if not isinstance(granularity, Tensor | Channel):
            refuse(name, f"static scales {granularity} are not written for activations")
    elif spec.scale_rule != "float32" or not isinstance(row, Int | Float):
        refuse(name, f"dynamic scales of the rule {spec.scale_rule!r} are not written")
    elif isinstance(granularity, Group) and granularity.axis != -1:
        refuse(name, f"dynamic groups along the axis {granularity.axis}; the last axis (-1) is written")
    elif not isinstance(granularity, Tensor | Token | Group):
        refuse(name, f"dynamic scales {granularity} are not written")


def check_operator(name: str, row: Block) -> None:
    """A block format has an operator.

    Raises:
        ConfigError: it has none.
    """
    try:
        operator_of(row)
    except ConfigError as error:
        refuse(name, str(error))


def check_constant(name: str, layout: Layout | PairLayout) -> None:
    """The stored form of a weight or bias.

    Raises:
        ConfigError: codes that no node decodes.
    """
    layout = layout.second if isinstance(layout, PairLayout) else layout
    if isinstance(layout, BlockLayout):
        check_operator(name, layout.block)
    elif isinstance(layout, ElementLayout) and layout.stage.needs_range:
        check_scales(name, layout)


def check_scales(name: str, layout: ElementLayout) -> None:
    """Which elements of a constant share a scale.

    Raises:
        ConfigError: a shape of scales that no node takes.
    """
    row, granularity = layout.element, layout.granularity
    if layout.stage.real_zero:
        refuse(name, "real zero points are not written")
    if is_standard(layout):
        if not isinstance(granularity, Tensor | Channel | Group):
            refuse(name, f"scales {granularity} are none of DequantizeLinear")
    elif isinstance(row, Float) and row.onnx_type and row.bits == FP8:
        return
    elif row.bits > PACKED:
        refuse(name, f"{row.name} {granularity}: codes of more than {PACKED} bits are not packed")
    elif isinstance(granularity, Group):
        *_, length = layout.shape
        last = granularity.axis % len(layout.shape) == len(layout.shape) - 1
        if not last or length % min(granularity.size, length):
            refuse(name, f"{row.name} {granularity}: whole groups along the last axis are written")
    elif not isinstance(granularity, Tensor | Channel):
        refuse(name, f"{row.name} with scales {granularity}")


def is_standard(layout: ElementLayout) -> bool:
    """Whether DequantizeLinear decodes the codes: it has no groups of int32."""
    grouped = isinstance(layout.granularity, Group)
    return layout.element.onnx_type in STANDARD and not (grouped and layout.element.bits == 32)
