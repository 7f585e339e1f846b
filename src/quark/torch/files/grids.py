"""What the tensors of a foreign layer say about its grid: its configuration in our words, scales and zero points."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from quark.errors import ConfigError, ModelError
from quark.numerics.packing import AWQ_ORDER, unpack
from quark.torch.config import schemes as known_schemes
from quark.torch.config import specs
from quark.torch.config.model import QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType, ScaleType
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.files.skeleton import StoredSource

Parts = dict[str, torch.Tensor]
Parameters = tuple[torch.Tensor | None, torch.Tensor | None]
Tensors = Mapping[str, StoredSource]
SCALES = {torch.float16: ScaleType.float16, torch.bfloat16: ScaleType.bfloat16}


@dataclass(frozen=True)
class FolderGrid:
    """How the layers of a folder are quantized.

    Attributes:
        config: (name of the weight, what reads its parts) → configuration of the layer.
        parameters: (name, parts) → scale and zero point, [rows, groups]; None where they are found in the values.
        inputs: names behind the layer's of the static parameters of inputs.
    """

    config: Callable[[str, Callable[[], Parts]], QLayerConfig]
    parameters: Callable[[str, Parts], Parameters]
    inputs: tuple[str, ...] = ()

    def activations(self, config: QLayerConfig, given: Parts) -> Parts:
        """Static parameters of inputs as quark has them: scalars, zero points beside integers."""
        inputs: Any = config.input_tensors
        if inputs is None or inputs.is_dynamic or "input_scale" not in given:
            return {}
        made = {"input_scale": given["input_scale"].float().reshape(())}
        if "int" in inputs.dtype.name:
            zero = given.get("input_zero_point", torch.zeros((), dtype=torch.int8)).reshape(()).to(torch.int32)
            shift = 128 if inputs.dtype is Dtype.uint8 else 0
            made["input_zero_point"] = (zero + shift).to(torch.uint8 if shift else torch.int8)
        return made


def refuse(sentence: str) -> NoReturn:
    """Raise ``ConfigError``."""
    raise ConfigError(f"{sentence}. --requantize SCHEME decodes it and quantizes it again")


def integers(bits: int, group: int | None, symmetric: bool, scale: torch.dtype) -> QTensorConfig:
    """A weight of integers, in groups along the inputs or per output; scales in the type that the file has."""
    name = f"int{bits}" if symmetric else f"uint{bits}"
    grouped: dict[str, Any] = {"qscheme": QSchemeType.per_channel, "ch_axis": 0}
    if group is not None:
        grouped = {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": group}
    return QTensorConfig(
        Dtype[name], **grouped, symmetric=symmetric, is_dynamic=False, scale_type=SCALES.get(scale, ScaleType.float)
    )


def words(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """GPTQ and AWQ: integers in groups; symmetric where every zero point of the folder is the middle."""
    method, bits = described["quant_method"], int(described["bits"])
    lowered = int(method == "gptq" and described.get("checkpoint_format", "gptq") != "gptq_v2")
    middle = 1 << bits - 1

    def zeros(parts: Parts) -> torch.Tensor:
        rows, order = parts["scales"].shape[1], AWQ_ORDER if method == "awq" else None
        stream = parts["qzeros"].contiguous().view(torch.uint8)
        return unpack(stream, bits, rows, "low", order).to(torch.int32).T + lowered

    def all_middle() -> bool:
        for name, stored in tensors.items():
            if name.endswith(".qzeros"):
                prefix = name.removesuffix("qzeros")
                own = {
                    "qzeros": stored.read(checkpoint.folder),
                    "scales": tensors[f"{prefix}scales"].read(checkpoint.folder),
                }
                if not bool((zeros(own) == middle).all()):
                    return False
        return True

    symmetric = all_middle()

    def config(name: str, read: Callable[[], Parts]) -> QLayerConfig:
        parts = read()
        columns = parts["g_idx"].shape[0] if method == "gptq" else parts["qweight"].shape[0]
        groups = parts["scales"].shape[0]
        size = columns if groups == 1 else -(-columns // groups)
        if method == "gptq" and not torch.equal(parts["g_idx"].long(), torch.arange(columns) // size):
            refuse(f"{name!r} has its inputs in another order (desc_act)")
        whole = groups == 1 and int(described.get("group_size", -1)) in (-1, 0)
        return QLayerConfig(weight=integers(bits, None if whole else size, symmetric, parts["scales"].dtype))

    def parameters(name: str, parts: Parts) -> Parameters:
        return parts["scales"].T, zeros(parts) - (middle if symmetric else 0)

    return FolderGrid(config, parameters)


def compressed(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """compressed-tensors: integers and FP8."""
    from compressed_tensors.quantization import QuantizationConfig

    known = QuantizationConfig.model_validate(described)

    def config(name: str, read: Callable[[], Parts]) -> QLayerConfig:
        scheme = scheme_of(name.removesuffix(".weight"), known)
        inputs = scheme.input_activations
        return QLayerConfig(
            weight=of_arguments(name, scheme.weights, read()["weight_scale"].dtype),
            input_tensors=None if inputs is None else input_of_arguments(name, inputs),
        )

    def parameters(name: str, parts: Parts) -> Parameters:
        weights = scheme_of(name.removesuffix(".weight"), known).weights
        zero, scale = parts.get("weight_zero_point"), parts["weight_scale"]
        if "weight_global_scale" in parts:
            return 1 / parts["weight_global_scale"].float(), None
        if weights.symmetric or weights.type != "int":
            return scale, None
        shift, bits = 1 << int(weights.num_bits) - 1, int(weights.num_bits)
        if zero is not None and zero.dtype == torch.int32:  # packed along the outputs, in words
            stream = zero.T.contiguous().view(torch.uint8)
            return scale, unpack(stream, bits, scale.shape[0], "low").T.to(torch.int32)
        return parts["weight_scale"], (torch.zeros(1) if zero is None else zero).to(torch.int32) + shift

    return FolderGrid(config, parameters, ("input_scale", "input_zero_point"))


def of_arguments(name: str, found: Any, scale: torch.dtype) -> QTensorConfig:
    """A weight as ``QuantizationArgs`` say it."""
    strategy = strategy_of(found)
    if found.type == "int" and int(found.num_bits) in (4, 8) and strategy in ("group", "channel"):
        group = int(found.group_size) if strategy == "group" else None
        return integers(int(found.num_bits), group, bool(found.symmetric), scale)
    if found.type == "int" and int(found.num_bits) == 8 and strategy == "tensor" and found.symmetric:
        return specs.Int8PerTensorSpec(symmetric=True).to_quantization_spec()
    if found.type == "float" and int(found.num_bits) == 8 and strategy in FLOATS:
        return FLOATS[strategy](found)
    refuse(f"{name!r} is {found.type} of {found.num_bits} bits per {strategy}")


def strategy_of(found: Any) -> str:
    """The name of a strategy."""
    return str(getattr(found.strategy, "value", found.strategy))


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


def input_of_arguments(name: str, found: Any) -> QTensorConfig:
    """An input as ``QuantizationArgs`` say it."""
    key = found.type, int(found.num_bits), strategy_of(found), bool(found.dynamic)
    size = found.group_size
    known: dict[Any, Callable[[], Any]] = {
        ("int", 8, "tensor", False): lambda: specs.Int8PerTensorSpec(symmetric=True),
        ("int", 8, "tensor", True): lambda: specs.Int8PerTensorSpec(symmetric=True, is_dynamic=True),
        ("int", 8, "token", True): lambda: specs.Int8PerChannelSpec(1, True, is_dynamic=True),
        ("float", 8, "tensor", False): lambda: specs.FP8E4M3PerTensorSpec(scale_type="float"),
        ("float", 8, "tensor", True): lambda: specs.FP8E4M3PerTensorSpec(is_dynamic=True),
        ("float", 8, "token", True): lambda: specs.FP8E4M3PerChannelSpec(1, is_dynamic=True),
        ("float", 8, "group", True): lambda: specs.FP8E4M3PerGroupSpec(-1, int(size), symmetric=True),
    }
    if key not in known or not found.symmetric:
        refuse(f"the inputs of {name!r} are {found.type} of {found.num_bits} bits per {strategy_of(found)}")
    made: QTensorConfig = known[key]().to_quantization_spec()
    return made


def scheme_of(layer: str, config: Any) -> Any:
    """The scheme of a layer.

    Raises:
        ModelError: none of the groups names it.
    """
    schemes = list(config.config_groups.values())
    for scheme in schemes:
        for target in scheme.targets:
            if target == layer or (target.startswith("re:") and re.match(target[3:], layer)):
                return scheme
    plain = [scheme for scheme in schemes if "Linear" in scheme.targets]
    if not plain:
        raise ModelError(f"{layer!r} has scales, and no config_group of the checkpoint names it")
    return plain[0]


def fp8(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """FP8 weights under scales of the tensor, of rows, or of blocks; the import reads what is around them."""
    return FolderGrid(
        lambda name, read: refuse(f"{name!r} is read by the import"), lambda name, parts: (parts["scale"], None)
    )


def mxfp4(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """gpt_oss: FP4 under powers of two, which the values tell."""
    layer = QLayerConfig(weight=specs.OCP_MXFP4Spec(-1, is_dynamic=False).to_quantization_spec())
    return FolderGrid(lambda name, read: layer, lambda name, parts: (None, None))


def modelopt(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """ModelOpt: FP8 per tensor, or per row with dynamic inputs."""
    algorithm = str(described.get("quant_algo"))

    def config(name: str, read: Callable[[], Parts]) -> QLayerConfig:
        if algorithm not in OF_MODELOPT:
            refuse(f"{name!r} is {algorithm} of ModelOpt, whose codes are not carried over")
        return known_schemes.scheme(OF_MODELOPT[algorithm])

    def parameters(name: str, parts: Parts) -> Parameters:
        return parts.get("weight_scale_2", parts["weight_scale"]), None

    return FolderGrid(config, parameters, ("input_scale",))


OF_MODELOPT = {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "ptpc_fp8"}


def bitsandbytes(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """bitsandbytes: no format here has its table, or its scales."""
    return FolderGrid(
        lambda name, read: refuse(f"{name!r} is quantized by bitsandbytes, and no format here has its codes"),
        lambda name, parts: (None, None),
    )


GRIDS: dict[str, Callable[[Tensors, Mapping[str, Any], Checkpoint], FolderGrid]] = {
    "fp8": fp8,
    "gptq": words,
    "awq": words,
    "compressed-tensors": compressed,
    "mxfp4": mxfp4,
    "modelopt": modelopt,
    "bitsandbytes": bitsandbytes,
}
