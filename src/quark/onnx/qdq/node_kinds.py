"""How a format travels in an ONNX file: the kind of node that carries it, read off its row.

standard   ``QuantizeLinear``/``DequantizeLinear``: types that ONNX Runtime runs natively
extended   ``com.amd.quark::ExtendedQuantizeLinear``/``ExtendedDequantizeLinear``: 32-bit integers, 16-bit floats
cast       ``Cast`` to the type and back: 16-bit floats, where ``BF16QDQToCast`` asks for it
element    ``org.openquark::QuantizeDequantize``/``PackedDequantize``: any other element format
block      ``com.amd.quark::BFP…`` and ``MX…``, ``org.openquark::Block…`` where there is none; weights are stored packed

Narrow activations (2 to 4 bits, FP8) are ``element`` even where the standard operators have their type: ONNX Runtime
1.31 fuses the standard pair into QLinearConv and then refuses the type, so the file would not load by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.overrides import Override, parse_overrides
from quark.config.plan import TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec, check_sign
from quark.errors import ConfigError
from quark.numerics.blocks import Block
from quark.numerics.formats import get_format
from quark.numerics.granularity import Group, Tensor
from quark.operators.block_operators import ROUNDING_MODES, BlockOperator, operator_of

Kind = Literal["standard", "extended", "cast", "element", "block"]

#: Per-channel parameters and every fusion of ONNX Runtime start here; nothing is written below it.
BASE_OPSET = 13
_HALF_SCALES = 19
_BLOCKED_PARAMETERS = 21
#: ONNX type -> lowest opset of the standard DequantizeLinear with that type.
STORED_FROM = {
    "INT8": 13,
    "UINT8": 13,
    "INT32": 13,
    "FLOAT8E4M3FN": 19,
    "FLOAT8E5M2": 19,
    "INT16": 21,
    "UINT16": 21,
    "INT4": 21,
    "UINT4": 21,
    "INT2": 25,
    "UINT2": 25,
}
#: Types whose standard pair around an activation survives ONNX Runtime's fusions.
ACTIVATION_TYPES = ("INT8", "UINT8", "INT16", "UINT16")
#: Types whose constants are read by Cast and Mul: ONNX Runtime folds those when it loads the model, dequantizes a
#: DequantizeLinear at every run, and fuses it into integer kernels that then refuse the type.
_FOLDED_TYPES = ("FLOAT8E4M3FN", "FLOAT8E5M2", "INT2", "UINT2")
#: The same for types whose standard constants are refused in groups only, beside 8-bit activations.
_FOLDED_IN_GROUPS = ("INT8", "UINT8")
#: Types of the extended operators.
_EXTENDED_TYPES = ("INT32", "UINT32", "FLOAT16", "BFLOAT16")


#: Float types whose scale is 1 unless ``ActivationScaled``/``WeightScaled`` ask for a range: its half width.
REDUCED_RANGE = {"BFLOAT16": 2.0, "FLOAT16": 65504.0}


def block_size(spec: TensorSpec) -> int | None:
    """Elements per block of a block format; ``None`` for the others."""
    row = spec.row
    return row.size if isinstance(row, Block) else None


def block_operator(spec: TensorSpec) -> BlockOperator:
    """The operator of a block format, with the length of its blocks.

    Raises:
        ConfigError: no operator has the block scales of this spec.
    """
    return operator_of(cast(Block, spec.row))


def activation_kind(spec: TensorSpec, options: Options) -> Kind:
    """How an activation of this spec is written."""
    row = spec.row
    if isinstance(row, Block):
        return "block"
    if row.unit_scale and (options.BF16QDQToCast or options.EnableVaimlBF16):
        return "cast"
    if row.onnx_type in ACTIVATION_TYPES:
        return "standard"
    return "extended" if row.onnx_type in _EXTENDED_TYPES else "element"


def constant_kind(spec: TensorSpec, options: Options) -> Kind:
    """How a constant of this spec is stored."""
    row = spec.row
    if isinstance(row, Block):
        return "block"
    groups = isinstance(spec.granularity, Group)
    if row.onnx_type in _FOLDED_TYPES or (groups and row.onnx_type in _FOLDED_IN_GROUPS):
        return "cast"
    if row.onnx_type in STORED_FROM:
        return "standard"
    if row.unit_scale and (options.BF16QDQToCast or options.EnableVaimlBF16):
        return "cast"
    return "extended" if row.onnx_type in _EXTENDED_TYPES else "element"


def opset_of(job: Job) -> int:
    """The lowest opset that carries every spec of a job.

    Raises:
        ConfigError: a granularity that the format's carrier does not have.
    """
    if job.mode == "nbits":
        return job.options.ConvertOpsetVersion or BASE_OPSET
    layers = [job.rules.default, *(rule.layer for rule in job.rules.rules if rule.layer is not None)]
    needed = [STORED_FROM["INT16"]] if job.options.Int16Bias else []
    overrides = parse_overrides(job.options.TensorQuantOverrides)
    needed += [opset for wanted in overrides.values() for opset in _told(wanted)]
    needed += [opset for layer in layers for opset in opsets_of(layer, job.options)]
    needed += [opset for row in job.plan or () for opset in opsets_of_row(row, job.options)]
    return max([job.options.ConvertOpsetVersion or BASE_OPSET, *needed])


def _told(wanted: Override) -> Iterator[int]:
    """The opsets of the types of one override."""
    for format in (wanted.format, wanted.convert and wanted.convert.format):
        if format:
            yield STORED_FROM.get(get_format(format).onnx_type or "", BASE_OPSET)


def opsets_of_row(row: TensorPlan, options: Options) -> Iterator[int]:
    """The opsets that carry a row of a plan; errors as in ``opsets_of``."""
    slot = {"activation": "inputs", "weight": "weight", "bias": "bias"}[row.role]
    return opsets_of(LayerSpec(**{slot: row.spec}), options)


def roundings(spec: TensorSpec, options: Options) -> tuple[str, ...]:
    """How the node that quantizes an activation can round."""
    rounds = activation_kind(spec, options) == "block" and block_operator(spec).rounds
    return tuple(ROUNDING_MODES) if rounds else ("half_even",)


def opsets_of(layer: LayerSpec, options: Options) -> Iterator[int]:
    """The opsets that carry the specs of a layer.

    Raises:
        ConfigError: a granularity that the format's carrier does not have, or a format of scales.
    """
    for slot, spec in vars(layer).items():
        activation = slot in ("inputs", "outputs")
        if spec is None or (options.WeightsOnly and activation):
            continue
        kind = activation_kind(spec, options) if activation else constant_kind(spec, options)
        check_sign(slot, spec)
        _check_granularity(spec, slot, kind)
        if kind == "block":
            block_operator(spec)
        _check_scaled(spec, slot, options.ActivationScaled if activation else options.WeightScaled)
        yield _HALF_SCALES if options.UseFP32Scale is False else BASE_OPSET
        yield STORED_FROM.get(spec.row.onnx_type or "", BASE_OPSET)  # constant operands have an activation's type
        if kind == "standard":
            yield _BLOCKED_PARAMETERS if isinstance(spec.granularity, Group) else BASE_OPSET


def _check_granularity(spec: TensorSpec, slot: str, kind: Kind) -> None:
    if slot in ("inputs", "outputs") and kind != "block" and not isinstance(spec.granularity, Tensor):
        raise ConfigError(
            f"{slot}: an activation has one scale per tensor (QuantGranularity.Tensor), not {spec.granularity}"
        )
    if kind != "block" and spec.row.unit_scale and not isinstance(spec.granularity, Tensor):
        raise ConfigError(f"{slot}: {spec.format} has no scales, and none {spec.granularity}; allowed is Tensor")
    if kind not in ("standard", "block", "cast") and isinstance(spec.granularity, Group):
        raise ConfigError(
            f"{slot}: ONNX has no groups of the data type {spec.format!r}; allowed are Tensor and Channel"
        )


def _check_scaled(spec: TensorSpec, slot: str, scaled: bool) -> None:
    if scaled and spec.row.onnx_type not in REDUCED_RANGE:
        option = "ActivationScaled" if slot in ("inputs", "outputs") else "WeightScaled"
        raise ConfigError(
            f"{option} scales {', '.join(REDUCED_RANGE).lower()} only; the data type of {slot} is {spec.format!r}"
        )


def onnx_type(spec: TensorSpec) -> ir.DataType:
    """The ONNX type of the codes; INT32 for the zero point of formats that ONNX does not have."""
    return ir.DataType[spec.row.onnx_type or "INT32"]
