"""Layers that the CPU provider runs faster in float, Q and DQ counted: they stay float (FloatWhereFaster).

    minimize   sum of the kernels' times  +  Q or DQ for every tensor between a float and an integer kernel

over which nodes compute in integers: a minimum cut (:mod:`quark.search.min_cut`). The times are those of one table,
``kernel_times.tsv``, measured once over many shapes (``benchmarks/kernel_times.py``) and the same for everybody: the
same model gives the same file on every machine. It is the mean of two processors on one thread and of one on two, so
that what is good on one only is not chosen. Nodes that run as one kernel are decided together: a convolution
and its activation function, Sigmoid and Mul of a SiLU. What saves less than ``LEAST_PART`` of the model's
time, or little in all, stays as configured.

Not handled: nodes of unknown rank count as free. A free dimension counts as 1 where it is the first, as ``SIDE`` in
pictures, else as ``FREE``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.resources import files

import onnx_ir as ir

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.ir.surgery import constant_array, int_attribute, is_constant, name_of, sole_consumer
from quark.onnx.graph.shapes import prove_shapes
from quark.onnx.qdq import slots
from quark.onnx.qdq.op_rules import FUSED_PRODUCERS
from quark.search.min_cut import FOREVER, labels

OPTION = "FloatWhereFaster"
TUNED = "TuneSpeed: among what is faster in float on the machine that it was measured on"
REASON = f"{OPTION}: the CPU's kernels are faster in float here, conversions counted"
#: What leaving nodes in float has to save of the time of all in integers: this part, and so many microseconds or the
#: larger part; each connected group of them the third. The table is good for sums of several calls, not for one.
LEAST_PART, LEAST_TIME, LARGER_PART, LEAST_OF_GROUP = 0.005, 50.0, 0.05, 0.0002
#: The same, where nothing would be left in integers: the smallest models are tried for what quantization does to them.
LEAST_OF_ALL = 15.0
FREE = 64
#: Key of a model's ``meta``: how often it runs in an inference, where it is the body of a Loop or Scan.
RUNS = "quark.runs"
#: The same for both sides of a picture that is an input of the model: of 64 x 64 a detector's last layers would see
#: 2 x 2, and stay float.
SIDE = 256
#: Operators without a row whose kernels take about as long as those of one that has a row.
_LIKE = {
    "Clip": "Relu",
    "Flatten": "Reshape",
    "Squeeze": "Reshape",
    "Unsqueeze": "Reshape",
    "Split": "Slice",
    "Gather": "Slice",
    "Pad": "Concat",
    "Expand": "Concat",
    "Tile": "Concat",
    "DepthToSpace": "Transpose",
    "SpaceToDepth": "Transpose",
    "PRelu": "LeakyRelu",
    "InstanceNormalization": "LayerNormalization",
}
#: Convolutions that copy what the kernel covers at each place, row by row or, of volumes, one by one: in integers all
#: channels of a group at once, in float each channel. Depthwise ones of odd channels copy at a stride in float; in
#: integers each channel beyond groups of 8 takes as long as 9. The time of others goes by the larger tensor.
_ROWS = frozenset(["Conv 1x1 narrow", "Conv image", "Conv narrow"])
_ODD = "Conv depthwise 1"
COPIED = _ROWS | {"Conv 3D", "Conv 3D depthwise", _ODD}
#: Channels that kernels compute at a time.
_TOGETHER = 16
#: Any other: a kernel that has no integer form.
_OTHER = "Sqrt"
#: Activation functions that a float convolution computes within.
_WITHIN = frozenset(["Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid"])
_CLIPS = frozenset(["Relu", "Clip"])


def all_in_float(plan: Plan) -> bool:
    """Whether nothing is quantized because all that could be is faster in float."""
    return not plan.tensors and any(node.reason in (REASON, TUNED) for node in plan.nodes.values())


@dataclass
class _Unit:
    """Nodes that run as one kernel, and their microseconds in both forms."""

    nodes: list[ir.Node] = field(default_factory=list)
    float_time: float = 0.0
    integer_time: float = 0.0


def faster_in_float(
    model: ir.Model,
    chosen: Iterable[ir.Node],
    fixed: set[ir.Node],
    seconds: Sequence[Mapping[str, float]] = (),
    beside: bool = False,
) -> set[ir.Node]:
    """Those of the nodes to be quantized that are left in float.

    Args:
        chosen: the nodes to be quantized.
        fixed: those of them that are quantized in any case.
        seconds: of nodes, by name, in float and in integers, as measured; empty: the table's.
        beside: whether other layers, which are not chosen here, are quantized.
    """
    if (sized := _sized(model)) is not model:
        sized.meta[RUNS] = model.meta.get(RUNS, 1)
        of = dict(zip(model.graph, sized.graph, strict=True))
        asked = {of[node] for node in fixed}
        left = faster_in_float(sized, (of[node] for node in chosen), asked, seconds, beside)
        return {node for node, copy in of.items() if copy in left}
    members = set(chosen)
    units = _units(list(model.graph), members)
    for unit in units if seconds else ():
        names = [name_of(node) for node in unit.nodes]
        unit.float_time, unit.integer_time = (sum(form.get(name, 0.0) for name in names) * 1e6 for form in seconds)
    of_node = {node: k for k, unit in enumerate(units) for node in unit.nodes}
    tensors = _tensors(model, of_node)
    integer = _cut(units, tensors, fixed)
    whole = _total(units, tensors, [True] * len(units))
    for group in _groups([k for k, here in enumerate(integer) if not here], tensors):
        with_group = [here or k in group for k, here in enumerate(integer)]
        saved = _total(units, tensors, with_group) - _total(units, tensors, integer)
        if saved < max(LEAST_OF_GROUP * whole, 0.2):
            integer = with_group
    if whole - _total(units, tensors, integer) < _least(whole, beside or any(integer), int(model.meta.get(RUNS, 1))):
        return set()
    return {node for unit, here in zip(units, integer, strict=True) if not here for node in unit.nodes}


def _sized(model: ir.Model) -> ir.Model:
    """The model with sizes in the place of free ones; itself, where there is none or nothing follows from them."""
    if all(isinstance(size, int) for value in model.graph.inputs for size in value.shape or ()):
        return model
    sized = model.clone()
    for value in sized.graph.inputs:
        value.shape = None if value.shape is None else ir.Shape(_input_sizes(value.shape))
    empty = prove_shapes(sized) and any(0 in (_sizes(value) or ()) for node in sized.graph for value in node.outputs)
    return model if empty else sized  # nothing is left of a sound of 64 samples behind a kernel of 256


def _input_sizes(shape: ir.Shape) -> list[int]:
    free = [axis for axis, size in enumerate(shape) if axis and not isinstance(size, int)]
    most = SIDE if len(shape) == 4 and len(free) == 2 else FREE
    return [size if isinstance(size, int) else 1 if axis == 0 else most for axis, size in enumerate(shape)]


def _least(whole: float, some: bool, runs: int = 1) -> float:
    """Microseconds of ``runs`` that have to be saved of ``whole`` in each; ``some``: layers stay in integers."""
    small = min(LEAST_TIME, max(LARGER_PART * whole * runs, 1.0)) if some else LEAST_OF_ALL
    return max(LEAST_PART * whole, small / runs)


def runs_of(node: ir.Node) -> int:
    """How often the bodies of a node run: an If's once, a Loop's or Scan's ``FREE`` times where it is not known."""
    if node.op_type == "Loop" and not node.domain:
        count = constant_array(node.inputs[0])
        return FREE if count is None or not count.size else min(max(int(count.reshape(-1)[0]), 1), FREE)
    if node.op_type == "Scan" and not node.domain:
        scanned, axes = int_attribute(node, "num_scan_inputs", 1), node.attributes.get("scan_input_axes")
        sizes = _sizes(node.inputs[-scanned])
        axis = axes.as_ints()[0] if axes is not None else 0
        return min(max(sizes[axis], 1), FREE) if sizes and -len(sizes) <= axis < len(sizes) else FREE
    return 1


# ---- times -----------------------------------------------------------------------------------------------------------


@cache
def table() -> Mapping[tuple[str, str], tuple[float, float, float]]:
    """(kind, form) -> microseconds a call, nanoseconds an element, microseconds a million products."""
    text = files("quark.onnx.qdq").joinpath("kernel_times.tsv").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")][1:]
    return {(kind, form): (float(a), float(b), float(c)) for kind, form, a, b, c in lines}


def _time(kind: str, form: str, elements: float, products: float = 0.0) -> float:
    call, element, product = table()[kind, form]
    return call + element * elements / 1e3 + product * products / 1e6


def float_is_faster(node: ir.Node) -> bool:
    """Whether the float kernel of a node takes less time than the one that reads codes; conversions are not counted."""
    in_float, in_integers = _node_times(node)
    return in_float < in_integers


def dynamic_is_faster(node: ir.Node) -> bool:
    """Whether an LSTM is faster with integer weights and a scale for what it reads at every step.

    Steps and samples that are not known count as one, with which the float form is best.
    """
    read, weight = node.inputs[0], _sizes(node.inputs[1])
    if read is None or weight is None:
        return False
    shape = read.shape or ()
    steps, batch = (one if isinstance(one, int) else 1 for one in (shape[:2] if len(shape) == 3 else (1, 1)))
    directions, gates, entries = weight
    computed = steps * batch * directions * gates
    kind = "LSTM" if batch == 1 else "LSTM batch"
    times = [_time(kind, form, computed, computed * (entries + gates / 4)) for form in ("float", "integer")]
    return times[1] < times[0]


def _node_times(node: ir.Node) -> tuple[float, float]:
    """Microseconds of a node in float and in integers."""
    read = [_elements(value) for value in node.inputs if slots.is_float(value) and not is_constant(value)]
    made = [_elements(value) for value in node.outputs]
    known = [one for one in (*read, *made) if one is not None]
    if not read or len(known) < len(read) + len(made):
        return 0.0, 0.0
    elements = max(*known, sum(known[: len(read)])) if node.op_type == "Concat" else max(known)
    kind, products = _kind(node)
    counts = (elements, elements)
    if kind in COPIED:
        shape = _sizes(node.inputs[1]) or []
        counts = copied(kind, shape, int_attribute(node, "group", 1), known[-1] // shape[0], elements)
    times = _time(kind, "float", counts[0], products), _time(kind, "integer", counts[1], products)
    if node.op_type == "ConvTranspose":  # no integer kernel: the float one between conversions
        return times[0], times[0] + _time(_OTHER, "integer", elements) - _time(_OTHER, "float", elements)
    return times


def _kind(node: ir.Node) -> tuple[str, float]:
    """The row of a node, and its products."""
    made = _elements(node.outputs[0]) or 0.0
    if node.op_type in ("Conv", "ConvTranspose") and node.inputs[1] is not None:
        shape, group = _sizes(node.inputs[1]) or [_TOGETHER, 1], int_attribute(node, "group", 1)
        products = float(made * math.prod(shape[1:]))
        if node.op_type == "ConvTranspose":
            return "Conv", float((_elements(node.inputs[0]) or 0.0) * math.prod(shape[1:]))
        return convolution(shape, group, products)
    if node.op_type in ("MatMul", "Gemm") and node.inputs[1] is not None:
        depth = (_sizes(node.inputs[0]) or [1])[-1]
        rows = math.prod((_sizes(node.outputs[0]) or [])[:-1])
        kind = "MatMul" if not is_constant(node.inputs[1]) else "MatMul weight" if rows > 1 else "MatMul row"
        return kind, float(made * depth)
    kind = _LIKE.get(node.op_type, node.op_type)
    if kind == "Resize" and "mode" in node.attributes and node.attributes["mode"].as_string() == "linear":
        kind = "Resize linear"
    return kind if (kind, "float") in table() else _OTHER, 0.0


def copied(kind: str, shape: Sequence[int], group: int, places: int, larger: int) -> tuple[int, int]:
    """How often a convolution of a kind in ``COPIED`` copies, in float and in integers, by the shape of its weight, its
    groups, the places of its output and the elements of its larger tensor."""
    each = places * math.prod(shape[2:]) // (shape[-1] if kind in _ROWS else 1)
    if kind == _ODD:
        stepped = 2 * larger > 5 * places * shape[0]  # by a stride, not by the edge that padding leaves out
        return each * shape[0] * stepped, each * (shape[0] + 8 * (shape[0] % 8))
    return (each * group * shape[1], each * group) if kind == "Conv 3D" else (each, each)


def convolution(shape: Sequence[int], group: int, products: float) -> tuple[str, float]:
    """The row of a convolution by the shape of its weight, and its products: those of whole groups of channels."""
    made, read, *kernel = shape
    whole = products * (-(-made // _TOGETHER) * _TOGETHER) / made
    narrow = " narrow" if made < _TOGETHER else ""
    odd = " odd" if made % 4 or read % 4 else ""  # integer kernels take 4 at a time
    if len(kernel) == 3 and math.prod(kernel) > 1:
        return ("Conv 3D depthwise", products) if group > 1 and read == 1 else ("Conv 3D", whole)
    if group > 1 and read > 1:
        return "Conv grouped", products
    if len(kernel) == 1:
        one, places = "Conv 1D 1" if kernel[0] == 1 else "Conv 1D", products / math.prod(shape)
        computed = 4 if places <= 1 else max(places, _TOGETHER)  # one is a sum of rows, several take as long as 16
        return ("Conv 1D depthwise", products) if group > 1 else (f"{one}{odd}", whole * computed / (places or 1))
    if group > 1:
        even = next(size for size in (_TOGETHER, 8, 4, 1) if made % size == 0)  # float kernels want 4
        return "Conv depthwise" if even == _TOGETHER else f"Conv depthwise {even}", products if even == 1 else whole
    if read <= 4:
        return "Conv image", whole
    if math.prod(kernel) > 1:
        return f"Conv{narrow}", whole
    return f"Conv 1x1{narrow or odd}", whole


def _sizes(value: ir.Value | None) -> list[int] | None:
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else 1 if axis == 0 else FREE for axis, size in enumerate(value.shape)]


def _elements(value: ir.Value | None) -> int | None:
    sizes = _sizes(value)
    return None if sizes is None else math.prod(sizes)


# ---- units -----------------------------------------------------------------------------------------------------------


def _units(graph: Sequence[ir.Node], members: set[ir.Node]) -> list[_Unit]:
    """The members, in the order of the graph, those together that are one kernel."""
    units: list[_Unit] = []
    of_node: dict[ir.Node, _Unit] = {}
    norms = {node: norm[0] for norm in map(_norm, graph) if norm for node in norm}
    whole: dict[ir.Node, _Unit] = {}
    for node in filter(members.__contains__, graph):
        float_time, integer_time = _node_times(node)
        unit = _Unit()
        gate = _gate(node)
        before = _before(node)
        if (norm := norms.get(node)) is not None:
            if norm not in whole:
                whole[norm] = _norm_unit(_norm(norm), members)
                units.append(whole[norm])
            unit, float_time, integer_time = whole[norm], 0.0, integer_time
        elif gate is not None and gate in of_node and of_node[gate].nodes == [gate]:
            unit, elements = of_node[gate], _elements(node.outputs[0]) or 0.0
            unit.float_time, unit.integer_time = _time("SiLU", "float", elements), _time("SiLU", "integer", elements)
            float_time = integer_time = 0.0
        elif before in of_node:
            unit = of_node[before]
            float_time = 0.0 if before.op_type in ("Conv", "ConvTranspose") or _scaled(node) else float_time
            integer_time = 0.0 if node.op_type in _CLIPS else integer_time
        else:
            units.append(unit)
        unit.nodes.append(node)
        unit.float_time += float_time
        unit.integer_time += integer_time
        of_node[node] = unit
    return units


def _norm(node: ir.Node) -> list[ir.Node]:
    """The nodes of an RMSNorm or LayerNorm, from the Mul (or Div) of what is normalized on; empty where it is none.

    x * (1 / sqrt(mean(x ** 2) + epsilon)), or x / sqrt(..), which ONNX Runtime computes in one kernel in float, with
    the Sub of a mean before and a Mul and an Add of constants behind.
    """
    chain: list[ir.Node] = []
    value = node.inputs[1] if node.op_type in ("Mul", "Div") else None
    for kinds in (("Div", "Reciprocal"), ("Sqrt",), ("Add",), ("ReduceMean",), ("Pow", "Mul")):
        made = None if value is None else value.producer()
        if node.op_type == "Div" and "Reciprocal" in kinds:
            continue
        if made is None or made.op_type not in kinds or sole_consumer(made.outputs[0]) is None:
            return []
        chain.append(made)
        value = made.inputs[1] if made.op_type == "Div" else made.inputs[0]
    if value is not node.inputs[0]:
        return []
    last = node
    for kind in ("Mul", "Add"):
        reader = sole_consumer(last.outputs[0])
        if reader is not None and reader.op_type == kind and any(map(is_constant, reader.inputs)):
            chain.append(reader)
            last = reader
    centred = None if value is None else value.producer()
    if centred is not None and centred.op_type == "Sub":
        chain += [centred, *(made for made in (one and one.producer() for one in centred.inputs[1:]) if made)]
    return [node, *chain]


def _norm_unit(norm: Sequence[ir.Node], members: set[ir.Node]) -> _Unit:
    """A normalization: one kernel in float; in integers the times of the members are added, the others stay apart."""
    apart = sum(_node_times(node)[0] for node in norm if node not in members)
    return _Unit([], _time("LayerNormalization", "float", _elements(norm[0].outputs[0]) or 0.0), apart)


def _gate(node: ir.Node) -> ir.Node | None:
    """The Sigmoid of a Mul that makes a SiLU with it."""
    for value, other in (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else ():
        gate = None if value is None else value.producer()
        if value is not None and gate is not None and gate.op_type == "Sigmoid" and gate.inputs[0] is other:
            return gate if sole_consumer(value) is node else None
    return None


def _scaled(node: ir.Node) -> ir.Value | None:
    """What a Mul or Div multiplies by one constant number, as a float MatMul before it does by the way."""
    for value, other in (node.inputs, node.inputs[::-1]) if node.op_type in ("Mul", "Div") else ():
        if is_constant(other) and _elements(other) == 1 and (node.op_type == "Mul" or other is node.inputs[1]):
            return value
    return None


def _before(node: ir.Node) -> ir.Node | None:
    """The node that an activation function, or a product with one number, is one kernel with."""
    scaled = _scaled(node)
    value = scaled or (node.inputs[0] if node.inputs and node.op_type in _WITHIN else None)
    producer = None if value is None or sole_consumer(value) is not node else value.producer()
    if producer is None or scaled:
        return producer if producer is not None and producer.op_type == "MatMul" else None
    fits = producer.op_type == "Conv" or (node.op_type in _CLIPS and producer.op_type in FUSED_PRODUCERS)
    return producer if fits else None


@dataclass(frozen=True)
class _Tensor:
    """A tensor between kernels: who makes it and who reads it (None: something that stays float), and conversions."""

    maker: int | None
    readers: frozenset[int | None]
    quantize: float
    dequantize: float


def _tensors(model: ir.Model, of_node: Mapping[ir.Node, int]) -> list[_Tensor]:
    """Every float tensor that a unit makes or reads and another kernel reads or makes."""
    found = []
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        elements, producer = _elements(value), value.producer()
        if elements is None or not slots.is_float(value):
            continue
        maker = None if producer is None else of_node.get(producer)
        read: set[int | None] = {of_node.get(use.node) for use in value.uses() if use.node.op_type != "Shape"}
        read |= {None} if value.is_graph_output() else set()
        readers = frozenset(read - ({maker} if maker is not None else set()))
        if readers and (maker is not None or readers != {None}):
            suffix = " image" if len(value.shape or ()) == 4 else ""
            times = [_time(kind + suffix, "integer", elements) for kind in ("QuantizeLinear", "DequantizeLinear")]
            found.append(_Tensor(maker, readers, *times))
    return found


# ---- decision --------------------------------------------------------------------------------------------------------


def _cut(units: Sequence[_Unit], tensors: Sequence[_Tensor], fixed: set[ir.Node]) -> list[bool]:
    """Which units compute in integers at the least total."""
    outside = len(units)
    yes = [round(unit.integer_time * 1e3) for unit in units] + [FOREVER]
    no = [FOREVER if fixed & set(unit.nodes) else round(unit.float_time * 1e3) for unit in units] + [0]
    pairs: list[tuple[int, int, int]] = []
    for tensor in tensors:
        maker = outside if tensor.maker is None else tensor.maker
        readers = [outside if reader is None else reader for reader in sorted(tensor.readers, key=str)]
        codes, numbers = len(yes), len(yes) + 1
        yes, no = [*yes, 0, 0], [*no, 0, 0]
        pairs.append((maker, numbers, round(tensor.dequantize * 1e3)))
        pairs += [(numbers, reader, FOREVER) for reader in readers]
        pairs.append((codes, maker, round(tensor.quantize * 1e3)))
        pairs += [(reader, codes, FOREVER) for reader in readers]
    return labels(yes, no, pairs)[:outside]


def _total(units: Sequence[_Unit], tensors: Sequence[_Tensor], integer: Sequence[bool]) -> float:
    """Microseconds of all kernels and conversions."""
    kernels = sum(unit.integer_time if here else unit.float_time for unit, here in zip(units, integer, strict=True))
    for tensor in tensors:
        made = tensor.maker is not None and integer[tensor.maker]
        read = {reader is not None and integer[reader] for reader in tensor.readers}
        kernels += tensor.dequantize if made and False in read else 0.0
        kernels += tensor.quantize if not made and True in read else 0.0
    return kernels


def _groups(left: Sequence[int], tensors: Sequence[_Tensor]) -> list[set[int]]:
    """Connected groups of the units that are left in float."""
    root = {unit: unit for unit in left}

    def find(unit: int) -> int:
        while root[unit] != unit:
            root[unit] = root[root[unit]]
            unit = root[unit]
        return unit

    for tensor in tensors:
        joined = [one for one in (tensor.maker, *tensor.readers) if one is not None and one in root]
        for other in joined[1:]:
            root[find(other)] = find(joined[0])
    groups: dict[int, set[int]] = {}
    for unit in left:
        groups.setdefault(find(unit), set()).add(unit)
    return list(groups.values())
