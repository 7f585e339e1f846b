"""What each layer loses, by a few passes in the place of one trial per layer and candidate.

    local     one pass per candidate and sample: every layer computes twice, quantized beside float, both from the float
              model's tensors; the difference δ is the error that quantizing this layer alone makes
    injected  one pass per layer: δ of one candidate is added to what the float model has there; what arrives at the
              outputs is the loss of that layer under that candidate, without any approximation for this sample
    loss      of another candidate: the same, times the energy of its δ over that of the injected one

So the loss is taken to be proportional to the energy of a layer's error; candidates whose errors have another direction
break this, and so do errors so large that a layer behind saturates. The loss of one sample stands for all of them,
corrected by the energy of δ on all samples that it was seen on. Costs (bytes, bits) are exact.

Layers in bodies of If and Loop are tried one by one. Not handled: a metric of the user's own, which needs whole
models; all layers are tried one by one then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.plan import NodePlan, Plan
from quark.files.journal import Journal
from quark.measure.outputs import Outputs, loss_name
from quark.onnx import layer_runs, sensitivity
from quark.onnx.data import Feed
from quark.onnx.graph import model as files
from quark.onnx.graph.run import FLOATS, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.graph.surgery import apart
from quark.onnx.layer_runs import FloatModelFiles, LayerRuns, opened, take_over
from quark.onnx.layer_units import Unit
from quark.onnx.npu.simulate import simulate
from quark.onnx.qdq.modes import MODES
from quark.onnx.quantization.config.config import Config
from quark.onnx.scratch import Scratch
from quark.onnx.sensitivity import Settings, settings_of
from quark.search.values import FLOAT, Study, Trial

SEEN = 2
"""Samples on which the errors of all candidates are compared."""
FEWER = 20
"""How many times fewer model runs than one trial per layer, candidate and sample are aimed at."""
Key = tuple[str, str]
_ERROR = "{}__error"
_NOISE = "{}__noise"


@dataclass(frozen=True)
class Local:
    """The model in which every layer computes twice; ``sizes``: bytes of the quantized constants by layer."""

    model: ir.Model
    sizes: Mapping[str, float]


def estimate(model_input: files.ModelInput, config: Settings, samples: Any, candidates: Sequence[str]) -> Study:
    """As ``quark.onnx.sensitivity.sensitivity`` with its usual metric, by a few passes.

    Raises:
        ConfigError, ModelError, DataError: as there.
    """
    base, names = settings_of(config, candidates)
    job = Config(base).compile()
    with Scratch(job.options) as scratch:
        layers = layer_runs.candidate_layers(names, base.target, job)
        try:
            return study(layer_runs.open_runs(model_input, job, layers, samples, scratch), names, "sqnr")
        finally:
            layer_runs.close()


def study(made: LayerRuns, names: Sequence[str], metric: str) -> Study:
    """The estimated loss of every layer under every candidate, with exact costs; layers in bodies are tried.

    Args:
        made: the layers, the samples and the float outputs.
        names: the candidates.
        metric: a name in ``quark.onnx.sensitivity.MEASURES``.
    """
    start = time.perf_counter()
    inside = tuple(unit for unit in made.units if made.common.place(unit.name))
    tried = sensitivity.study(replace(made, units=inside), names, metric, 1, Journal()).trials if inside else ()
    made = replace(made, units=tuple(unit for unit in made.units if unit not in inside))
    estimates = _estimates(made, names, metric) if made.units else []
    return Study((*estimates, *tried), metric, made.common.samples, time.perf_counter() - start)


def _estimates(made: LayerRuns, names: Sequence[str], metric: str) -> list[Trial]:
    """Of the layers of the main graph."""
    quantized = [name for name in names if name != FLOAT]
    energies: dict[Key, list[float]] = {}
    sizes: dict[Key, float] = {}
    errors: dict[int, dict[str, dict[str, np.ndarray]]] = {}
    told, chosen = {unit.name: _told(unit, quantized) for unit in made.units}, loudest(made.common)
    injected = _injected(made, len(quantized))
    for name in quantized:
        local = local_model(made.common, made.units, name)
        sizes |= {(layer, name): size for layer, size in local.sizes.items()}
        for number, found in local_errors(made, local, name, chosen[: max(SEEN, injected)]):
            for layer, arrays in found.items():
                energies.setdefault((layer, name), []).append(_energy(arrays))
                if number in chosen[:injected] and told[layer] == name:
                    errors.setdefault(number, {})[layer] = arrays
    losses, seen = _followed(made, errors, metric), _per_sample(energies, injected)
    trials = []
    for unit in made.units:
        for name in (one for one in names if one in unit.tensors):
            share = 0.0 if name == FLOAT else _ratio(seen, unit.name, name, told[unit.name])
            loss = losses[unit.name] * share if share else 0.0
            costs = {**unit.costs[name], **({} if name == FLOAT else {"size": sizes[unit.name, name]})}
            trials.append(Trial(unit.name, unit.op_type, name, loss, {loss_name(metric): loss}, costs))
    return trials


def runs(made: LayerRuns, names: Sequence[str]) -> int:
    """Inferences that ``study`` takes beside those of the float outputs; local passes compute every layer twice."""
    count = sum(name != FLOAT for name in names)
    injected = _injected(made, count)
    return min(max(SEEN, injected), made.common.samples) * count + len(made.units) * injected


def _injected(made: LayerRuns, count: int) -> int:
    """Samples on which the error of every layer is followed to the outputs."""
    most = made.common.samples * count / FEWER - SEEN * count / len(made.units)
    return max(1, min(int(most), made.common.samples))


def loudest(common: FloatModelFiles) -> list[int]:
    """Samples by the energy of their float outputs, the largest first: they count most in a ratio of energies."""
    found = [sum(float(np.sum(np.square(one, dtype=np.float64))) for one in out.values()) for _, out in common.pairs()]
    return sorted(range(len(found)), key=lambda k: -found[k])


def _told(unit: Unit, names: Sequence[str]) -> str:
    """The candidate whose error is followed: the middle one of those that fit, by what it reads."""
    fits = sorted((name for name in names if name in unit.tensors), key=lambda name: unit.costs[name]["bits"])
    return fits[len(fits) // 2] if fits else FLOAT


def _energy(arrays: Mapping[str, np.ndarray]) -> float:
    return float(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays.values()))


def _per_sample(energies: Mapping[Key, list[float]], first: int) -> dict[Key, tuple[float, float]]:
    """Mean energy over all samples that were seen, and over the first ones, which were followed."""
    return {key: (float(np.mean(one)), float(np.mean(one[:first]))) for key, one in energies.items()}


def _ratio(seen: Mapping[Key, tuple[float, float]], layer: str, name: str, told: str) -> float:
    """Energy of a candidate's error over that of the one that was followed, where it was followed."""
    followed = seen[layer, told][1]
    return seen[layer, name][0] / followed if followed > 0 else float(seen[layer, name][0] > 0)


# ---- the errors of single layers -------------------------------------------------------------------------------------


def local_model(common: FloatModelFiles, units: Sequence[Unit], candidate: str) -> Local:
    """The float model with a quantized copy beside every layer, that reads the same float tensors."""
    model = apart(opened(str(common.model)))
    tuned = apart(opened(str(common.folder / common.tuned[candidate]))) if candidate in common.tuned else None
    nodes = {node.name: node for node in model.graph}
    plan = Plan({}, {})
    homes: dict[str, str] = {}
    floats: dict[str, float] = {}
    for number, unit in enumerate(units):
        if candidate not in unit.tensors or candidate == FLOAT:
            continue
        copy = _QuantizedCopy(model, nodes[unit.name], f"__alone{number}", unit, candidate)
        if tuned is not None:
            copy.tune(tuned)
        homes |= dict.fromkeys(copy.put(plan), unit.name)
        floats[unit.name] = copy.float_bytes()
    if common.job.npu:
        simulate(model, plan, common.job)
    made = MODES["static"].emit(model, plan, common.job.options)
    constants = {tensor.name for tensor in plan if tensor.role != "activation"}
    for key, value in made.graph.initializers.items():
        owner = max((one for one in constants if key == one or key.startswith(f"{one}_")), key=len, default=None)
        if owner is not None and value.const_value is not None:
            floats[homes[owner]] += value.const_value.nbytes
    return Local(made, floats)


class _QuantizedCopy:
    """A copy of a layer's node, with copies of everything that its candidate quantizes."""

    def __init__(self, model: ir.Model, node: ir.Node, ending: str, unit: Unit, candidate: str) -> None:
        self.model, self.unit, self.ending = model, unit, ending
        self.tensors = {tensor.name: tensor for tensor in unit.tensors[candidate]}
        self.copies: dict[str, ir.Value] = {}
        inputs = [None if value is None else self.copied(value, node) for value in node.inputs]
        self.node = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=f"{node.name}{ending}",
        )
        model.graph.insert_after(node, self.node)
        for value, own in zip(node.outputs, self.node.outputs, strict=True):
            own.name, own.type, own.shape = f"{value.name}{ending}", value.type, value.shape
            self.copies.setdefault(value.name or "", own)
            if value.dtype in FLOATS and value.name:
                error = ir.Node("", "Sub", [own, value], name=_ERROR.format(own.name))
                error.outputs[0].name, error.outputs[0].type = _ERROR.format(value.name), value.type
                model.graph.insert_after(self.node, error)
                model.graph.outputs.append(error.outputs[0])

    def copied(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A value of the copy's own, for those that are quantized."""
        name = value.name or ""
        if name not in self.tensors:
            return value
        if name not in self.copies:
            data = value.const_value
            self.copies[name] = self.passed(value, node) if data is None else self.constant(value, data)
        return self.copies[name]

    def constant(self, value: ir.Value, data: ir.TensorProtocol) -> ir.Value:
        """A second constant of the same data."""
        own = ir.Value(name=f"{value.name}{self.ending}", shape=value.shape, type=value.type)
        own.const_value = ir.tensor(data.numpy(), name=own.name)
        self.model.graph.register_initializer(own)
        return own

    def passed(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A second name of an activation."""
        same = ir.Node("", "Identity", [value], name=f"{value.name}{self.ending}_same")
        own = same.outputs[0]
        own.name, own.type, own.shape = f"{value.name}{self.ending}", value.type, value.shape
        self.model.graph.insert_before(node, same)
        return own

    def tune(self, tuned: ir.Model) -> None:
        """Give the copy the weights that an algorithm of the candidate made."""
        own = [replace(one, name=name) for name, one in self.tensors.items() if one.role != "activation"]
        take_over(self.model, tuned, own, self.ending)

    def put(self, plan: Plan) -> Iterator[str]:
        """Add what is decided about the copy to a plan; the names of its tensors."""
        name = self.node.name or ""
        plan.nodes[name] = NodePlan(name, self.node.op_type, True, "alone")
        for old, tensor in self.tensors.items():
            if old not in self.copies:
                continue
            new = str(self.copies[old].name)
            plan.put(replace(tensor, name=new, group=new, readers=None))
            yield new

    def float_bytes(self) -> float:
        """Bytes of the layer's float constants that stay as they are."""
        kept = {
            value.name: value.const_value.nbytes
            for value in self.node.inputs
            if value is not None and value.const_value is not None and value.name not in self._names()
        }
        return float(sum(kept.values()))

    def _names(self) -> set[str]:
        return {str(value.name) for value in self.copies.values()}


def local_errors(
    made: LayerRuns, local: Local, candidate: str, samples: Sequence[int]
) -> Iterator[tuple[int, dict[str, dict[str, np.ndarray]]]]:
    """For these samples: (sample, {layer: {output: what quantizing this layer alone changes there}})."""
    there = {value.name for node in local.model.graph for value in node.outputs}
    names = {
        unit.name: [name for name in _outputs(made.common, unit) if _ERROR.format(name) in there]
        for unit in made.units
        if candidate in unit.tensors
    }
    wanted = [_ERROR.format(name) for found in names.values() for name in found]
    runtime = replace(Runtime.of(made.common.job.options), threads=made.common.threads)
    runner = Runner(local.model, wanted, (), runtime)
    for number in samples:
        values = runner.run(made.common.feed(number)).values
        yield number, {layer: {name: values[_ERROR.format(name)] for name in found} for layer, found in names.items()}


def _outputs(common: FloatModelFiles, unit: Unit) -> list[str]:
    node = next(node for node in opened(str(common.model)).graph if node.name == unit.name)
    return [str(value.name) for value in node.outputs if value.name]


# ---- from a layer to the outputs -------------------------------------------------------------------------------------


def _followed(
    made: LayerRuns, errors: Mapping[int, Mapping[str, Mapping[str, np.ndarray]]], metric: str
) -> dict[str, float]:
    """The loss of the outputs for the error of each layer; layers without any lose nothing."""
    names = list(dict.fromkeys(name for found in errors.values() for arrays in found.values() for name in arrays))
    runner = made.common.runner(open_to_noise(apart(opened(str(made.common.model))), names))
    nothing: Feed = {_NOISE.format(name): np.zeros((), _type(made.common, name)) for name in names}
    outputs = {unit.name: Outputs() for unit in made.units}
    for number, (feed, reference) in enumerate(made.common.pairs()):
        for layer, arrays in errors.get(number, {}).items():
            noise = {_NOISE.format(name): array for name, array in arrays.items()}
            values = runner.run({**feed, **nothing, **noise}).values
            outputs[layer].update(reference, values, metric == "kl")
    followed = {layer for found in errors.values() for layer in found}
    return {layer: one.metrics()[loss_name(metric)] if layer in followed else 0.0 for layer, one in outputs.items()}


def _type(common: FloatModelFiles, name: str) -> np.dtype:
    value = next(one for node in opened(str(common.model)).graph for one in node.outputs if one.name == name)
    return value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)


def open_to_noise(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """The model, in place, with an input for each of these tensors that is added to it for all who read it."""
    made = {value.name: (node, value) for node in model.graph for value in node.outputs}
    for name in names:
        node, value = made[name]
        noise = ir.Value(name=_NOISE.format(name), type=ir.TensorType(value.dtype or ir.DataType.FLOAT))
        model.graph.inputs.append(noise)
        added = ir.Node("", "Add", [value, noise], name=f"{noise.name}_added")
        own = added.outputs[0]
        own.type, own.shape = value.type, value.shape
        uses = list(value.uses())
        model.graph.insert_after(node, added)
        for use in uses:
            if use.node is not added:
                use.node.replace_input_with(use.idx, own)
        if value.is_graph_output():
            places = [k for k, one in enumerate(model.graph.outputs) if one is value]
            value.name, own.name = f"{name}__before", name
            for place in places:
                model.graph.outputs[place] = own
    return model
