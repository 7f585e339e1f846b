"""Walk through a model from layer to layer: every node runs once per sample, whatever the number of layers.

The walk keeps, for every sample, the tensors at the cut between what has run and what has not. ``advance`` moves the
cut: it opens a session on the nodes between the cut and the wanted tensors and runs them on what is kept. Weights may
change between two calls; nodes that have not run yet see the new ones. Weights count as they are: ONNX Runtime's own
rounding of float weights is off.

Tensors that the bodies of If and Loop take from the main graph count as inputs of the node that holds the body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.errors import DataError, ModelError
from quark.ir.surgery import name_of
from quark.ir.walk import bodies, nodes_within
from quark.onnx.graph.run import session_options
from quark.onnx.graph.session import RUNTIME_ERRORS, Runtime, open_session

Feed = Mapping[str, np.ndarray]
#: Puts an array elsewhere (a file, say) and returns what is to be kept in its place.
Keep = Callable[[np.ndarray], np.ndarray]


class GraphWalk:
    """The state of a walk: the cut, and the tensors at it for every sample.

    Args:
        model: read only, but its initializers may be given other contents between two calls.
        feeds: the samples.
        stops: names of all tensors that will be asked for, as often as they will be, in any order.
        runtime: how they run; float weights stay what they are.
        keep: where kept tensors go; memory by default.
    """

    def __init__(
        self,
        model: ir.Model,
        feeds: Sequence[Feed],
        stops: Iterable[str],
        runtime: Runtime,
        keep: Keep = lambda array: array,
    ) -> None:
        self._model, self._runtime, self._keep = model, replace(runtime, as_given=True), keep
        self._values = {value.name: value for node in model.graph for value in node.outputs}
        self._values.update({value.name: value for value in model.graph.inputs})
        self._done: set[ir.Node] = set()
        self._wanted = Counter(stops)
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        for node in model.graph:
            for value in inputs_of(node):
                self._readers.setdefault(value, []).append(node)
        self._useful = self._ancestors([self._values[name] for name in self._wanted])
        self._live: list[dict[str, np.ndarray]] = [{name: np.asarray(a) for name, a in feed.items()} for feed in feeds]

    def advance(self, names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """The named tensors, one dictionary per sample; the cut moves behind them."""
        nodes = self._ancestors([self._values[name] for name in names]) - self._done
        if nodes:
            self._run(nodes)
        self._wanted.subtract(names)
        found = [{name: sample[name] for name in names} for sample in self._live]
        self._forget()
        return found

    def edit(self, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Give a tensor at the cut other values, in every sample that still holds it."""
        for sample in self._live:
            if name in sample:
                sample[name] = self._keep(change(np.asarray(sample[name])))

    def names_before(self, name: str) -> set[str]:
        """Names of all nodes that a tensor depends on and that have not run."""
        return {name_of(node) for node in self._ancestors([self._values[name]])}

    def _run(self, nodes: set[ir.Node]) -> None:
        made = {str(value.name) for node in nodes for value in node.outputs if value.name}
        reads = {value for node in nodes for value in inputs_of(node)}
        inputs = [value for value in reads if value.name in self._live[0] and value.name not in made]
        self._done |= nodes
        outputs = [value for node in nodes for value in node.outputs if value.name and self._waits(value)]
        session = self._open(inputs, outputs)
        names = [str(value.name) for value in outputs]
        for sample in self._live:
            feed = {str(value.name): np.asarray(sample[str(value.name)]) for value in inputs}
            try:
                results = session.run(names, feed)
            except RUNTIME_ERRORS as error:
                raise DataError(f"the model does not run on a calibration sample: {error}") from error
            sample.update({name: self._keep(array) for name, array in zip(names, results, strict=True)})

    def _open(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> onnxruntime.InferenceSession:
        for value in inputs:
            array = self._live[0][str(value.name)]
            value.type = value.type or ir.TensorType(ir.DataType.from_numpy(array.dtype))
        try:
            graph = ir.convenience.extract(self._model.graph, list(inputs), list(outputs))
        except ValueError as error:
            raise ModelError(f"the model cannot be cut into parts: {error}") from error
        for value in (*graph.inputs, *graph.outputs):
            value.shape = None
        graph.opset_imports.update(self._model.graph.opset_imports)
        part = ir.Model(graph, ir_version=self._model.ir_version, functions=list(self._model.functions.values()))
        return open_session(part, session_options(self._runtime), self._runtime.providers)

    def _waits(self, value: ir.Value) -> bool:
        """Whether this tensor will be asked for, or a node that has to run and has not reads it."""
        return self._wanted[str(value.name)] > 0 or any(
            node in self._useful and node not in self._done for node in self._readers.get(value, ())
        )

    def _forget(self) -> None:
        for name in list(self._live[0]):
            value = self._values.get(name)
            if value is not None and not self._waits(value):
                for sample in self._live:
                    del sample[name]

    def _ancestors(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """Every node that these tensors depend on and that has not run."""
        found: set[ir.Node] = set()
        pending = [value.producer() for value in values]
        while pending:
            node = pending.pop()
            if node is None or node in found or node in self._done:
                continue
            found.add(node)
            pending += [value.producer() for value in inputs_of(node)]
        return found


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """What a node reads, tensors that its subgraphs take from outside included."""
    read = [value for value in node.inputs if value is not None]
    for body in bodies(node):
        for inner in nodes_within(body):
            read += [value for value in inner.inputs if value is not None and value.graph is node.graph]
    return read
