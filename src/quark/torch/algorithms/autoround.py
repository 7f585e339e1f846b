"""AutoRound for the torch flow: all weights of a decoder block learn their rounding together.

    minimize  mean (block~(x~) - block(x))^2      x~: behind the quantized blocks,  x: behind the float ones

A block whose loss over all samples is not below that of rounding to nearest keeps the nearest values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from quark.algorithms.autoround import Learned
from quark.dataclass import dataclass
from quark.torch.algorithms.blocks import BlockRun, Stream, find_blocks, record
from quark.torch.algorithms.context import ModelContext, float_weights, set_matrix
from quark.torch.algorithms.crew import advance, each_sample
from quark.torch.algorithms.grids import grid_of
from quark.torch.algorithms.inputs import answer_of
from quark.torch.algorithms.tune import check_inside, float_copy, say_untuned, wanted
from quark.torch.algorithms.walk import Again, walk
from quark.torch.calibration import disabled
from quark.torch.config.algorithms import AutoRoundConfig
from quark.torch.fake_quantize import FakeQuantize, parts, scale_of
from quark.torch.layers import own_parameter
from quark.torch.matching import Match
from quark.torch.outputs import answer
from quark.torch.quantized_layer import weight_quantizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A weight that is learned.

    Attributes:
        name: of the layer in its block.
        item: the layer.
        learned: its state, in the layout in which the weight is stored.
        part: the last stage of its quantizer.
        dtype: of the weight.
    """

    name: str
    item: Match
    learned: Learned
    part: FakeQuantize
    dtype: torch.dtype


def run_autoround(context: ModelContext, config: AutoRoundConfig) -> None:
    """Tune the weights of ``context.model``."""
    blocks = find_blocks(context.model, config.model_decoder_layers)
    check_inside(config.inside_layer_modules, context, blocks.modules)
    with disabled([context.model]):
        blocks, stream = record(context.model, blocks, context.samples, context.store)
    say_untuned(context, config.inside_layer_modules, blocks.modules)
    clean = stream.copy()

    def work(name: str, block: nn.Module, streams: list[Stream], again: Again) -> list[Stream]:
        run, clean = BlockRun(name, block, streams[0]), streams[1]
        with torch.no_grad():
            reference = float_copy(block)
            goals = each_sample(waiting_answer, BlockRun(name, reference, clean), context.workers)
        if again is None:
            learn_block(context, config, run, goals)
        else:
            again()
        with torch.no_grad():
            return [advance(run, context.workers), clean.behind(name, goals)]

    with float_weights(context):
        walk(context.store, blocks, [stream, clean], work)


def waiting_answer(run: BlockRun, k: int) -> torch.Tensor:
    """What a block answers to sample ``k``, where hidden states wait."""
    return run.stream.waiting(answer_of(run, k))


def learn_block(context: ModelContext, config: AutoRoundConfig, run: BlockRun, goals: list[torch.Tensor]) -> None:
    """Learn the rounding of one block."""
    items = context.layers()
    tasks = [
        start(key, items[module], config.enable_minmax_tuning)
        for key, module in run.block.named_modules()
        if module in items and wanted(key, config.inside_layer_modules)
    ]
    if not tasks:
        return
    generator = torch.Generator().manual_seed(0)
    loss = partial(sample_loss, run, goals, tasks)
    nearest = [task.learned.snapshot() for task in tasks]
    bound = whole_loss(loss, tasks, len(goals))
    best, lowest = nearest, float("inf")
    for step in range(config.iters):
        chosen = torch.randperm(len(goals), generator=generator)[: config.batch_size].tolist()
        mean = backward(loss, tasks, chosen) / len(chosen)
        if mean < lowest:
            best, lowest = [task.learned.snapshot() for task in tasks], mean
        rest = 1 - step / config.iters
        for task in tasks:
            task.learned.move(config.lr * rest, config.minmax_lr * rest)
    settle(tasks, best)
    with torch.no_grad():
        if whole_loss(loss, tasks, len(goals)) >= bound:
            settle(tasks, nearest)
            log.warning(
                "autoround: %s keeps the nearest values: nothing that was learned is better", run.name or "the model"
            )
        for task in tasks:
            write(context, task)


def backward(loss: Callable[[int, list[torch.Tensor]], torch.Tensor], tasks: list[Task], chosen: list[int]) -> float:
    """The sum of the losses of some samples, with gradients of what is learned.

    The weights are made once for all samples, which leave their gradients there: memory holds one sample's graph.
    """
    with torch.enable_grad():
        values = [task.learned.value() for task in tasks]
        leaves = [value.detach().requires_grad_() for value in values]
        total = 0.0
        for k in chosen:
            one = loss(k, leaves)
            one.backward()
            total += float(one.detach())
        reached = [(value, leaf.grad) for value, leaf in zip(values, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([value for value, _ in reached], [grad for _, grad in reached])
    return total


@torch.no_grad()
def whole_loss(loss: Callable[[int, list[torch.Tensor]], torch.Tensor], tasks: list[Task], count: int) -> float:
    """The sum of the losses of all samples."""
    values = [task.learned.value() for task in tasks]
    return sum(float(loss(k, values)) for k in range(count))


def start(name: str, item: Match, clips: bool) -> Task:
    """A weight, rounded to nearest to begin with."""
    module = item.layer.module
    quantizer = weight_quantizer(module)
    stored = own_parameter(module).detach()
    weight = stored.float()
    *before, part = parts(quantizer)
    moving = clips and not before and part.stage.calibrated and not part.stage.is_block and not part.stage.real_zero
    moving = moving and part.stage.spec.scale_rule == "float32"
    expand = partial(part.granularity.expand, shape=tuple(weight.shape))
    learned = Learned.start(weight, grid_of(quantizer, weight), part.scale if moving else None, expand)
    return Task(name, item, learned, part, stored.dtype)


def sample_loss(
    run: BlockRun, goals: list[torch.Tensor], tasks: list[Task], k: int, values: list[torch.Tensor]
) -> torch.Tensor:
    """The loss of one sample under some weights; the block's own parameters get no gradients."""
    weights = {key: value.detach() for key, value in run.block.named_parameters()}
    learned = zip(tasks, values, strict=True)
    weights |= {f"{task.name}.weight": value.to(task.dtype) for task, value in learned}
    args, kwargs = run.arguments(k)
    goal = run.stream.called(goals[k], run.block)
    return (answer(functional_call(run.block, weights, args, kwargs)).float() - goal.float()).square().mean()


def settle(tasks: list[Task], values: list[list[torch.Tensor]]) -> None:
    """Put what was learned to ``values``."""
    for task, value in zip(tasks, values, strict=True):
        task.learned.restore(value)


def write(context: ModelContext, task: Task) -> None:
    """The learned values and scales into the layer."""
    learned, kind = task.learned, task.item.layer.kind
    value = learned.value().detach()
    if learned.clip is not None:
        task.part.scale = scale_of(task.part) * learned.clip.detach()
    set_matrix(context, task.item, value.T if kind.transposed else value)
