"""Weights rounded block by block, each with the inputs that the quantized layers before it produce.

    for each block:  for each group of layers that read one tensor, in the order of the forward:
                         sum the inputs over all samples → round the weights of the group
                     run the block, as it is now, to get the inputs of the next one

What differs between algorithms is a ``Rounder``. A row of a weight whose error on the calibration inputs is larger than
that of rounding to nearest keeps the nearest values, so that no algorithm makes a layer worse there.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from quark.algorithms.columns import Columns
from quark.dataclass import dataclass
from quark.errors import ConfigError, unknown
from quark.numerics.replay import recordings
from quark.torch.algorithms.blocks import BlockRun, Stream, find_blocks, record
from quark.torch.algorithms.context import ModelContext, float_weights, matrix, set_matrix
from quark.torch.algorithms.crew import advance, shared_out
from quark.torch.algorithms.grids import grid_of
from quark.torch.algorithms.inputs import SharedInput, Sums, collect, find_groups
from quark.torch.algorithms.walk import Again, walk
from quark.torch.calibration import disabled
from quark.torch.fake_quantize import FakeQuantize, Parameters, Quantizer, parts
from quark.torch.matching import Match
from quark.torch.quantized_layer import forget_quantized, weight_quantizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundingTask:
    """A weight to round.

    Attributes:
        weight: [out, in], float32.
        grid: of ``weight``.
        quantizer: of the weight as it is stored.
        transposed: it is stored [in, out].
    """

    weight: torch.Tensor
    grid: Columns
    quantizer: Quantizer
    transposed: bool

    def quantized(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` [out, in] through every stage of the quantizer, disabled or not."""
        value = value.T if self.transposed else value
        for part in parts(self.quantizer):
            value = part.quantized(value)
        return value.T if self.transposed else value


Rounder = Callable[
    [Sums], Callable[[RoundingTask], torch.Tensor]
]  # prepared once per group of layers that share their inputs


@torch.no_grad()
def tune(context: ModelContext, rounder: Rounder, inside: list[str], path: str = "", paired: bool = False) -> bool:
    """Replace the weights of all linear layers in the blocks by values on their grids.

    Args:
        context: the model, quantizers attached and ranges known.
        rounder: how a weight is rounded under the sums of its inputs.
        inside: names (globs) of layers in a block, in the order of tuning; empty: all, as they are called.
        path: where the blocks are; empty: found.
        paired: the sums hold the inputs of the float model too.

    Returns:
        Whether a weight may be other than rounded to nearest.
    """
    from quark.report.progress import bars

    blocks = find_blocks(context.model, path)
    check_inside(inside, context, blocks.modules)
    with disabled([context.model]):
        blocks, stream = record(context.model, blocks, context.samples, context.store)
    say_untuned(context, inside, blocks.modules)
    streams = [stream, stream.copy()] if paired else [stream]
    moved = False

    def work(name: str, block: nn.Module, streams: list[Stream], again: Again) -> list[Stream]:
        nonlocal moved
        modules = [block, *([float_copy(block)] if paired else [])]
        runs = [BlockRun(name, module, stream) for module, stream in zip(modules, streams, strict=True)]
        if again is None:
            moved |= tune_block(context, rounder, inside, *runs)
        else:
            again()
            moved = True
        return [advance(one, context.workers) for one in runs]

    with float_weights(context), recordings(), bars() as update:
        walk(context.store, blocks, streams, work, partial(update, "tune"))
    return moved


def tune_block(
    context: ModelContext, rounder: Rounder, inside: list[str], run: BlockRun, reference: BlockRun | None = None
) -> bool:
    """Round the weights of one block; whether one is other than rounded to nearest."""
    items, name = context.layers(), run.name
    layers = {key: module for key, module in run.block.named_modules() if module in items and wanted(key, inside)}
    groups = find_groups(run, layers)
    reached = {layer for group in groups for layer in group.layers}
    if unreached := sorted(set(layers) - reached):
        log.warning("no sample reached %s in %r; their weights are rounded to nearest", ", ".join(unreached), name)
    moved = False
    for batch in batches(groups, inside, whole=not name):
        found = collect(run, batch, reference, context.workers)
        batched = [[items[layers[layer]] for layer in group.layers] for group in found]
        tasks = ((rounder, sums, list(map(task_of, own))) for own, sums in zip(batched, found.values(), strict=True))
        workers = context.workers if len(found) > 1 else 1
        for own, results in zip(batched, shared_out(round_group, tasks, workers), strict=True):
            for item, rounded in zip(own, results, strict=True):
                rounded.put(context, item)
                moved |= rounded.moved
    return moved


@dataclass(frozen=True)
class Rounded:
    """A weight that was rounded.

    Attributes:
        values: [out, in], on the grid.
        scales: of the parts of its quantizer.
        moved: a value is other than rounded to nearest.
    """

    values: torch.Tensor
    scales: list[Parameters]
    moved: bool

    def put(self, context: ModelContext, item: Match) -> None:
        """Give them to a layer."""
        set_matrix(context, item, self.values)
        for part, own in zip(parts(weight_quantizer(item.layer.module)), self.scales, strict=True):
            part.scale, part.zero_point = own


def task_of(item: Match) -> RoundingTask:
    """The weight of a layer."""
    module, kind = item.layer.module, item.layer.kind
    weight, quantizer = matrix(module, kind), weight_quantizer(module)
    grid = grid_of(quantizer, weight.T if kind.transposed else weight)
    return RoundingTask(weight, grid.transposed if kind.transposed else grid, quantizer, kind.transposed)


def round_group(rounder: Rounder, sums: Sums, tasks: list[RoundingTask]) -> list[Rounded]:
    """Round the weights of layers that read one tensor."""
    rounding = rounder(sums)
    return [round_layer(rounding, sums, task) for task in tasks]


def round_layer(rounding: Callable[[RoundingTask], torch.Tensor], sums: Sums, task: RoundingTask) -> Rounded:
    """Round one weight: the better of the result and of rounding to nearest, row by row."""
    weight, own = task.weight, list(parts(task.quantizer))
    nearest, before = task.quantized(weight), [(part.scale, part.zero_point) for part in own]
    for part in own:
        part.scale, part.zero_point = (None if x is None else x.clone() for x in (part.scale, part.zero_point))
    tuned = task.quantized(rounding(task))
    worse = loss_added(tuned, nearest, weight, sums) > 0
    better = torch.where(worse[:, None], nearest, tuned)
    for part, old in zip(own, before, strict=True):
        put_back(part, old, worse, rows=1 if task.transposed else 0)
    return Rounded(better, [(part.scale, part.zero_point) for part in own], not torch.equal(better, nearest))


def loss_added(values: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, sums: Sums) -> torch.Tensor:
    """How much larger |W X - Q X~|^2 is per row with ``values`` than with ``others``; X is X~ without a float copy.

    The difference of two quadratic forms takes one matrix product: (V - O) H (V + O - 2 W)^T.
    """
    change = values - others
    rows = ((change @ sums.hessian) * (values + others - 2 * weight)).sum(1)
    return rows if sums.cross is None else rows - 2 * ((weight @ (sums.cross - sums.hessian)) * change).sum(1)


def put_back(part: FakeQuantize, old: Parameters, worse: torch.Tensor, rows: int) -> None:
    """Give the rows of a weight that keep their nearest values their old scales."""
    for new, value in zip((part.scale, part.zero_point), old, strict=True):
        if new is not None and value is not None and not torch.equal(new, value):
            index = worse if rows == 0 else (slice(None), worse)
            new[index] = value[index]


def float_copy(block: nn.Module) -> nn.Module:
    """A copy of ``block`` that quantizes nothing."""
    reference = copy.deepcopy(block)
    for part in reference.modules():
        if isinstance(part, FakeQuantize):
            part.enabled = False
    forget_quantized(reference.modules())
    return reference


def wanted(name: str, inside: list[str]) -> bool:
    """Whether a layer is among those to tune."""
    return not inside or any(fits(name, pattern) for pattern in inside)


def fits(name: str, pattern: str) -> bool:
    """Whether a name in a block is, or ends with, a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def batches(groups: list[SharedInput], inside: list[str], whole: bool) -> Iterable[list[SharedInput]]:
    """Groups whose sums are taken in one run: siblings in a block; in a model without blocks all of them."""
    if whole:
        return [groups] if groups else []
    found: dict[str, list[SharedInput]] = {}
    for group in groups:
        found.setdefault(group.pattern, []).append(group)
    if not inside:
        return list(found.values())
    place = {pattern: rank for rank, pattern in enumerate(inside)}

    def rank(batch: list[SharedInput]) -> int:
        return min(number for pattern, number in place.items() if fits(batch[0].layers[0], pattern))

    return sorted(found.values(), key=rank)


def say_untuned(context: ModelContext, inside: list[str], blocks: dict[str, nn.Module]) -> None:
    """Name the quantized layers that stay rounded to nearest, where the configuration does not choose them itself."""
    tuned = {module for block in blocks.values() for module in block.modules()} & context.layers().keys()
    layers = [item.layer for item in context.found.quantized if item.stages["weight"]]
    left = [layer.name for layer in layers if layer.module not in tuned]
    if left and not inside:
        shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        rest = "%d others are rounded to nearest: %s"
        where = "" if "" in blocks else " in decoder blocks"
        log.warning(f"only linear layers{where} are tuned; {rest}", len(left), shown)


def check_inside(inside: list[str], context: ModelContext, blocks: dict[str, nn.Module]) -> None:
    """Every name of ``inside_layer_modules`` is a layer of a block.

    Raises:
        ConfigError: one that is not; the nearest is shown.
    """
    items = context.layers()
    names = [key for block in blocks.values() for key, module in block.named_modules() if module in items]
    for pattern in inside:
        if not any(fits(name, pattern) for name in names):
            raise ConfigError(unknown("layer in inside_layer_modules", pattern, sorted(set(names))))
