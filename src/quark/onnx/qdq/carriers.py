"""How a format travels in an ONNX file: the lowest opset whose QuantizeLinear and DequantizeLinear carry its type."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.config.job import Job
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ConfigError
from quark.numerics.formats import get_format
from quark.numerics.granularity import Group

#: Per-channel parameters and every fusion of ONNX Runtime start here; nothing is written below it.
BASE_OPSET = 13
_BLOCKS = 21
#: ONNX type -> lowest opset of DequantizeLinear with that type.
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
#: QuantizeLinear has the same types but one.
QUANTIZED_FROM = {name: opset for name, opset in STORED_FROM.items() if name != "INT32"}


def opset_of(job: Job) -> int:
    """The lowest opset that carries every spec of a job.

    Raises:
        ConfigError: a format that no standard operator carries.
    """
    wanted = job.options.ConvertOpsetVersion or BASE_OPSET
    layers = [job.rules.default, *(rule.layer for rule in job.rules.rules if rule.layer is not None)]
    return max([wanted, *(opset for layer in layers for opset in _opsets(layer, job.options.WeightsOnly))])


def _opsets(layer: LayerSpec, weights_only: bool) -> Iterator[int]:
    for slot, spec in vars(layer).items():
        if spec is None or (weights_only and slot in ("inputs", "outputs")):
            continue
        table = QUANTIZED_FROM if slot in ("inputs", "outputs") else STORED_FROM
        yield max(_carried(spec, table, slot), _BLOCKS if isinstance(spec.granularity, Group) else BASE_OPSET)


def _carried(spec: TensorSpec, table: dict[str, int], slot: str) -> int:
    onnx_type = get_format(spec.format).onnx_type
    if onnx_type not in table:
        allowed = ", ".join(sorted(table))
        raise ConfigError(f"{slot}: the data type {spec.format!r} has no standard ONNX carrier; carried are {allowed}")
    return table[onnx_type]


def onnx_type(spec: TensorSpec) -> ir.DataType:
    """The ONNX type of the codes."""
    return ir.DataType[get_format(spec.format).onnx_type or "UNDEFINED"]
