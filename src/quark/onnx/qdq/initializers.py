"""Scales, zero points and bounds in the graph: each is written once and shared by the nodes that read it."""

from __future__ import annotations

import zlib

import numpy as np
import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.ir.surgery import Names, add_initializer, tensor_alias
from quark.onnx.qdq.node_kinds import onnx_type

#: Letters of a tensor's name that what is written for it repeats.
LONGEST, KEPT = 40, 24


def stem(tensor: TensorPlan) -> str:
    """What the names of a tensor's nodes and parameters begin with.

    That is its name; of a long one the end, with a checksum of all of it: each tensor's name is written some ten times,
    and names of several hundred letters (TensorFlow's) would take more bytes than 8-bit codes save. Compilers for NPUs
    may look for the names of this interface, so those of tensors with power-of-two scales stay whole.
    """
    return tensor.name if tensor.spec.scale_rule == "power_of_two" else shortened(tensor.name)


def shortened(name: str) -> str:
    """The last letters of a name and a checksum of the whole; what is not long stays."""
    return name if len(name) <= LONGEST else f"{name[-KEPT:]}_{zlib.crc32(name.encode()):08x}"


class ParameterInitializers:
    """The parameter initializers of one graph. Members of a group share theirs."""

    def __init__(self, model: ir.Model) -> None:
        self.names = Names(model)
        self._graph = model.graph
        self._made: dict[str, tuple[ir.Value, ir.Value]] = {}
        self._unit: ir.Value | None = None
        #: Codes of constants that are in the graph, by the name of the constant.
        self.codes: dict[str, ir.Value] = {}

    def add(self, tensor: np.ndarray | ir.TensorProtocol, name: str) -> ir.Value:
        """A new initializer of this name, or of the next free one where the model uses it already."""
        fresh = self.names.fresh(name)
        if isinstance(tensor, np.ndarray):
            return add_initializer(self._graph, tensor, fresh)
        return add_initializer(self._graph, tensor_alias(tensor, fresh), fresh)

    def of(self, tensor: TensorPlan, zero_type: ir.DataType | None = None) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point of a tensor; the zero point has the type of the codes, unless another is wanted."""
        key = tensor.group if tensor.role == "activation" else tensor.name
        if key not in self._made:
            prefix = f"{stem(tensor)}_quantized" if tensor.role == "bias" else stem(tensor)
            scale = np.asarray(tensor.scale, np.float16 if tensor.spec.scale_rule == "float16" else np.float32)
            dtype = zero_type or onnx_type(tensor.spec)
            zero_point = np.asarray(tensor.zero_point).astype(dtype.numpy())
            named = ir.Tensor(zero_point, dtype=dtype, name=f"{prefix}_zero_point")
            self._made[key] = (
                self.add(scale, f"{prefix}_scale"),
                self.add(named, f"{prefix}_zero_point"),
            )
        return self._made[key]

    def bounds(self, name: str, largest: float) -> tuple[ir.Value, ir.Value]:
        """The initializers ``<name>_min`` and ``<name>_max``, -largest and largest."""
        if name not in self._made:
            low, high = np.float32(-largest), np.float32(largest)
            self._made[name] = (
                self.add(np.asarray(low), f"{name}_min"),
                self.add(np.asarray(high), f"{name}_max"),
            )
        return self._made[name]

    def unit(self) -> ir.Value:
        """The scale 1, for codes that are multiplied by their own scales."""
        self._unit = self._unit or self.add(np.asarray(np.float32(1)), "unit_scale")
        return self._unit
