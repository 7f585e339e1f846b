"""What the tensors of a foreign layer say about its grid: its configuration in our words, scales and zero points."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.numerics.packing import unpack
from quark.numerics.scales import SCALE_RULES
from quark.torch.config import schemes as known_schemes
from quark.torch.config import specs
from quark.torch.config.model import QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType, ScaleType
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.decoded import OWN, OWN_FIELDS, strategy_of
from quark.torch.files.skeleton import StoredSource

Parts = dict[str, torch.Tensor]
Parameters = tuple[torch.Tensor | None, torch.Tensor | None]
Steps = Callable[[Parts], torch.Tensor]
Tensors = Mapping[str, StoredSource]
SCALE = ("scale", "scale_act")  # how names of scales end
SCALES = {torch.float16: ScaleType.float16, torch.bfloat16: ScaleType.bfloat16}
RULES = {"float32": ScaleType.float, "float16": ScaleType.float16, "bfloat16": ScaleType.bfloat16}


@dataclass(frozen=True)
class FolderGrid:
    """How the layers of a folder are quantized.

    Attributes:
        config: (name of the weight, what reads its parts) → configuration of the layer.
        parameters: (name, parts) → scale and zero point, [rows, groups]; None where they are found in the values.
        blocks: parts → bytes of the scales of blocks, where a format has them; None: they are found in the values.
        inputs: names behind the layer's of the static parameters of inputs.
        stacks: (name of stacked experts, [out, in] of one's layer, whether the stack has it turned) → its configuration
            and, from the parts of the stack, the scale of each of its elements; None: the values tell the scales.
    """

    config: Callable[[str, Callable[[], Parts]], QLayerConfig]
    parameters: Callable[[str, Parts], Parameters]
    inputs: tuple[str, ...] = ()
    blocks: Callable[[Parts], torch.Tensor | None] = lambda parts: None
    stacks: Callable[[str, tuple[int, int], bool], tuple[QLayerConfig, Steps]] | None = None

    def activations(self, config: QLayerConfig, given: Parts) -> Parts:
        """Static parameters of inputs as quark has them: scalars, zero points beside integers."""
        inputs: Any = config.input_tensors
        scale = next((given[name] for name in self.inputs if name.endswith(SCALE) and name in given), None)
        if "input_global_scale" in given:
            scale = 1 / given["input_global_scale"].float()
        if inputs is None or scale is None:
            return {}
        stages = config.stages("input_tensors")
        if any(stage.is_block and stage.calibrated for stage in stages):
            return {"input_scale_2": scale.float().reshape(())}
        if not any(stage.calibrated for stage in stages):
            return {}
        made = {"input_scale": scale.float().reshape(())}
        if "int" in inputs.dtype.name:
            zero = given.get("input_zero_point", torch.zeros((), dtype=torch.int8)).reshape(()).to(torch.int32)
            shift = 128 if inputs.dtype is Dtype.uint8 else 0
            made["input_zero_point"] = (zero + shift).to(torch.uint8 if shift else torch.int8)
        return made


class Uncarried(ConfigError):
    """Codes that no grid of ours has, though their values are known."""


def refuse(sentence: str) -> NoReturn:
    """Raise ``Uncarried``."""
    raise Uncarried(f"{sentence}. `quark torch convert --requantize SCHEME` decodes it and quantizes it again")


def integers(
    bits: int, group: int | None, symmetric: bool, scale: torch.dtype, signed: bool | None = None
) -> QTensorConfig:
    """A weight of integers, in groups along the inputs or per output; scales in the type that the file has."""
    name = f"int{bits}" if (symmetric if signed is None else signed) else f"uint{bits}"
    grouped: dict[str, Any] = {"qscheme": QSchemeType.per_channel, "ch_axis": 0}
    if group is not None:
        grouped = {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": group}
    return QTensorConfig(
        Dtype[name], **grouped, symmetric=symmetric, is_dynamic=False, scale_type=SCALES.get(scale, ScaleType.float)
    )


def compressed(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """compressed-tensors: integers and FP8."""
    from compressed_tensors.quantization import QuantizationConfig

    known = QuantizationConfig.model_validate(described)

    def config(name: str, read: Callable[[], Parts]) -> QLayerConfig:
        scheme = scheme_of(name.removesuffix(".weight"), known)
        inputs, scale = scheme.input_activations, read()["weight_scale"].dtype
        return QLayerConfig(
            weight=of_arguments(name, scheme.weights, scale),
            input_tensors=None if inputs is None else input_of_arguments(name, inputs, scale),
        )

    def parameters(name: str, parts: Parts) -> Parameters:
        weights = scheme_of(name.removesuffix(".weight"), known).weights
        zero, scale = parts.get("weight_zero_point"), parts["weight_scale"]
        if "weight_global_scale" in parts:
            return 1 / parts["weight_global_scale"].float(), None
        if scale.dtype is torch.uint8:  # exponents of blocks
            return None, None
        if weights.symmetric or weights.type != "int":
            return scale, None
        shift, bits = 1 << int(weights.num_bits) - 1, int(weights.num_bits)
        if zero is not None and zero.dtype == torch.int32:  # packed along the outputs, in words
            stream = zero.T.contiguous().view(torch.uint8)
            return scale, unpack(stream, bits, scale.shape[0], "low").T.to(torch.int32)
        return parts["weight_scale"], (torch.zeros(1) if zero is None else zero).to(torch.int32) + shift

    def blocks(parts: Parts) -> torch.Tensor | None:
        scale = parts["weight_scale"]
        return scale if scale.dtype is torch.uint8 or "weight_global_scale" in parts else None

    return FolderGrid(config, parameters, ("input_scale", "input_zero_point", "input_global_scale"), blocks)


def of_arguments(name: str, found: Any, scale: torch.dtype) -> Any:
    """A weight as ``QuantizationArgs`` say it."""
    strategy = strategy_of(found)
    if found.type == "int" and int(found.num_bits) in (4, 8) and strategy in ("group", "channel"):
        group = int(found.group_size) if strategy == "group" else None
        return as_evaluated(integers(int(found.num_bits), group, bool(found.symmetric), scale), found)
    if found.type == "int" and int(found.num_bits) == 8 and strategy == "tensor" and found.symmetric:
        return as_evaluated(specs.Int8PerTensorSpec(symmetric=True).to_quantization_spec(), found)
    if (scheme := scheme_of_blocks(found)) is not None:
        return known_schemes.scheme(scheme).weight
    if found.type == "float" and int(found.num_bits) == 8 and strategy in FLOATS:
        return as_evaluated(FLOATS[strategy](found), found)
    refuse(f"{name!r} is {found.type} of {found.num_bits} bits per {strategy}")


def scheme_of_blocks(found: Any) -> str | None:
    """The scheme that has blocks as ``QuantizationArgs`` say them; None: they say no blocks, or unknown ones."""
    size = None if found.group_size is None else int(found.group_size)
    return BLOCKS.get((found.type, int(found.num_bits), strategy_of(found), size, found.scale_dtype))


BLOCKS: Mapping[tuple[Any, ...], str] = {
    ("float", 4, "tensor_group", 16, torch.float8_e4m3fn): "nvfp4",
    ("float", 4, "group", 32, torch.uint8): "mxfp4",
    ("float", 6, "group", 32, torch.uint8): "mxfp6_e2m3",
    ("float", 8, "group", 32, torch.uint8): "mxfp8",
}


def block(found: Any) -> QTensorConfig:
    """FP8 in two-dimensional blocks."""
    rows, columns = (int(length) for length in found.block_structure)
    return QTensorConfig(
        Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=(rows, columns), symmetric=True, is_dynamic=False
    )


FLOATS: Mapping[str, Callable[[Any], QTensorConfig]] = {
    "tensor": lambda _: specs.FP8E4M3PerTensorSpec(scale_type="float").to_quantization_spec(),
    "channel": lambda _: specs.FP8E4M3PerChannelSpec(0).to_quantization_spec(),
    "block": block,
}


def input_of_arguments(name: str, found: Any, scale: torch.dtype) -> Any:
    """An input as ``QuantizationArgs`` say it; the library divides it in the type ``scale`` of the weight's scales."""
    if found.dynamic and (scheme := scheme_of_blocks(found)) is not None:
        return known_schemes.scheme(scheme).input_tensors
    key = found.type, int(found.num_bits), strategy_of(found), bool(found.dynamic)
    size = found.group_size
    known: dict[Any, Callable[[], Any]] = {
        ("int", 8, "tensor", False): lambda: specs.Int8PerTensorSpec(symmetric=True),
        ("int", 8, "tensor", True): lambda: specs.Int8PerTensorSpec(symmetric=True, is_dynamic=True),
        ("int", 4, "token", True): lambda: specs.Int4PerChannelSpec(1, True, is_dynamic=True),
        ("int", 4, "group", True): lambda: specs.Int4PerGroupSpec(-1, int(size), True, is_dynamic=True),
        ("int", 8, "token", True): lambda: specs.Int8PerChannelSpec(1, True, is_dynamic=True),
        ("float", 8, "tensor", False): lambda: specs.FP8E4M3PerTensorSpec(scale_type="float"),
        ("float", 8, "tensor", True): lambda: specs.FP8E4M3PerTensorSpec(is_dynamic=True),
        ("float", 8, "token", True): lambda: specs.FP8E4M3PerChannelSpec(1, is_dynamic=True),
        ("float", 8, "group", True): lambda: specs.FP8E4M3PerGroupSpec(-1, int(size), symmetric=True),
    }
    if key not in known or not found.symmetric:
        refuse(f"the inputs of {name!r} are {found.type} of {found.num_bits} bits per {strategy_of(found)}")
    made: QTensorConfig = known[key]().to_quantization_spec()
    return as_evaluated(replace(made, scale_type=SCALES.get(scale, ScaleType.float)), found)


def told(found: Any) -> Mapping[str, Any]:
    """What this package has written beside ``QuantizationArgs``; nothing in files of others.

    Raises:
        ModelError: it is not what this package writes; anybody may write into ``observer_kwargs``.
    """
    own: Any = (found.observer_kwargs or {}).get(OWN)
    if own is None:
        return {}
    fields = isinstance(own, Mapping) and {*own} == {*OWN_FIELDS}
    if not fields or own["scale_rule"] not in [*SCALE_RULES] or not isinstance(own["narrow"], bool):
        raise ModelError(
            f"quantization_config: {OWN!r} in the observer_kwargs is {own!r:.80}; it has a scale_rule "
            f"({', '.join(SCALE_RULES)}) and whether codes are narrow (true, false)"
        )
    return dict(own)


def as_evaluated(made: QTensorConfig, found: Any) -> QTensorConfig:
    """A configuration with what is told of what was evaluated."""
    if not (own := told(found)):
        return made
    rule = str(own["scale_rule"])
    known = RULES.get(rule)
    return replace(made, scale_type=known, scale_rule=None if known else rule, narrow=own["narrow"] or None)


def scheme_of(layer: str, config: Any) -> Any:
    """The scheme of a layer.

    Raises:
        ModelError: none of the groups names it.
    """
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    for target in sorted(schemes, key=lambda one: (one.startswith("re:"), one)):  # the library's order
        if target == layer or (target.startswith("re:") and re.match(target[3:], layer)):
            return schemes[target]
    if "Linear" not in schemes:
        raise ModelError(f"{layer!r} has scales, and no config_group of the checkpoint names it")
    return schemes["Linear"]


def mxfp4(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """gpt_oss: FP4 under powers of two, which the values tell."""
    layer = QLayerConfig(weight=specs.OCP_MXFP4Spec(-1, is_dynamic=False).to_quantization_spec())
    return FolderGrid(lambda name, read: layer, lambda name, parts: (None, None))


def modelopt(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """ModelOpt: FP8 per tensor, or per row with dynamic inputs; NVFP4; MXFP8."""
    layer = OF_MODELOPT[str(described.get("quant_algo"))]

    def parameters(name: str, parts: Parts) -> Parameters:
        scale = parts.get("weight_scale_2", parts["weight_scale"])
        return (None, None) if scale.dtype is torch.uint8 else (scale, None)

    def blocks(parts: Parts) -> torch.Tensor | None:
        scale = parts["weight_scale"]
        return scale if scale.dtype is torch.uint8 or "weight_scale_2" in parts else None

    return FolderGrid(lambda name, read: layer, parameters, ("input_scale",), blocks)


NVFP4_WEIGHT = QLayerConfig(weight=known_schemes.scheme("nvfp4").weight)
OF_MODELOPT = {
    "FP8": known_schemes.scheme("fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": known_schemes.scheme("ptpc_fp8"),
    "NVFP4": known_schemes.scheme("nvfp4"),
    "W4A16_NVFP4": NVFP4_WEIGHT,
    "MXFP8": known_schemes.scheme("mxfp8"),
}


def bitsandbytes(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """bitsandbytes: no format here has its table, or its scales."""
    return FolderGrid(
        lambda name, read: refuse(f"{name!r} is quantized by bitsandbytes, and no format here has its codes"),
        lambda name, parts: (None, None),
    )
