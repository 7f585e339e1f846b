"""AdaRound and AdaQuant for the torch flow: layer by layer, weights learn to answer as the float ones.

    minimize  ‖ layer(W; x) − layer(Q(W~); x~) ‖²      x~: behind trained layers,  x: in the float model

Layers, convolutions too, are trained in the order of the calls, block by block (``quark.algorithms.adaround``,
``adaquant``). A layer whose error does not fall keeps its weight; a block whose answers are then no nearer to the float
ones than rounded to nearest gets all its weights back.

Not handled: AdaRound of weights that are not integers under static scales (AdaQuant trains those); experts that no
sample reaches; embeddings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.algorithms.adaquant import adaquant
from quark.algorithms.adaround import Codes, adaround
from quark.algorithms.reconstruction import Data, Trained, TrainedLayer, settings_of
from quark.dataclass import dataclass
from quark.errors import DataError
from quark.numerics.elements import Int
from quark.torch.algorithms.answers import some_rows
from quark.torch.algorithms.blocks import BlockRun, Stream, find_blocks, record
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.crew import advance
from quark.torch.algorithms.inputs import answer_of, are_alike, find_groups, read
from quark.torch.algorithms.tune import float_copy
from quark.torch.algorithms.walk import Again, walk
from quark.torch.calibration import disabled
from quark.torch.config.algorithms import AdaQuantConfig, AdaRoundConfig
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts
from quark.torch.first_input import first_input
from quark.torch.layers import own_parameter
from quark.torch.matching import Match
from quark.torch.quantized_layer import QuantLayer, weight_quantizer
from quark.torch.structure_channels import axis_of

log = logging.getLogger(__name__)
Config = AdaRoundConfig | AdaQuantConfig


@dataclass(frozen=True)
class BlockPair:
    """A block on its way, and its float copy."""

    own: BlockRun
    reference: BlockRun

    def distance(self) -> float:
        """The mean squared difference of some rows of their answers."""
        answers = ([some_rows(answer_of(run, k)) for run in (self.own, self.reference)] for k in range(len(self.own)))
        return sum(float((x - y).square().double().mean()) for x, y in answers)


@torch.no_grad()
def run_reconstruction(context: ModelContext, config: Config) -> None:
    """Train the weights of ``context.model``.

    Raises:
        DataError: no samples.
    """
    if not context.samples:
        raise DataError(f"{config.name} needs samples, and there are none: give a dataloader")
    context = replace(context, samples=context.samples[: config.data_size])
    blocks = find_blocks(context.model, config.model_decoder_layers)
    with disabled([context.model]):
        blocks, stream = record(context.model, blocks, context.samples, context.store)
    items = trainable(context, config)
    clean, trained = stream.copy(), 0

    def work(name: str, block: nn.Module, streams: list[Stream], again: Again) -> list[Stream]:
        nonlocal trained
        pair = BlockPair(BlockRun(name, block, streams[0]), BlockRun(name, float_copy(block), streams[1]))
        if again is None:
            trained += train_block(context, config, items, pair)
        else:
            again()
        return [advance(run, context.workers) for run in (pair.own, pair.reference)]

    walk(context.store, blocks, [stream, clean], work)
    said = log.info if trained else log.warning
    said("%s: %d of %d layers trained", config.name, trained, len(items))


def trainable(context: ModelContext, config: Config) -> dict[nn.Module, Match]:
    """The layers whose weights the algorithm can train; those that it cannot are named."""
    weighted = [
        item for item in context.found.quantized if item.stages["weight"] and item.layer.kind.features is not None
    ]
    found = {item.layer.module: item for item in weighted if not isinstance(config, AdaRoundConfig) or integers(item)}
    if left := [item.layer.name for item in weighted if item.layer.module not in found]:
        shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        log.warning("adaround trains integers under static scales; rounded to nearest stay: %s (adaquant: any)", shown)
    return found


def integers(item: Match) -> bool:
    """Whether a weight has one stage of integer codes under static scales and integer zero points."""
    part, *others = parts(weight_quantizer(item.layer.module))
    return not others and part.stage.calibrated and isinstance(part.stage.format, Int) and not part.stage.real_zero


def train_block(context: ModelContext, config: Config, items: dict[nn.Module, Match], pair: BlockPair) -> int:
    """Train the layers of one block; how many are different now."""
    layers = {key: module for key, module in pair.own.block.named_modules() if module in items}
    order = [key for group in find_groups(pair.own, layers) for key in group.layers]
    if not order:
        return 0
    before, old = pair.distance(), {key: layers[key]._parameters["weight"].detach() for key in order}
    results = {key: train_layer(context, config, layers[key], key, data_of(pair, key)) for key in order}
    if pair.distance() <= before:
        return sum(result.kept for result in results.values())
    for key, weight in old.items():
        context.undo.set_parameter(layers[key], "weight", weight)
    log.warning("%s: %s keeps the nearest values: its answers got no better", config.name, pair.own.name or "the model")
    return 0


def data_of(pair: BlockPair, key: str) -> Data:
    """What the layer called ``key`` multiplies, what its float copy does, and what that makes of it; of all calls.

    Where a sample's calls are not those of the float model (an expert that is handed other tokens), the float copy is
    asked for what it makes of the same inputs.
    """
    layer, reference = (run.block.get_submodule(key) for run in (pair.own, pair.reference))
    inputs, float_inputs, targets = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for k in range(len(pair.own)):
        calls, clean = (calls_of(run, module, k) for run, module in ((pair.own, layer), (pair.reference, reference)))
        paired = len(calls) == len(clean) and all(are_alike(*both) for both in zip(calls, clean, strict=True))
        for x, own in zip(calls, clean if paired else calls, strict=True):
            if x.numel():
                inputs.append(array(read(layer, x)))
                float_inputs.append(array(own))
                targets.append(array(reference(own)))
    return Data(inputs, float_inputs, targets)


def calls_of(run: BlockRun, module: nn.Module, k: int) -> list[torch.Tensor]:
    """What a module is handed in a block's run of sample ``k``."""
    seen: list[torch.Tensor] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(first_input(module, args, kwargs).clone())  # a block may go on in the same memory

    with module.register_forward_pre_hook(see, with_kwargs=True):
        run.forward(k)
    return seen


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor as float32 NumPy, a copy."""
    return x.detach().float().cpu().numpy().copy()


def train_layer(context: ModelContext, config: Config, layer: nn.Module, name: str, data: Data) -> Trained:
    """Train the weight of one layer, and give it to the layer where it is better."""
    weight, bias = own_parameter(layer).detach(), layer._parameters.get("bias")
    quantizer = layer._modules["bias_quantizer"]

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return with_parameters(layer, weight, bias).forward(x)

    known = None if bias is None else array(bias if quantizer is None else quantizer(bias.detach()))
    axis = axis_of(layer, torch.from_numpy(data.targets[0]))
    task = TrainedLayer(name, forward, array(weight), known, axis, forward)
    settings = settings_of(config, {"device": str(weight.device)})
    with torch.enable_grad():
        if isinstance(config, AdaRoundConfig):
            (part,) = parts(weight_quantizer(layer))
            result = adaround(task, codes_of(part, weight), data, settings)
        else:
            result = adaquant(task, rounding(weight_quantizer(layer)), None, data, settings)
    if result.kept:
        context.undo.set_parameter(layer, "weight", torch.from_numpy(result.weight))
    return result


def with_parameters(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """The float layer with this weight and bias."""
    if not isinstance(layer, QuantLayer):
        raise TypeError(f"{type(layer).__name__} is not a quantized layer")
    reference = layer.with_parameters(lambda name, value: value)
    own = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    reference.__dict__["_parameters"] = {**reference._parameters, **own}
    return reference


def codes_of(part: FakeQuantize, weight: torch.Tensor) -> Codes:
    """The integer grid of a weight as it is stored."""
    shape, granularity, format = tuple(weight.shape), part.granularity, part.stage.format
    scale, zero = (array(granularity.expand(value, shape)) for value in (part.scale, part.zero_point))
    return Codes(scale, zero, int(format.min) + part.stage.spec.narrow_codes, int(format.max))


def rounding(quantizer: Quantizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """A weight through every stage of its quantizer."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        for part in parts(quantizer):
            weight = part.quantized(weight)
        return weight

    return rounded
