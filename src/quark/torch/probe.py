"""Experiments on a model: one forward, with the tensors that passed its modules, or with some of them changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.first_input import attached, first_input, with_input

CLOSE = 1e-3  # of the largest value: what counts as the same answer


@dataclass
class Trace:
    """Inputs and outputs of the modules of a segment in one forward.

    Attributes:
        order: names, as they were first called.
        inputs, outputs: by name; of modules called once.
        output: the answers of the segment.
        called: names of all that were called with any value.
    """

    order: list[str]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    output: list[torch.Tensor]
    called: frozenset[str] = frozenset()


Edit = Callable[[torch.Tensor], torch.Tensor]


def keep(kept: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An edit that changes nothing: ``x``, which ``kept`` gets too."""
    kept.append(x)
    return x


@contextmanager
def edited(modules: dict[str, nn.Module], inputs: Mapping[str, Edit], outputs: Mapping[str, Edit]) -> Iterator[None]:
    """Functions applied to the first input, or to the output, of modules."""

    def before(edit: Edit) -> Callable[..., Any]:
        return lambda module, args, kwargs: with_input(module, args, kwargs, edit(first_input(module, args, kwargs)))

    def after(edit: Edit) -> Callable[..., Any]:
        return lambda module, args, output: edit(output)

    hooks = [modules[name].register_forward_pre_hook(before(edit), with_kwargs=True) for name, edit in inputs.items()]
    hooks += [modules[name].register_forward_hook(after(edit)) for name, edit in outputs.items()]
    with attached(hooks):
        yield


def trace(names: dict[str, nn.Module], forward: Callable[[], list[torch.Tensor]]) -> Trace:
    """One forward, with the tensors that the modules ``names`` read and wrote."""
    calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def see(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if isinstance(output, tuple) and output:  # a router's scores come with its choice
                output = output[0]
            x = first_input(module, args, kwargs)
            if isinstance(x, torch.Tensor) and isinstance(output, torch.Tensor):
                calls.setdefault(name, []).append((x, output))

        return after

    hooks = [module.register_forward_hook(see(name), with_kwargs=True) for name, module in names.items()]
    with attached(hooks):
        output = forward()
    reached = frozenset(name for name, found in calls.items() if any(x.numel() for x, _ in found))
    once = {name: found[0] for name, found in calls.items() if len(found) == 1 and found[0][0].numel()}
    inputs, outputs = ({name: pair[k] for name, pair in once.items()} for k in (0, 1))
    return Trace(list(once), inputs, outputs, output, reached)


def powers(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """``count`` powers of two between 1/8 and 16."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 ** torch.randint(-3, 5, (count,), generator=generator)).to(device)


def equal(x: torch.Tensor, y: torch.Tensor, close: float = CLOSE) -> bool:
    """Whether two answers are the same up to rounding, ``close`` of the largest value."""
    if x.shape != y.shape:
        return False
    tolerance = close * float(y.detach().abs().max())
    return bool(((x - y).abs() <= tolerance).all())


def all_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], close: float = CLOSE) -> bool:
    """Whether there are as many answers, each the same up to rounding; ``False`` where there are none to compare."""
    same = len(found) == len(wanted) > 0
    return same and all(equal(x, y, close) for x, y in zip(found, wanted, strict=True) if y.numel())


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude per channel, in float64."""
    return x.detach().reshape(-1, x.shape[-1]).double().abs().amax(0)


@contextmanager
def swapped(module: nn.Module, weight: torch.Tensor) -> Iterator[None]:
    """Another weight for a while."""
    before = module._parameters["weight"]
    module._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)
    try:
        yield
    finally:
        module._parameters["weight"] = before
