"""Bias correction for the torch flow: every quantized layer gives back what quantization adds to its channels' means.

    b' = b + E[y] - E[y~]       y: in the float model,  y~: behind all layers that are corrected already

The means of the float model are taken before anything is tuned. Then layer after layer is corrected, in the order of
the calls and block by block; of a block only what comes before the layer runs. A channel keeps its bias where the
quantized new one would not bring its mean nearer; a layer keeps all its biases where the answers of its block (of the
model, where there are no blocks) would move away from the float ones: equal means before a ReLU are not equal behind.
With ``gain`` the layers behind which no other stands are amplified as well (``gain.py``), and keep what they get.

Not handled: layers without a bias (a new one would change what the model's files hold), layers called several times
in one forward, experts that no sample reaches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.torch.algorithms.answers import some_rows
from quark.torch.algorithms.blocks import BlockRun, Enough, Stream, find_blocks, record
from quark.torch.algorithms.cle import answers_of
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.crew import advance
from quark.torch.algorithms.gain import amplify, last_layers, rows
from quark.torch.algorithms.inputs import answer_of, find_groups
from quark.torch.algorithms.walk import Again, walk
from quark.torch.calibration import disabled, run
from quark.torch.config.algorithms import BiasCorrectionConfig
from quark.torch.fake_quantize import calibrate_with, parts
from quark.torch.first_input import attached
from quark.torch.layers import own_parameter
from quark.torch.matching import Match
from quark.torch.outputs import answer
from quark.torch.structure_channels import axis_of

log = logging.getLogger(__name__)
SAMPLES = 8  # whose answers are kept, to see what the corrections do to a block


@dataclass
class Mean:
    """The mean of each channel of what a layer writes.

    Attributes:
        total: sums, float64; None before the first call.
        count: values per channel.
    """

    total: torch.Tensor | None = None
    count: int = 0

    def add(self, layer: nn.Module, y: torch.Tensor) -> None:
        """Take in one output."""
        rows = y.detach().movedim(axis_of(layer, y), -1)
        rows = rows.reshape(-1, rows.shape[-1])
        total = rows.double().sum(0)
        self.total = total if self.total is None else self.total + total
        self.count += len(rows)

    @property
    def value(self) -> torch.Tensor:
        """The means, float64."""
        if self.total is None:
            raise DataError("bias_correction: a layer was not called by any sample")
        return self.total / self.count


@dataclass
class Floats:
    """What is known of the float model.

    Attributes:
        means: of the layers that can be corrected.
        answers: some rows of what each block answers to the first samples; by the name of the block.
        last: [positions, channels] of every sample, what the layers write that are to be amplified.
    """

    means: dict[nn.Module, Mean]
    answers: dict[str, list[torch.Tensor]]
    last: dict[nn.Module, list[np.ndarray]]


def biased(context: ModelContext) -> dict[nn.Module, Match]:
    """The layers that can be corrected."""
    return {
        item.layer.module: item
        for item in context.found.quantized
        if item.layer.kind.features is not None and item.layer.module._parameters.get("bias") is not None
    }


@torch.no_grad()
def float_means(context: ModelContext, config: BiasCorrectionConfig) -> Floats:
    """What the float model computes.

    Raises:
        DataError: no samples.
        ConfigError: ``gain`` of a model with decoder blocks.
    """
    if not context.samples:
        raise DataError("bias_correction needs samples, and there are none: give a dataloader")
    blocks = find_blocks(context.model, config.model_decoder_layers)
    if config.gain and blocks.path:
        raise ConfigError(
            f"algo_config: bias_correction: gain=True must be False here: it is for the last layers of convolutional "
            f"networks, and this model has the decoder blocks {blocks.path!r}"
        )
    names = {**blocks.modules, "": context.model}
    layers = biased(context)
    with disabled([context.model]):
        last = last_layers(context.model, partial(answers_of, context)) if config.gain else frozenset()
    known = Floats(
        {layer: Mean() for layer in layers}, {name: [] for name in names}, {layer: [] for layer in last & layers.keys()}
    )

    def see(layer: nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> None:
        if y.numel():
            known.means[layer].add(layer, y)
            if layer in known.last:
                known.last[layer].append(rows(layer, y))

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: append(known.answers[name], some_rows(answer(output)))

    hooks = [layer.register_forward_hook(see) for layer in known.means]
    hooks += [module.register_forward_hook(keep(name)) for name, module in names.items()]
    with attached(hooks), disabled([context.model]), context.store.recording():
        for sample in context.samples:
            run(context.model, sample)
    return replace(known, means={layer: mean for layer, mean in known.means.items() if mean.count})


def append(answers: list[torch.Tensor], rows: torch.Tensor) -> None:
    """Keep the first few."""
    if len(answers) < SAMPLES:
        answers.append(rows)


@torch.no_grad()
def run_bias_correction(context: ModelContext, config: BiasCorrectionConfig, known: Floats) -> None:
    """Correct the biases of ``context.model``."""
    items = biased(context)
    blocks = find_blocks(context.model, config.model_decoder_layers)
    with disabled([context.model]):
        blocks, stream = record(context.model, blocks, context.samples, context.store)
    corrected = 0

    def work(name: str, block: nn.Module, streams: list[Stream], again: Again) -> list[Stream]:
        nonlocal corrected
        run = BlockRun(name, block, streams[0])
        if again is None:
            corrected += correct_block(context, items, known, run)
        else:
            again()
        return [advance(run, context.workers)]

    walk(context.store, blocks, [stream], work)
    said = log.info if corrected else log.warning
    said("bias_correction: %d of %d layers with a bias corrected", corrected, len(items))


def correct_block(context: ModelContext, items: dict[nn.Module, Match], known: Floats, run: BlockRun) -> int:
    """Correct the biases of one block; how many layers."""
    layers = {key: module for key, module in run.block.named_modules() if module in known.means and module in items}
    order = [key for group in find_groups(run, layers) for key in group.layers]
    lowest = distance(run, known.answers[run.name]) if order else 0.0
    corrected = 0
    for key in order:
        layer = layers[key]
        if layer in known.last:
            written = [rows(layer, y) for y in outputs_of(run, layer)]
            amplify(context, key, items[layer], known.last[layer], written)
        shift = known.means[layer].value - mean_of(run, layer)
        old = correct(context, items[layer], shift)
        error = distance(run, known.answers[run.name])
        if error > lowest and layer not in known.last:
            set_bias(context, items[layer], old)
        else:
            lowest, corrected = error, corrected + 1
    return corrected


def distance(run: BlockRun, wanted: list[torch.Tensor]) -> float:
    """How far the answers of a block are from those of the float model."""
    errors = (some_rows(answer_of(run, k)) - rows for k, rows in enumerate(wanted))
    return sum(float(error.square().double().mean()) for error in errors)


def mean_of(run: BlockRun, layer: nn.Module) -> torch.Tensor:
    """The means of one layer of the quantized block."""
    mean = Mean()
    for y in outputs_of(run, layer):
        mean.add(layer, y)
    return mean.value


def outputs_of(run: BlockRun, layer: nn.Module) -> Iterator[torch.Tensor]:
    """What one layer of the quantized block writes, sample by sample; the rest of the block does not run."""
    written: list[torch.Tensor] = []

    def see(module: nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> None:
        if y.numel():
            written.append(y)
            raise Enough

    with layer.register_forward_hook(see):
        for k in range(len(run)):
            with suppress(Enough):
                run.forward(k)
            yield from written
            written.clear()


def correct(context: ModelContext, item: Match, shift: torch.Tensor) -> torch.Tensor:
    """Add ``shift`` to the bias of a layer, where its codes bring the means nearer; the bias before."""
    old = own_parameter(item.layer.module, "bias").detach()
    before, wanted = quantized_bias(item, old), old.double() + shift
    after = quantized_bias(item, wanted.to(old.dtype))
    nearer = (shift - (after - before)).abs() < shift.abs()
    set_bias(context, item, torch.where(nearer, wanted, old.double()))
    return old


def set_bias(context: ModelContext, item: Match, bias: torch.Tensor) -> None:
    """Give a layer a bias; its quantizer takes the range of that."""
    layer = item.layer.module
    context.undo.set_parameter(layer, "bias", bias)
    quantizer = layer._modules["bias_quantizer"]
    if quantizer is not None:
        calibrate_with(quantizer, own_parameter(layer, "bias"))


def quantized_bias(item: Match, bias: torch.Tensor) -> torch.Tensor:
    """The values that the codes of a bias stand for, float64."""
    quantizer = item.layer.module._modules["bias_quantizer"]
    if quantizer is None:
        return bias.detach().double()
    calibrate_with(quantizer, bias)
    value = bias.detach()
    for part in parts(quantizer):
        value = part.quantized(value)
    return value.double()
