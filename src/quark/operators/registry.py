"""The operators of domains ``com.amd.quark`` and ``org.openquark`` as one table, and what a writer of models needs.

``node`` makes a node with all its attributes, ``function_for`` the model-local function that runs it on any runtime.
The two meet in the overload name, which states attributes and view; a runtime that registers its own kernel for the
operator never looks at the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from onnx import FunctionProto, NodeProto, helper

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, check_name, unknown
from quark.operators import affine, bfp, blockquant, elementwise, instance_norm, lstm, mx, storage
from quark.operators.body import LOWEST_OPSET, Body
from quark.operators.views import NodeFacts

DOMAIN = "com.amd.quark"
OWN_DOMAIN = "org.openquark"
VERSION = 1


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: op_type of its nodes.
        domain: its domain; the version of both domains is 1.
        inputs: names of the inputs; functions have a prefix of them.
        attributes: names and defaults, in the order of the overload name.
        allowed: values that an attribute may take: a tuple of them, a range, or a function that gives a tuple.
        variant: (attributes, facts) -> label of the body to use there.
        write: (body, attributes, label) -> name of the output.
        optional: names of attributes that a node has only where it needs them.
    """

    name: str
    domain: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, float | str]
    allowed: Mapping[str, tuple | range | Callable[[], tuple]]
    variant: Callable[[Mapping, NodeFacts], str]
    write: Callable[[Body, Mapping, str], str]
    optional: tuple[str, ...] = ()

    def settings(self, given: Mapping[str, float | str] | None = None) -> dict[str, float | str]:
        """``given`` completed with the defaults, in the order of the table.

        Raises:
            ConfigError: an attribute that the operator does not have, or a value that it does not take.
        """
        given = given or {}
        for name in given:
            if name not in self.attributes and name not in self.optional:
                raise ConfigError(unknown(f"attribute of {self.name}", name, (*self.attributes, *self.optional)))
        extra = {name: given[name] for name in self.optional if name in given}
        values = {name: given.get(name, default) for name, default in self.attributes.items()} | extra
        return {name: self._checked(name, value) for name, value in values.items()}

    def _checked(self, name: str, value: float | str) -> float | str:
        allowed = self.allowed.get(name)
        allowed = allowed() if callable(allowed) else allowed
        if isinstance(allowed, range) and value not in allowed:
            raise ConfigError(f"{name} of {self.name} is {value!r}; allowed are {allowed.start} to {allowed.stop - 1}")
        if isinstance(allowed, tuple) and value not in allowed:
            raise ConfigError(unknown(f"{name} of {self.name}", value, allowed))
        return value


_BITS = range(10, 25)  # one to fifteen mantissa bits
_BLOCK = range(1, 1 << 16)
_AXIS = range(-64, 64)
_FLAG = range(2)

ROWS = (
    Operator(
        "ExtendedQuantizeLinear",
        DOMAIN,
        ("x", "scale", "zero_point"),
        affine.ATTRIBUTES,
        {"axis": _AXIS},
        affine.variant,
        affine.write_quantize,
    ),
    Operator(
        "ExtendedDequantizeLinear",
        DOMAIN,
        ("x", "scale", "zero_point"),
        affine.ATTRIBUTES,
        {"axis": _AXIS},
        affine.variant,
        affine.write_dequantize,
    ),
    Operator(
        "BFPQuantizeDequantize",
        DOMAIN,
        ("x",),
        bfp.ATTRIBUTES,
        {
            "bfp_method": bfp.METHODS,
            "axis": _AXIS,
            "bit_width": _BITS,
            "block_size": _BLOCK,
            "rounding_mode": range(3),
            "sub_block_size": _BLOCK,
            "sub_block_shift_bits": range(1, 4),
            "convert_to_bfloat_before_bfp": _FLAG,
            "use_compiler_version_cpu_kernel": _FLAG,
        },
        bfp.variant,
        bfp.write,
    ),
    Operator(
        "MXQuantizeDequantize",
        DOMAIN,
        ("x",),
        mx.ATTRIBUTES,
        {"element_dtype": mx.ELEMENT_TYPES, "axis": _AXIS, "block_size": _BLOCK, "rounding_mode": range(3)},
        mx.variant,
        mx.write,
    ),
    Operator(
        "ExtendedInstanceNormalization",
        DOMAIN,
        ("x", "scale", "bias"),
        instance_norm.ATTRIBUTES,
        {},
        instance_norm.variant,
        instance_norm.write,
    ),
    Operator(
        "ExtendedLSTM",
        DOMAIN,
        ("x", "w", "r", "b"),
        lstm.ATTRIBUTES,
        {"direction": lstm.DIRECTIONS, "hidden_size": range(1, 1 << 31), "layout": _FLAG},
        lstm.variant,
        lstm.write,
    ),
    Operator(
        "QuantizeDequantize",
        OWN_DOMAIN,
        ("x", "scale", "zero_point"),
        elementwise.ATTRIBUTES,
        {"format": elementwise.formats, "axis": _AXIS},
        elementwise.variant,
        elementwise.write,
    ),
    Operator(
        "BlockQuantizeDequantize",
        OWN_DOMAIN,
        ("x", "tensor_scale"),
        blockquant.ATTRIBUTES,
        {"format": blockquant.formats, "axis": _AXIS, "block_size": _BLOCK},
        blockquant.variant,
        blockquant.write,
        ("block_size",),
    ),
    Operator(
        "BlockDequantize",
        OWN_DOMAIN,
        storage.BLOCK_INPUTS,
        storage.BLOCK_ATTRIBUTES,
        {"format": storage.block_formats, "axis": _AXIS, "length": range(1 << 31), "block_size": _BLOCK},
        storage.block_variant,
        storage.write_block,
        ("block_size",),
    ),
    Operator(
        "PackedDequantize",
        OWN_DOMAIN,
        storage.PACKED_INPUTS,
        storage.PACKED_ATTRIBUTES,
        {"format": storage.packed_formats, "axis": _AXIS},
        storage.packed_variant,
        storage.write_packed,
    ),
)

OPERATORS: Mapping[str, Operator] = MappingProxyType({row.name: row for row in ROWS})


def get_operator(name: str) -> Operator:
    """The row named ``name``.

    Raises:
        ConfigError: no such operator; the message gives the nearest name.
    """
    check_name("operator", name, OPERATORS)
    return OPERATORS[name]


def overload(name: str, attributes: Mapping[str, float | str] | None = None, facts: NodeFacts = NodeFacts()) -> str:  # noqa: B008
    """The overload name of a node: every attribute value, and the body to use at ``facts``."""
    operator = get_operator(name)
    settings = operator.settings(attributes)
    return ",".join(str(value) for value in settings.values()) + "@" + operator.variant(settings, facts)


def node(
    op_name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, float | str] | None = None,
    facts: NodeFacts = NodeFacts(),  # noqa: B008 (a frozen value)
    name: str = "",
) -> NodeProto:
    """A node of one of our operators, with every attribute written and the overload of its ``facts``.

    Args:
        op_name: a key of ``OPERATORS``.
        inputs, outputs: names of values.
        attributes: those that differ from the defaults.
        facts: what is known about the tensors of the node.
        name: of the node.

    Raises:
        ConfigError: an unknown operator or attribute, or a value outside its range.
        ModelError: the tensor at ``facts`` has no such axis.
    """
    operator = get_operator(op_name)
    settings: dict[str, Any] = dict(operator.settings(attributes))
    made = helper.make_node(op_name, list(inputs), list(outputs), name or None, domain=operator.domain, **settings)
    made.overload = overload(op_name, attributes, facts)
    return made


def function_for(
    op_name: str, attributes: Mapping[str, float | str] | None, opset: int, label: str | None = None
) -> FunctionProto:
    """The model-local function of an operator.

    Args:
        op_name: a key of ``OPERATORS``.
        attributes: of the node; the defaults stand for what is missing.
        opset: of the standard domain in the model, ``LOWEST_OPSET`` or higher.
        label: the part of the overload name after ``@``; None is the body for a tensor of which nothing is known.

    Raises:
        ModelError: an opset in which the body cannot be written.
    """
    operator = get_operator(op_name)
    settings = operator.settings(attributes)
    if opset < LOWEST_OPSET:
        raise ModelError(f"{op_name} needs opset {LOWEST_OPSET} or higher, and the model has opset {opset}")
    label = operator.variant(settings, NodeFacts()) if label is None else label
    body = Body(opset)
    output = operator.write(body, settings, label)
    full = ",".join(str(value) for value in settings.values()) + "@" + label
    return body.function(operator.domain, op_name, full, operator.inputs, {"y": output})
