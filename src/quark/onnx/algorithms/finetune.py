"""The stage that trains weights: walk through the float model and its fake-quantized copy, layer by layer.

A layer's data are collected once: what the fake-quantized model (with the layers before it already trained) feeds it,
and what the float model makes of it. Trained weights go into the fake-quantized model at once and into the float model
at the end, as values that lie on their grid. A layer that got worse is put back. With ``SaveAndRestore`` finished
layers are not trained again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.algorithms.adaquant import adaquant
from quark.algorithms.adaround import Codes, adaround
from quark.algorithms.reconstruction import (
    Data,
    Forward,
    Settings,
    Trained,
    TrainedLayer,
    check_device,
    import_torch,
    settings_of,
)
from quark.config.plan import Plan, TensorPlan
from quark.dataclass import dataclass
from quark.errors import ConfigError, known
from quark.ir.surgery import constant_array, input_name, set_constant
from quark.numerics.elements import Int
from quark.numerics.granularity import Channel
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.fake_quantized import fake_quantized, rounded
from quark.onnx.algorithms.forward import CHANNEL_AXIS, LINEAR, forward_of
from quark.onnx.algorithms.gptq import grid_of
from quark.onnx.algorithms.layers import Tunable, tunable_layers
from quark.onnx.algorithms.samples import feeds_of, keeper, providers_of
from quark.onnx.algorithms.walk import GraphWalk
from quark.onnx.discretion import inherited
from quark.onnx.graph import model as files
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.quantization.config.finetune import AdaRoundConfig, AutoRoundConfig, FineTuneConfig

_log = logging.getLogger(__name__)


def run(model: ir.Model, plan: Plan, config: FineTuneConfig, context: JobContext) -> PassReport:
    """Train every layer that the configuration names, in place.

    Raises:
        ConfigError: torch or the device is not there, or nothing that the configuration asks for can be trained.
        DataError: there is no calibration data.
    """
    title = type(config).__name__.removesuffix("Config")
    torch = import_torch(title)
    check_device(torch, config.optim_device)
    layers, refused = tunable_layers(model, plan, config.target_op_type, config.layers)
    layers, beyond = _trainable(layers, config, torch)
    refused += beyond
    if not layers:
        asked = bool(beyond or config.layers) or config.target_op_type != type(config)().target_op_type
        return _nothing(config, refused, title, asked)
    stage = _Stage(model, plan, config, context, torch, layers)
    results = stage.train()
    refused += [_put_back(name, arrays) for name, arrays in results.items() if not arrays["kept"]]
    return PassReport(config.name, sum(bool(arrays["kept"]) for arrays in results.values()), tuple(refused))


def _put_back(name: str, arrays: dict[str, np.ndarray]) -> str:
    if "errors" in arrays:
        return f"{name!r} is put back: training did not lower its error of {arrays['errors'][0]:.4g}"
    return f"{name!r} is put back: trained, it did not bring the model's output nearer (selective_update)"


def _trainable(layers: list[Tunable], config: FineTuneConfig, torch: Any) -> tuple[list[Tunable], list[str]]:
    found, refused = [], []
    for layer in layers:
        kind = layer.weight.spec.row
        if isinstance(config, AdaRoundConfig) and not isinstance(kind, Int):
            refused.append(
                f"{layer.name!r} stays: AdaRound trains integers, and its weight is {kind.name}; use AdaQuant"
            )
        elif forward_of(layer.node, layer.activation, torch) is None:
            refused.append(f"{layer.name!r} stays: an attribute of it cannot be trained through")
        else:
            found.append(layer)
    return found, refused


def _nothing(config: FineTuneConfig, refused: list[str], title: str, asked: bool) -> PassReport:
    """A model without layers to train is quantized without: presets have the algorithm for models that have some.

    Raises:
        ConfigError: somebody has ``asked`` for layers, operators or data types that cannot be trained.
    """
    sentence = f"{title} finds nothing to train: {'; '.join(refused[:3]) or 'no layer of the types in target_op_type'}"
    if asked:
        raise ConfigError(sentence)
    _log.warning("%s", sentence)
    return PassReport(config.name, 0, (sentence,))


@dataclass
class _Stage:
    """One run of one algorithm."""

    model: ir.Model
    plan: Plan
    config: FineTuneConfig
    context: JobContext
    torch: Any
    layers: list[Tunable]

    def train(self) -> dict[str, dict[str, np.ndarray]]:
        """Train all layers; what came of each."""
        job, config = self.context.job, self.config
        fake_model = fake_quantized(self.model, self.plan, job.options)
        nodes = {node.name: node for node in fake_model.graph}
        finished = {layer.name: self.context.journal.arrays(f"{config.name} {layer.name}") for layer in self.layers}
        results = {name: arrays for name, arrays in finished.items() if arrays is not None}
        if len(results) < len(self.layers):
            self._walk(fake_model, nodes, results)
        for layer in self.layers:
            self._into_model(layer, results[layer.name])
        return results

    @property
    def _float(self) -> ir.Model:
        return self.context.reference or self.model

    def _walk(
        self, fake_model: ir.Model, nodes: dict[str | None, ir.Node], results: dict[str, dict[str, np.ndarray]]
    ) -> None:
        """Train what is not in ``results`` yet. The cuts are the same either way, so that all bits are."""
        config, options, todo = self.config, self.context.job.options, self.layers
        feeds = feeds_of(self.model, self.context, config.data_size, config.batch_size if config.dynamic_batch else 1)
        if config.select_max_mem_layer:
            self._try_largest(feeds[0])
        keep = keeper(config, self.context.scratch)
        runtime = Runtime(providers_of(config.infer_device), options.UserCustomOpLibPath)
        reads = {layer.name: input_name(nodes[layer.name], 0) for layer in todo}
        reference = self._float if config.ref_model_path is None else files.load(config.ref_model_path)
        float_reads = [layer.source for layer in todo] if config.drop_ratio < 1 else []
        stops = [*(layer.target for layer in todo), *float_reads]
        _check_names(reference, stops, str(config.ref_model_path))
        floats = GraphWalk(reference, feeds, stops, runtime, keep)
        quantized = GraphWalk(fake_model, feeds, reads.values(), runtime, keep)
        early = floats.advance(stops) if config.mem_opt_level == 0 else None
        judge = _Judge(self._float, fake_model, feeds, config, runtime) if config.selective_update else None
        for group in _groups(todo, quantized, reads, config.parallel):
            names = [name for layer in group for name in (layer.target, *([layer.source] if float_reads else []))]
            found = early if early is not None else floats.advance(names)
            inputs = quantized.advance([reads[layer.name] for layer in group])
            new = [layer for layer in group if layer.name not in results]
            data = {layer.name: _data(layer, reads[layer.name], inputs, found, config) for layer in new}
            del found, inputs
            for layer, arrays in zip(new, self._train_group(new, data), strict=True):
                chosen = arrays
                if judge is not None:
                    chosen = judge.choose(partial(self._write_into, fake_model, layer), arrays, self._untouched(layer))
                results[layer.name] = chosen
                self.context.journal.finish_arrays(f"{config.name} {layer.name}", chosen)
                self.context.progress(config.name, len(results), len(self.layers))
            for layer in group:
                self._write_into(fake_model, layer, results[layer.name])
            if judge is not None and len(new) < len(group):
                judge.start_here()

    def _train_group(self, layers: list[Tunable], data: dict[str, Data]) -> list[dict[str, np.ndarray]]:
        """Layers that do not depend on each other, in threads where there are several."""
        if len(layers) < 2:
            return [_arrays(self._one(layer, data[layer.name])) for layer in layers]
        with ThreadPoolExecutor(self.config.num_workers, initializer=inherited()) as pool:
            return [_arrays(one) for one in pool.map(lambda layer: self._one(layer, data[layer.name]), layers)]

    def _try_largest(self, feed: Feed) -> None:
        """One step of the layer whose input, target and weight are largest, thrown away: what does not fit says so now.

        Raises:
            ConfigError: the step fails.
        """
        options, config = self.context.job.options, self.config
        runtime = Runtime(providers_of(config.infer_device), options.UserCustomOpLibPath)
        names = {name for layer in self.layers for name in (layer.source, layer.target)}
        seen = Runner(self.model, names, (), runtime)
        found = seen.run(feed).values

        def size(layer: Tunable) -> int:
            return int(found[layer.source].size + found[layer.target].size + np.asarray(layer.constant(1)).size)

        largest = max(self.layers, key=size)
        inputs, targets = ([found[name]] * config.batch_size for name in (largest.source, largest.target))
        try:
            replace(self, config=replace(config, num_iterations=1))._one(largest, Data(inputs, inputs, targets))
        except (RuntimeError, MemoryError) as error:  # what torch raises where a device has not enough memory
            raise ConfigError(
                f"select_max_mem_layer: one step of {largest.name!r}, the largest layer, fails ({error}): lower "
                "batch_size, or train on another device"
            ) from error

    # ---- one layer ---------------------------------------------------------------------------------------------------

    def _one(self, layer: Tunable, data: Data) -> Trained:
        config = self.config
        weight = np.asarray(layer.constant(1), np.float32)
        forward = forward_of(layer.node, layer.activation, self.torch)
        if config.output_qdq and forward is not None:
            forward = self._quantized_output(layer, forward)
        bias = layer.constant(2) if len(layer.node.inputs) > 2 else None
        axis = CHANNEL_AXIS.get(layer.node.op_type, 1)
        linear = forward_of(layer.node, None, self.torch) if layer.node.op_type in LINEAR else None
        function = known(forward, f"how {layer.name!r} computes")
        float_bias = None if bias is None else np.asarray(bias, np.float32)
        trained = TrainedLayer(layer.name, function, weight, float_bias, axis, linear)
        round_bias = None if layer.bias is None else partial(_rounded_tensor, self.torch, tensor=layer.bias)
        if isinstance(config, AutoRoundConfig):
            return self._autorounded(trained, layer, data)
        if isinstance(config, AdaRoundConfig):
            return adaround(trained, codes_of(layer.weight, weight.shape), data, training_of(config), round_bias)
        round_weight = partial(_rounded_tensor, self.torch, tensor=layer.weight)
        return adaquant(trained, round_weight, round_bias, data, training_of(config))

    def _autorounded(self, trained: TrainedLayer, layer: Tunable, data: Data) -> Trained:
        from quark.algorithms.autoround import autoround

        torch, device = self.torch, self.config.optim_device
        on_device = partial(_tensor_on, torch, device)
        bias = None if trained.bias is None else on_device(trained.bias)
        if bias is not None and layer.bias is not None:
            bias = _rounded_tensor(torch, bias, layer.bias)
        grid = grid_of(layer.weight, trained.weight).map(on_device)
        return autoround(trained, grid, bias, data, training_of(self.config))

    def _quantized_output(self, layer: Tunable, forward: Forward) -> Forward:
        """``forward`` and the quantization of its result, through which gradients pass as they are."""
        tensor = self.plan.tensors.get(layer.target)
        if tensor is None or tensor.scale is None:
            return forward

        def run_through(x: Any, weight: Any, bias: Any) -> Any:
            y = forward(x, weight, bias)
            return y + (rounded(y.detach(), tensor) - y).detach()

        return run_through

    def _untouched(self, layer: Tunable) -> dict[str, np.ndarray]:
        bias = layer.constant(2) if len(layer.node.inputs) > 2 else None
        arrays = {"weight": np.asarray(layer.constant(1)), "kept": np.array(False)}
        return arrays if bias is None else {**arrays, "bias": bias}

    def _write_into(self, fake_model: ir.Model, layer: Tunable, arrays: dict[str, np.ndarray]) -> None:
        """The values that the trained arrays will be rounded to."""
        weight = rounded(np.asarray(arrays["weight"], np.float32), layer.weight)
        _store(fake_model, layer.weight.name, np.asarray(weight))
        if "bias" in arrays:
            bias = np.asarray(arrays["bias"], np.float32)
            kept = bias if layer.bias is None else np.asarray(rounded(bias, layer.bias))
            _store(fake_model, input_name(layer.node, 2), kept)

    def _into_model(self, layer: Tunable, arrays: dict[str, np.ndarray]) -> None:
        _store(self.model, layer.weight.name, arrays["weight"])
        if "bias" in arrays and self.config.update_bias:
            _store(self.model, input_name(layer.node, 2), arrays["bias"])


def training_of(config: FineTuneConfig) -> Settings:
    """The part of a configuration that concerns the training of one layer."""
    own = {
        "batch_size": 1 if config.dynamic_batch else config.batch_size,
        "lr_adjust": config.lr_adjust or None,
        "stretch": config.num_batches if config.num_batches > 1 else 0,
        "device": config.optim_device,
        "log_period": int(config.log_period),
    }
    return settings_of(config, own)


def codes_of(tensor: TensorPlan, shape: tuple[int, ...]) -> Codes:
    """The integer grid of a weight of ``shape``."""
    kind, spec = tensor.spec.row, tensor.spec
    if not isinstance(kind, Int):
        raise ConfigError(f"AdaRound trains integers, and {tensor.name!r} is {spec.format}")
    low = kind.min + spec.narrow_codes
    scale, zero_point = (_beside(value, tensor, shape) for value in (tensor.scale, tensor.zero_point))
    return Codes(scale, zero_point, low, kind.max)


def _beside(value: Any, tensor: TensorPlan, shape: tuple[int, ...]) -> np.ndarray:
    """A scale or zero point in a shape that broadcasts against the weight."""
    array, granularity = np.asarray(value), tensor.spec.granularity
    if array.size == 1:
        return array.reshape(())
    if isinstance(granularity, Channel):
        return array.reshape([-1 if axis == granularity.axis % len(shape) else 1 for axis in range(len(shape))])
    return np.asarray(granularity.expand(array, shape))


def _tensor_on(torch: Any, device: str, array: Any) -> Any:
    """A tensor of its own, of the array's type."""
    return torch.from_numpy(np.array(array)).to(device)


def _rounded_tensor(torch: Any, values: Any, tensor: TensorPlan) -> Any:
    """``rounded`` for a torch tensor; biases, whose codes are computed in NumPy, go there and back."""
    if tensor.role != "bias":
        return rounded(values, tensor)
    return torch.from_numpy(np.asarray(rounded(values.detach().cpu().numpy(), tensor))).to(values.device)


def _store(model: ir.Model, name: str, array: np.ndarray) -> None:
    value = model.graph.initializers[name]
    before = np.asarray(constant_array(value))
    set_constant(value, np.asarray(array).reshape(before.shape).astype(before.dtype))


def _arrays(trained: Trained) -> dict[str, np.ndarray]:
    arrays = {
        "weight": trained.weight,
        "kept": np.array(trained.kept),
        "errors": np.array([trained.before, trained.after]),
    }
    return arrays if trained.bias is None else {**arrays, "bias": trained.bias}


def _data(layer: Tunable, read: str, inputs: Any, found: Any, config: FineTuneConfig) -> Data:
    floats = [sample[layer.source] for sample in found] if config.drop_ratio < 1 else []
    return Data([sample[read] for sample in inputs], floats, [sample[layer.target] for sample in found])


def _check_names(model: ir.Model, names: Sequence[str], path: str) -> None:
    known = {value.name for node in model.graph for value in node.outputs} | {v.name for v in model.graph.inputs}
    for name in names:
        if name not in known:
            raise ConfigError(f"ref_model_path: {path!r} has no tensor {name!r}, which a layer's target is")


def _groups(layers: list[Tunable], walk: GraphWalk, reads: dict[str, str], parallel: bool) -> list[list[Tunable]]:
    """Layers one at a time, or neighbours that do not depend on each other together."""
    if not parallel:
        return [[layer] for layer in layers]
    groups: list[list[Tunable]] = []
    for layer in layers:
        before = walk.names_before(reads[layer.name])
        if groups and not any(other.name in before for other in groups[-1]):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


class _Judge:
    """The distance of one output of the quantized model to the float model's, over all samples."""

    def __init__(
        self, model: ir.Model, fake_model: ir.Model, feeds: Sequence[Any], config: FineTuneConfig, runtime: Runtime
    ) -> None:
        if config.output_index >= len(model.graph.outputs):
            raise ConfigError(
                f"output_index is {config.output_index}; the model has {len(model.graph.outputs)} outputs"
            )
        self._fake_model, self._feeds, self._runtime = fake_model, feeds, replace(runtime, as_given=True)
        self._name = str(fake_model.graph.outputs[config.output_index].name)
        wanted = str(model.graph.outputs[config.output_index].name)
        runner = Runner(model, [wanted], (), runtime)
        self._expected = [runner.run(feed).values[wanted].astype(np.float64) for feed in feeds]
        self._best = self._distance()

    def start_here(self) -> None:
        """Measure the fake-quantized model as it is now: later layers have to be better than that."""
        self._best = self._distance()

    def _distance(self) -> float:
        runner = Runner(self._fake_model, [self._name], (), self._runtime)
        pairs = zip(self._feeds, self._expected, strict=True)
        return float(np.mean([np.linalg.norm(runner.run(feed).values[self._name] - y) for feed, y in pairs]))

    def choose(
        self, put: Any, arrays: dict[str, np.ndarray], untouched: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The trained arrays where they bring the output nearer, the untouched ones otherwise."""
        put(arrays)
        distance = self._distance()
        if distance < self._best:
            self._best = distance
            return arrays
        return untouched
