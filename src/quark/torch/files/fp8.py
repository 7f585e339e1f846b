"""Folders with quant_method "fp8", "mxfp8" or "fbgemm_fp8": FP8 weights under scales of the tensor, of
rows or of blocks, as DeepSeek, Qwen, Mistral, MiniMax and Meta publish them.

    weight                                     E4M3 or E5M2, [.., out, in]; experts may be FP4, two codes in a byte
    weight_scale_inv, weight_scale, scale,     what the codes are multiplied by: float, or powers of two (E8M0) as such
    qscale_weight                              or as bytes
    activation_scale, input_scale              of inputs, where they are static

What a scale is for follows from its shape. Blocks are those that ``weight_block_size`` says where they fit the scales,
else those that divide the weight evenly into as many; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from quark.errors import ModelError
from quark.torch.config import specs
from quark.torch.config.model import QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.custom_modes import check_fp8_blocks
from quark.torch.export.decoded import BIAS, Decoder, Parts, fp4_values, powers_of_two
from quark.torch.files.coded import Coded, Found, Tensors
from quark.torch.files.grids import FolderGrid, Parameters, Steps, refuse

BEHIND = ("{}_scale_inv", "{}_scale")  # the name of a weight
INSTEAD = ("scale", "qscale_weight")  # of "weight"
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = (torch.int8, torch.uint8)
POWERS = (torch.float8_e8m0fnu, torch.uint8)
MX = (1, 32)
Shape = tuple[int, ...]


def fp8(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """The weights of a folder that are FP8, or FP4 where it says so.

    Raises:
        ConfigError: sizes of blocks that are none.
        ModelError: codes without a scale, or with one that fits no blocks.
    """
    check_fp8_blocks(described)
    coded = (*FLOATS, *BYTES) if described.get("expert_dtype") == "fp4" else FLOATS
    found = {}
    for name, stored in tensors.items():
        scale = scale_of(name, tensors) if stored.dtype in coded else None
        if scale is None:
            if stored.dtype in FLOATS:
                raise ModelError(f"{str(checkpoint.folder)!r}: {name!r} holds FP8 codes, and no scale of it is there")
            continue
        shape, form, blocks = layout_in(name, tensors, described)
        found[name] = Coded(shape, {"weight": name, "scale": scale}, decoder(form, blocks))
    return found


def scale_of(name: str, tensors: Tensors) -> str | None:
    """The name of the scale of a weight."""
    prefix, _, own = name.rpartition(".")
    names = [pattern.format(name) for pattern in BEHIND]
    names += [f"{prefix}.{instead}" for instead in INSTEAD if own == "weight"]
    return next((one for one in names if one in tensors), None)


def layout_in(name: str, tensors: Tensors, described: Mapping[str, Any]) -> tuple[Shape, Shape, tuple[int, int]]:
    """The shape of a weight, and ``layout_of`` it."""
    stored, scale = tensors[name], str(scale_of(name, tensors))
    shape = stored.shape if stored.dtype in FLOATS else (*stored.shape[:-1], 2 * stored.shape[-1])
    return shape, *layout_of(name, shape, scale, tensors[scale].shape, described)


def layout_of(
    name: str, shape: Shape, scale: str, given: Shape, described: Mapping[str, Any]
) -> tuple[Shape, tuple[int, int]]:
    """The shape of the scales with an axis for each of the weight, and the rows and columns that share one."""
    whole = (1,) * len(shape)
    forms = [
        (prod(given) == 1, whole),
        (given == shape[:-1], (*given, 1)),
        (len(shape) == 3 and prod(given) == shape[0], (shape[0], 1, 1)),
        (len(given) == len(shape) and given[:-2] == shape[:-2], given),
    ]
    form = next((form for fits, form in forms if fits), None)
    said = described.get("weight_block_size")
    if form is not None and len(shape) >= 2:
        runs = list(zip(shape[-2:], form[-2:], strict=True))
        if said and all(-(-length // int(size)) == count for (length, count), size in zip(runs, said, strict=True)):
            return form, (int(said[0]), int(said[1]))
        if all(count and length % count == 0 for length, count in runs):
            return form, (shape[-2] // form[-2], shape[-1] // form[-1])
    raise ModelError(
        f"{scale!r} has the shape {list(given)}, which fits no blocks of {name!r} with {list(shape)}"
        f"{f' (weight_block_size is {list(said)})' if said else ''}"
    )


def decoder(form: Shape, blocks: tuple[int, int]) -> Decoder:
    """Codes times the scale of their block."""

    def decode(parts: Parts) -> torch.Tensor:
        weight = parts["weight"]
        codes = weight.float() if weight.dtype in FLOATS else fp4_values(weight)
        return codes * spread(scale_values(parts["scale"]).reshape(form), codes.shape, blocks)

    return decode


def spread(scale: torch.Tensor, shape: Shape, blocks: tuple[int, int]) -> torch.Tensor:
    """The scale of every element of the last two axes."""
    for axis, length in zip((-2, -1), blocks, strict=True):
        scale = scale.repeat_interleave(length, axis).narrow(axis, 0, shape[axis])
    return scale


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """float32 values of scales; bytes are exponents."""
    return powers_of_two(scale) if scale.dtype is torch.uint8 else scale.float()


def exponents_of(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two as bytes."""
    return (torch.log2(scale) + BIAS).to(torch.uint8)


# ---- the grid --------------------------------------------------------------------------------------------------------


def fp8_grid(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """E4M3 under scales of the tensor, rows or blocks; E4M3 or FP4 under powers of two of 32 (MXFP8, MXFP4)."""
    scheme = described.get("activation_scheme")

    def config(name: str, read: Callable[[], Parts]) -> QLayerConfig:
        weight, inputs = specs_of(name, tensors, described)
        if scheme == "static":
            inputs = specs.FP8E4M3PerTensorSpec(scale_type="float").to_quantization_spec()
        return QLayerConfig(weight=weight, input_tensors=inputs if scheme else None)

    def parameters(name: str, parts: Parts) -> Parameters:
        powers = parts["scale"].dtype in POWERS and layout_in(name, tensors, described)[2] == MX
        return (None if powers else scale_values(parts["scale"])), None

    def stacks(name: str, layer: tuple[int, int], turned: bool) -> tuple[QLayerConfig, Steps]:
        if scheme == "static":
            refuse(f"{name!r} is a stack of experts with static scales of their inputs")
        shape, form, blocks = layout_in(name, tensors, described)
        weight, inputs = specs_of(name, tensors, described, layer, turned)
        made = QLayerConfig(weight=weight, input_tensors=inputs if scheme else None)
        return made, lambda parts: spread(scale_values(parts["scale"]).reshape(form), shape, blocks)

    def blocks(parts: Parts) -> torch.Tensor | None:
        return parts["scale"] if parts["scale"].dtype in POWERS else None

    return FolderGrid(config, parameters, ("input_scale", "activation_scale", "qscale_act"), blocks, stacks)


def fbgemm_grid(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """E4M3 per row; the scales of dynamic inputs have a bound, which no format here has."""
    grid = fp8_grid(tensors, described, checkpoint)
    return replace(grid, config=lambda name, read: refuse(f"the inputs of {name!r} have activation_scale_ub"))


def specs_of(
    name: str,
    tensors: Tensors,
    described: Mapping[str, Any],
    layer: tuple[int, int] | None = None,
    turned: bool = False,
) -> tuple[QTensorConfig, QTensorConfig]:
    """How a weight, or one ``layer`` [out, in] of stacked experts, is quantized, and dynamic inputs beside it."""
    stored, scale = tensors[name], tensors[str(scale_of(name, tensors))]
    shape, _, blocks = layout_in(name, tensors, described)
    if stored.dtype is torch.float8_e5m2 or (not layer and len(shape) != 2):
        refuse(f"{name!r} is {'E5M2' if len(shape) == 2 else 'a stack of experts'} under FP8 scales")
    blocks = (blocks[1], blocks[0]) if turned else blocks
    rows, columns = layer or shape
    powers = blocks == MX and scale.dtype in POWERS
    if stored.dtype in BYTES and not powers:
        refuse(f"{name!r} is FP4 under scales that are no powers of two of {MX[1]} elements")
    kinds = {
        "fp4": stored.dtype in BYTES,
        "tensor": blocks[0] >= rows and blocks[1] >= columns and not described.get("weight_block_size"),
        "mx": powers,
        "rows": blocks[0] == 1 and blocks[1] >= columns,
    }
    return KINDS[next((kind for kind, fits in kinds.items() if fits), "blocks")](blocks)


def of_blocks(blocks: tuple[int, int]) -> tuple[Any, Any]:
    """Two-dimensional blocks; inputs in groups as wide."""
    weight = QTensorConfig(
        Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=blocks, symmetric=True, is_dynamic=False
    )
    return weight, specs.FP8E4M3PerGroupSpec(-1, blocks[1], is_dynamic=True, symmetric=True).to_quantization_spec()


KINDS: Mapping[str, Callable[[tuple[int, int]], tuple[Any, Any]]] = {
    "tensor": lambda _: (
        specs.FP8E4M3PerTensorSpec(scale_type="float").to_quantization_spec(),
        specs.FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec(),
    ),
    "rows": lambda _: (
        specs.FP8E4M3PerChannelSpec(0).to_quantization_spec(),
        specs.FP8E4M3PerChannelSpec(1, is_dynamic=True).to_quantization_spec(),
    ),
    "blocks": of_blocks,
    "fp4": lambda _: (
        specs.OCP_MXFP4Spec(-1, is_dynamic=False).to_quantization_spec(),
        specs.OCP_MXFP8E4M3Spec(-1, is_dynamic=True).to_quantization_spec(),
    ),
    "mx": lambda _: (
        specs.OCP_MXFP8E4M3Spec(-1, is_dynamic=False).to_quantization_spec(),
        specs.OCP_MXFP8E4M3Spec(-1, is_dynamic=True).to_quantization_spec(),
    ),
}
