"""Very large graphs run in pieces, one session each.

What ONNX Runtime (1.31) does to a graph when it opens it takes time with the square of the number of nodes: 0.4 s for
3,000 nodes with Q and DQ, 6 s for 12,000, some 50 s for 30,000. In pieces it is linear:

    nodes  n0 ... n1023 | n1024 ... | ...      cut where the fewest bytes an element cross, codes rather than floats
    run    every piece is fed what earlier ones made; a tensor that nothing reads any more is let go of

What is lost are fusions across a cut. The whole graph has the last word: where a piece is refused or does not run, it
is opened in one.

Not cut: where a tensor crosses whose type NumPy does not have, or that is not a tensor; graphs out of order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime

from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.onnx.graph.session import CPU, RUNTIME_ERRORS, Light, open_light

#: Nodes up to which a graph is opened in one piece, and nodes of a piece.
WHOLE, PIECE = 4096, 1024
Options = Callable[[], onnxruntime.SessionOptions]


def open_in_pieces(
    light: Light, options: Options, providers: Sequence[str] = CPU
) -> onnxruntime.InferenceSession | Pieces:
    """``open_session``, in pieces where the graph is very large.

    Args:
        light: the model; do not write into its arrays while the session runs.
        options: makes the options of one session.
        providers: execution providers, the preferred one first.

    Raises:
        ModelError: ONNX Runtime does not accept the model.
    """
    if len(light.proto.graph.node) <= WHOLE:
        return open_light(light, options(), providers)
    graph = light.proto.graph
    parts = list(_parts(light, spans(graph, PIECE)))

    def whole() -> onnxruntime.InferenceSession:
        return open_light(light, options(), providers)

    if len(parts) < 2:
        return whole()
    try:
        sessions = [open_light(part, options(), providers) for part in parts]
    except ModelError:
        return whole()
    return Pieces(sessions, [str(value.name) for value in graph.output], whole)


@dataclass
class Pieces:
    """Sessions that run one after the other as the one of the whole graph does.

    Attributes:
        sessions: in order.
        outputs: names of the outputs of the whole graph.
        whole: opens the graph in one, for a sample that the pieces do not take.
    """

    sessions: list[onnxruntime.InferenceSession]
    outputs: list[str]
    whole: Callable[[], onnxruntime.InferenceSession]
    _opened: onnxruntime.InferenceSession | None = field(default=None, init=False)

    def get_inputs(self) -> list[Any]:
        """The inputs of the whole graph that something reads."""
        made = {one.name for session in self.sessions for one in session.get_outputs()}
        found = {one.name: one for session in self.sessions for one in session.get_inputs() if one.name not in made}
        return list(found.values())

    def run(
        self,
        names: Sequence[str] | None,
        feed: Mapping[str, np.ndarray],
        options: onnxruntime.RunOptions | None = None,
    ) -> list[Any]:
        """The named outputs, all where no name is given."""
        if self._opened is None:
            try:
                return self._in_turn(list(names or self.outputs), feed, options)
            except RUNTIME_ERRORS:
                self._opened = self.whole()
        return list(self._opened.run(names, dict(feed), options))

    def _in_turn(
        self, names: list[str], feed: Mapping[str, np.ndarray], options: onnxruntime.RunOptions | None
    ) -> list[Any]:
        alive, kept = dict(feed), set(names)
        reads = [[one.name for one in session.get_inputs()] for session in self.sessions]
        last = {name: index for index, read in enumerate(reads) for name in read}
        for index, session in enumerate(self.sessions):
            wanted = [one.name for one in session.get_outputs()]
            wanted = [name for name in wanted if name in kept or last.get(name, -1) > index]
            given = {name: alive[name] for name in reads[index] if name in alive}
            made = session.run(wanted, given, options) if wanted else []
            alive.update(zip(wanted, made, strict=True))
            for name in reads[index]:
                if last[name] == index and name not in kept:
                    alive.pop(name, None)
        return [alive[name] for name in names]


def spans(graph: onnx.GraphProto, size: int) -> list[tuple[int, int]]:
    """First node and node behind the last one of every piece, at most about ``size`` nodes each.

    Every name is looked at once for every node that reads it.
    """
    cost = None if graph.sparse_initializer else _crossing(graph)
    if cost is None:
        return [(0, len(graph.node))]
    ends = [0]
    while len(cost) - ends[-1] > size:
        window = range(ends[-1] + size // 2, ends[-1] + size + 1)
        cut = min(window, key=lambda at: (cost[at], -at))
        if not math.isfinite(cost[cut]):
            cut = next((at for at in range(window.stop, len(cost)) if math.isfinite(cost[at])), len(cost))
        ends.append(cut)
    ends = [*ends, len(cost)] if ends[-1] < len(cost) else ends
    return list(pairwise(ends))


def _crossing(graph: onnx.GraphProto) -> list[float] | None:
    """Bytes an element of what crosses, for a cut before every node; None where the graph is not in order."""
    made = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    last: dict[str, int] = {}
    for at, node in enumerate(graph.node):
        for name in names_read(node):
            if made.get(name, -1) >= at:
                return None
            last[name] = at
    if any(value.name not in made for value in graph.output):
        return None
    sizes = {value.name: _bytes(value.type) for value in (*graph.value_info, *graph.output)}
    steps, odd = [0.0] * (len(graph.node) + 1), [0.0] * (len(graph.node) + 1)
    for name, at in made.items():
        size = sizes.get(name, math.inf)
        changed, by = (steps, size) if math.isfinite(size) else (odd, 1.0)
        changed[at + 1] += by
        changed[max(last.get(name, at), at) + 1] -= by
    found, crossing, blocked = [], 0.0, 0.0
    for step, other in zip(steps[:-1], odd, strict=False):
        crossing, blocked = crossing + step, blocked + other
        found.append(math.inf if blocked else crossing)
    return found


def _bytes(kind: onnx.TypeProto) -> float:
    """Bytes of an element in NumPy; infinite for what NumPy does not have."""
    element = kind.tensor_type.elem_type
    if not kind.HasField("tensor_type") or element in (0, onnx.TensorProto.BFLOAT16) or element > _LAST_OF_NUMPY:
        return math.inf
    return float(onnx.helper.tensor_dtype_to_np_dtype(element).itemsize)


#: Types behind COMPLEX128 are ones that NumPy does not have: bfloat16, FP8, 4 bits.
_LAST_OF_NUMPY = int(onnx.TensorProto.COMPLEX128)


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, inside its bodies too."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            for inner in body.node:
                yield from names_read(inner)
            yield from (value.name for value in body.output)


def _parts(light: Light, cut: Sequence[tuple[int, int]]) -> Iterator[Light]:
    """A model for every span of nodes; what they make for later ones are outputs."""
    graph = light.proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    asked, given = {value.name for value in graph.output}, {value.name for value in graph.input}
    reads = [dict.fromkeys(name for node in graph.node[a:b] for name in names_read(node)) for a, b in cut]
    last = {name: index for index, names in enumerate(reads) for name in names}
    before: set[str] = set()
    for index, (first, end) in enumerate(cut):
        nodes = graph.node[first:end]
        made = [name for node in nodes for name in node.output if name]
        part = onnx.GraphProto(name=graph.name, node=nodes)
        part.initializer.extend(weights[name] for name in reads[index] if name in weights)
        part.input.extend(values[name] for name in reads[index] if name in given or name in before)
        for name in made:
            if name in asked or last.get(name, -1) > index:
                part.output.append(values[name])
            elif name in values:
                part.value_info.append(values[name])
        before.update(made)
        held = {name: light.weights[name] for name in reads[index] if name in light.weights}
        yield Light(_framed(light.proto, part), held, light.folder, light.files)


def _framed(model: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    """A part of a model, with its operator sets and functions."""
    made = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)
    return made
