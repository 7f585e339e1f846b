"""The inputs of the linear layers of a block as sums over samples: H = sum x x^T and, beside a float copy of the block,
G = sum x_float x^T.

Layers that read one tensor (query, key and value) share their sums. What a layer multiplies is its quantized input, so
that is what is summed. Sums are float32; no input is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.algorithms.blocks import BlockRun, Enough
from quark.torch.algorithms.crew import PARTS, at_once, halves, joined, on, parts_of, shared_out
from quark.torch.algorithms.squares import add_squares, complete
from quark.torch.first_input import attached, first_input
from quark.torch.layers import known_kind, own_parameter
from quark.torch.outputs import answer
from quark.torch.quantized_layer import QuantLayer
from quark.torch.structure import run_model

TOGETHER = 1 << 28  # bytes of the sums of several groups (experts), above which all samples are one part: four are held


@dataclass(frozen=True)
class SharedInput:
    """Layers of a block that read one tensor.

    Attributes:
        layers: their names in the block, in the order in which they are called.
    """

    layers: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """Equal for groups that are siblings (those of experts): the first name, without numbers that are its parts."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.layers[0])


@dataclass
class Sums:
    """Sums over what a group has read.

    Attributes:
        hessian: sum of x x^T, [features, features]; while samples are added, without what is below the diagonal.
        cross: sum of x_float x^T, or None without a float copy.
        count: vectors seen.
    """

    hessian: torch.Tensor
    cross: torch.Tensor | None = None
    count: int = 0

    def with_those(self, other: Sums) -> Sums:
        """These sums, with those of other samples added."""
        self.hessian += other.hessian
        if self.cross is not None and other.cross is not None:
            self.cross += other.cross
        self.count += other.count
        return self

    def add(self, x: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Take in the rows of ``x`` [.., features] and of its float copy."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        add_squares(self.hessian, rows)
        self.count += len(rows)
        if other is not None:
            if self.cross is None:
                self.cross = torch.zeros_like(self.hessian)
            self.cross.addmm_(other.detach().reshape(-1, other.shape[-1]).float().T, rows)


@dataclass
class Watch:
    """Hooks on layers, for one forward at a time.

    Attributes:
        layers: by name in the block.
        see: called with the name and the input of each call.
        awaited: layers not called yet in this forward; when all are, the forward ends.
    """

    layers: dict[str, nn.Module]
    see: Callable[[str, torch.Tensor], None]
    stop: bool = True
    awaited: set[str] = field(default_factory=set)

    def run(self, forward: Callable[[], Any]) -> Any:
        """What one forward under the hooks returns; None, where it did not run to its end."""
        self.awaited = set(self.layers)
        layers = self.layers.items()
        hooks = [layer.register_forward_pre_hook(self.hook(name), with_kwargs=True) for name, layer in layers]
        with attached(hooks), suppress(Enough):
            return forward()
        return None

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """What runs before the layer called ``name``."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.see(name, first_input(module, args, kwargs))
            self.awaited.discard(name)
            if self.stop and not self.awaited:
                raise Enough

        return before


def read(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What ``layer`` multiplies when it is handed ``x``."""
    quantizer = layer.input_quantizer if isinstance(layer, QuantLayer) else None
    return x if quantizer is None else quantizer(x)


def answer_of(run: BlockRun, k: int) -> torch.Tensor:
    """What a block answers to sample ``k``."""
    return answer(run.forward(k) if run.name else run_model(run.block, run.stream.hidden[k]))


def find_groups(run: BlockRun, layers: dict[str, nn.Module]) -> list[SharedInput]:
    """Which of ``layers`` read one tensor, in the order in which they are called; layers that no sample reaches are
    in no group."""
    found: dict[tuple[int, int], list[str]] = {}
    seen: set[str] = set()
    for k in range(len(run)):
        alive: list[torch.Tensor] = []  # so that no address is used twice

        def see(layer: str, x: torch.Tensor, k: int = k, alive: list[torch.Tensor] = alive) -> None:
            if x.numel() and layer not in seen:
                seen.add(layer)
                alive.append(x)
                found.setdefault((k, next(i for i, other in enumerate(alive) if same(x, other))), []).append(layer)

        Watch(layers, see, stop=False).run(partial(run.forward, k))
        if len(seen) == len(layers):
            break
    return [SharedInput(tuple(names)) for names in found.values()]


def are_alike(x: torch.Tensor, clean: torch.Tensor) -> bool:
    """Whether a layer reads in the quantized model what it reads in the float one, but for errors below the values.

    An expert may be handed other tokens, or more or fewer of them.
    """
    if x.shape != clean.shape:
        return False
    wanted = clean.float()
    return bool((x.float() - wanted).square().sum() <= wanted.square().sum())


def keep(lists: dict[str, list[torch.Tensor]], name: str, x: torch.Tensor) -> None:
    """``x`` to the list of ``name``."""
    lists[name].append(x)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same values in the same place."""
    return (x.data_ptr(), x.shape, x.stride(), x._version) == (y.data_ptr(), y.shape, y.stride(), y._version)


def collect(
    run: BlockRun, groups: list[SharedInput], reference: BlockRun | None = None, workers: int | None = 1
) -> dict[SharedInput, Sums]:
    """The sums of ``groups``, all in one run of the block per sample: sums over parts of the samples.

    Args:
        run: the block and what enters it.
        groups: of which the sums are wanted; experts that no sample reaches are missing in the result.
        reference: the float block and what enters it.
        workers: that share the parts.
    """
    parts = parts_of(len(run), PARTS if len(groups) == 1 or bytes_of(run.block, groups) <= TOGETHER else 1)
    if not parts:
        return {}
    count = at_once(workers)
    sizes = ([len(part) for part in own] for own in halves(parts, count))
    spans = [range(own[0].start, own[-1].stop) for own in halves(parts, count)]
    others = (None if reference is None else on(reference, span) for span in spans)
    tasks = ((on(run, span), own, groups, other) for span, own, other in zip(spans, sizes, others, strict=True))
    sums = joined(shared_out(collect_parts, tasks, workers), len(parts), count, with_those)
    for own in sums.values():
        complete(own.hessian)
    return sums


def with_those(sums: dict[SharedInput, Sums], others: dict[SharedInput, Sums]) -> dict[SharedInput, Sums]:
    """Sums over some samples, with those over others added."""
    for group, own in others.items():
        sums[group] = sums[group].with_those(own) if group in sums else own
    return sums


def bytes_of(block: nn.Module, groups: list[SharedInput]) -> int:
    """Bytes of the sums of groups."""
    layers = [block.get_submodule(group.layers[0]) for group in groups]
    return sum(4 * own_parameter(layer).shape[0 if known_kind(layer).transposed else 1] ** 2 for layer in layers)


def collect_parts(
    run: BlockRun, sizes: list[int], groups: list[SharedInput], reference: BlockRun | None
) -> dict[SharedInput, Sums]:
    """``collect`` of parts of so many samples, one after the other."""
    bounds = [0, *accumulate(sizes)]
    spans = [range(*pair) for pair in pairwise(bounds)]
    found = (collect_part(on(run, span), groups, None if reference is None else on(reference, span)) for span in spans)
    return joined(found, len(sizes), PARTS, with_those)


def collect_part(run: BlockRun, groups: list[SharedInput], reference: BlockRun | None) -> dict[SharedInput, Sums]:
    """``collect``, one sample after the other."""
    sums: dict[SharedInput, Sums] = {}
    modules = dict(run.block.named_modules())
    heads = {group.layers[0]: group for group in groups}
    others = {} if reference is None else dict(reference.block.named_modules())
    for k in range(len(run)):
        clean: dict[str, list[torch.Tensor]] = {head: [] for head in heads}
        if reference is not None:
            watch = Watch({head: others[head] for head in heads}, partial(keep, clean))
            watch.run(partial(reference.forward, k))

        def see(head: str, x: torch.Tensor, clean: dict[str, list[torch.Tensor]] = clean) -> None:
            if not x.numel():
                return
            x = read(modules[head], x)
            if heads[head] not in sums:
                sums[heads[head]] = Sums(torch.zeros(x.shape[-1], x.shape[-1], device=x.device))
            partner = clean[head].pop(0) if clean[head] else None
            usable = partner is not None and are_alike(x, partner)
            sums[heads[head]].add(x, partner if usable else x if reference is not None else None)

        Watch({head: modules[head] for head in heads}, see).run(partial(run.forward, k))
    return sums
