"""Experts whose weights are stacked in one tensor, taken apart into linear layers.

    gate_up_proj [experts, 2 i, h], down_proj [experts, h, i]
        →  <n>.gate_proj [i, h], <n>.up_proj [i, h], <n>.down_proj [h, i]     views of the same memory

transformers 5 stacks the experts of every mixture model. A scale per tensor or channel belongs to one expert, each
expert sees its own tokens, and files name each expert's layers, so quantization needs them one by one. The object stays
and keeps its gate function; its class changes, and back again when quantizing fails.

    y = sum over the chosen n:  p_n  down_n( gate( gate_n(x), up_n(x) ) )

Layouts: gate and up one after the other or interleaved, weights transposed, biases, no gate. Experts that are handed
rows for each of them (Llama 4) compute those that are not all zero: a row of zeros stands for a token of another
expert. Not handled: norms behind an expert, and experts spread over machines; those stay float and are named.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.layers import own_parameter
from quark.torch.quantized_layer import quantized_layers

FACTS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "num_experts")
SORTED = {  # classes that say nothing about their layout, and are handed rows sorted by expert
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): {
        "has_gate": True, "has_bias": False, "is_transposed": True, "is_concatenated": True,
    },
}  # fmt: skip
STACKED = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


class Expert(nn.Module):
    """The linear layers of one expert."""

    def __init__(self, layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class UnfusedExperts(nn.Module):
    """Experts as numbered modules; mixed with the class that had them stacked."""

    fused_class: type[nn.Module]
    num_experts: int
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens [n, h] through the experts [n, k] that a router chose for them, weighted by [n, k]."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if torch.compiler.is_compiling():  # torch.export: a graph cannot ask which experts were chosen
            return self.all_of(tokens, chosen, weights).reshape(hidden_states.shape)
        result = torch.zeros_like(tokens)
        for number in torch.unique(chosen).tolist():
            if number < self.num_experts:  # a larger number stands for no expert
                rows, places = torch.where(chosen == number)
                made = self.run(self._modules[str(number)], tokens[rows]) * weights[rows, places, None]
                result.index_add_(0, rows, made.to(result.dtype))
        return result.reshape(hidden_states.shape)

    def all_of(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every expert on all tokens [n, h]; those of other experts are zero, which widens no range at run time."""
        result = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            mine = chosen == number
            own = torch.where(mine.any(-1, keepdim=True), tokens, torch.zeros_like(tokens))
            share = torch.where(mine, weights, torch.zeros_like(weights)).sum(-1, keepdim=True)
            result = result + (self.run(self._modules[str(number)], own) * share).to(result.dtype)
        return result

    def run(self, expert: Any, x: torch.Tensor) -> torch.Tensor:
        """One expert on its tokens."""
        up = expert.up_proj(x)
        if not self.has_gate:
            return expert.down_proj(self.act_fn(up))
        gate = expert.gate_proj(x)
        both = torch.cat((gate, up), -1) if self.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
        return expert.down_proj(self._apply_gate(both))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return revived, (self.fused_class,), self.__dict__


def revived(cls: type[nn.Module]) -> UnfusedExperts:
    """An empty object of the class that ``cls`` becomes, which has no name that pickle could find."""
    made: UnfusedExperts = object.__new__(unfused_class(cls))
    return made


class SortedExperts(UnfusedExperts):
    """Experts that are handed as many rows each, of which those of other experts' tokens are zero."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Rows [experts * n, h], the first n of them for the first expert."""
        rows = hidden_states.reshape(self.num_experts, -1, hidden_states.shape[-1])
        if torch.compiler.is_compiling():  # torch.export, as above
            made = torch.stack([self.run(self._modules[str(number)], rows[number]) for number in range(len(rows))])
            kept = torch.where(rows.ne(0).any(-1, keepdim=True), made.to(rows.dtype), torch.zeros_like(rows))
            return kept.reshape(-1, hidden_states.shape[-1])
        result = torch.zeros_like(rows)
        for number, own in enumerate(rows):
            (used,) = torch.where(own.ne(0).any(-1))
            if len(used):
                result[number, used] = self.run(self._modules[str(number)], own[used]).to(result.dtype)
        return result.reshape(-1, hidden_states.shape[-1])

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return up * self.act_fn(gate)


CLASSES: dict[type[nn.Module], type[UnfusedExperts]] = {}


def unfused_class(cls: type[nn.Module]) -> type[UnfusedExperts]:
    """``UnfusedExperts`` mixed with ``cls``; always the same class for the same ``cls``."""
    if cls not in CLASSES:
        values, facts = {"fused_class": cls, "__module__": __name__}, sorted_facts(cls)
        base = SortedExperts if facts else UnfusedExperts
        CLASSES[cls] = type(f"Unfused{cls.__name__}", (base, cls), {**values, **facts})
    return CLASSES[cls]


def sorted_facts(cls: type[nn.Module]) -> dict[str, bool]:
    """The layout of a class in ``SORTED``; nothing of others."""
    return next((SORTED[key] for base in cls.__mro__ if (key := (base.__module__, base.__name__)) in SORTED), {})


def fact(module: Any, name: str) -> bool:
    """What a module, or the row of its class, says about its layout."""
    return bool(getattr(module, name, sorted_facts(type(module)).get(name)))


def count_of(module: Any) -> int:
    """How many experts a module holds."""
    return int(module.num_experts)


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds stacked experts of a layout that is known."""
    told = all(hasattr(module, name) for name in FACTS) or sorted_facts(type(module))
    if isinstance(module, UnfusedExperts) or not told:
        return False
    away = getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False)
    names = ["down_proj", opening(module)]
    stacked = [module._parameters.get(name) for name in names]
    return not away and all(value is not None and value.dim() == 3 for value in stacked)


def unfuse_experts(model: nn.Module) -> dict[nn.Module, Callable[[], None]]:
    """Take all stacked experts of ``model`` apart.

    Returns:
        For each module that had them, what puts it back together.
    """
    return {module: unfuse(module) for module in list(model.modules()) if is_fused(module)}


def unfuse(module: nn.Module) -> Callable[[], None]:
    """Take the experts of one module apart; what is returned puts them back."""
    before = dict(module._parameters)
    for number in range(count_of(module)):
        expert = Expert({name: linear(weight, bias) for name, weight, bias in layers_of(module, number)})
        module._modules[str(number)] = expert.train(module.training)
    for name in STACKED:
        module._parameters.pop(name, None)
    module.__class__ = unfused_class(type(module))
    return partial(fuse, module, before)


def fuse(module: Any, before: dict[str, nn.Parameter | None]) -> None:
    """Undo ``unfuse``."""
    for number in range(count_of(module)):
        module._modules.pop(str(number), None)
    module._parameters.clear()
    module._parameters.update(before)
    module.__class__ = module.fused_class


def layers_of(module: nn.Module, number: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """(name, weight [out, in], bias) of the layers of one expert."""
    weight, bias = part(module, opening(module), number)
    if not fact(module, "has_gate"):
        yield "up_proj", weight, bias
    else:
        half, apart = weight.shape[0] // 2, fact(module, "is_concatenated")
        rows = [slice(0, half), slice(half, None)] if apart else [slice(0, None, 2), slice(1, None, 2)]
        for name, span in zip(("gate_proj", "up_proj"), rows, strict=True):
            yield name, weight[span], None if bias is None else bias[span]
    yield "down_proj", *part(module, "down_proj", number)


def opening(module: nn.Module) -> str:
    """Name of the stacked tensor that opens the experts."""
    return "gate_up_proj" if fact(module, "has_gate") else "up_proj"


def stacked_name(module: nn.Module, name: str) -> str:
    """The stacked tensor that a parameter of experts taken apart, such as ``3.up_proj.weight``, is part of."""
    _, layer, slot = name.split(".")
    source = layer if layer == "down_proj" else opening(module)
    return source if slot == "weight" else f"{source}_{slot}"


def numbered_stacks(module: nn.Module, start: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Small stacks in the layout of a module's own whose elements are numbered from ``start``, and the parts of each.

    Returns:
        Stacked tensors by their names in the module; the weights and biases of each expert, ``3.up_proj.weight``.
    """
    count, inner, hidden = count_of(module), 2, 3
    wide = 2 * inner if fact(module, "has_gate") else inner
    sizes = {opening(module): (wide, hidden), "down_proj": (hidden, inner)}
    stacks: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in sizes.items():
        shape = (columns, rows) if fact(module, "is_transposed") else (rows, columns)
        forms = {name: shape, f"{name}_bias": (rows,)} if fact(module, "has_bias") else {name: shape}
        for own, form in forms.items():
            size = count * math.prod(form)
            stacks[own] = torch.arange(start, start + size).reshape(count, *form)
            start += size
    view = copy.copy(module)
    view.__dict__["_parameters"] = stacks
    parts: dict[str, torch.Tensor] = {}
    for number in range(count):
        for name, weight, bias in layers_of(view, number):
            parts[f"{number}.{name}.weight"] = weight
            parts |= {} if bias is None else {f"{number}.{name}.bias": bias}
    return stacks, parts


def part(module: nn.Module, name: str, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [out, in] and the bias of one expert, as views."""
    weight = own_parameter(module, name).detach()[number]
    bias = module._parameters.get(f"{name}_bias") if fact(module, "has_bias") else None
    return weight.T if fact(module, "is_transposed") else weight, None if bias is None else bias.detach()[number]


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer that has these tensors, not copies."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=bias.is_floating_point())
    return layer


def fuse_untouched(taken: dict[nn.Module, Callable[[], None]]) -> None:
    """Put those experts back together of which no layer is quantized."""
    for module, undo in taken.items():
        if not any(True for _ in quantized_layers(module)):
            undo()
