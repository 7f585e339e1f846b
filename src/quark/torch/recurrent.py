"""LSTM, GRU and RNN taken apart into linear layers, so that they are quantized like any other.

    weight_ih_l0, bias_ih_l0  →  <name>.ih_l0     of the input,  all steps at once
    weight_hh_l0, bias_hh_l0  →  <name>.hh_l0     of the state, step by step
    weight_hr_l0              →  <name>.hr_l0     LSTM with projections;  ``_reverse`` as in torch

The parameters stay the same objects; the object stays, its class changes, and back again when quantizing fails or no
part of it is quantized. The steps are those of torch (its documentation of ``LSTM``, ``GRU`` and ``RNN``):

    LSTM   c' = σ(f) c + σ(i) tanh(g)        h' = σ(o) tanh(c')
    GRU    n = tanh(x_n + σ(r) h_n)          h' = (1 - σ(z)) n + σ(z) h

Sequences are kept packed (torch's ``PackedSequence``): of each step the rows that are still running, one row a token.
The steps run in Python, slower than torch's kernel, which only float layers have. Not handled: subclasses, and the
cells (``LSTMCell``), which stay float and are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from quark.errors import known
from quark.torch.layers import RECURRENT
from quark.torch.quantized_layer import quantized_layers

PARAMETER = re.compile(r"^(weight|bias)_(ih|hh|hr)(_l\d+(?:_reverse)?)$")
FLAT = ("_flat_weights", "_flat_weight_refs")  # what torch's kernel reads
State = tuple[torch.Tensor, ...]


def lstm_step(module: Any, x: torch.Tensor, state: State, suffix: str) -> State:
    """The next hidden and cell state."""
    i, f, g, o = (x + getattr(module, f"hh{suffix}")(state[0])).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return getattr(module, f"hr{suffix}")(hidden) if module.proj_size else hidden, cell


def gru_step(module: Any, x: torch.Tensor, state: State, suffix: str) -> State:
    """The next hidden state."""
    (x_r, x_z, x_n), (r, z, n) = x.chunk(3, -1), getattr(module, f"hh{suffix}")(state[0]).chunk(3, -1)
    update = (x_z + z).sigmoid()
    return ((1 - update) * (x_n + (x_r + r).sigmoid() * n).tanh() + update * state[0],)


def rnn_step(module: Any, x: torch.Tensor, state: State, suffix: str) -> State:
    """The next hidden state."""
    both = x + getattr(module, f"hh{suffix}")(state[0])
    return (both.tanh() if module.nonlinearity == "tanh" else both.relu(),)


class Unrolled(nn.Module):
    """A recurrent layer whose projections are modules; mixed with the class that had them as parameters."""

    float_class: type[nn.RNNBase]
    step: Callable[..., State]

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """As torch's: a tensor (with or without a batch) or a packed sequence, and a state or None."""
        this = cast(Any, self)
        packed = isinstance(input, PackedSequence)
        batched = packed or input.dim() == 3
        data, sizes = (input.data, input.batch_sizes.tolist()) if packed else rows_of(input, this.batch_first)
        states = started(this, hx, data, sizes[0], batched)
        if packed and hx is not None and input.sorted_indices is not None:
            states = tuple(state.index_select(1, input.sorted_indices) for state in states)
        rows, last = layers(this, data, sizes, states)
        output: Any
        if packed:
            if input.unsorted_indices is not None:
                last = tuple(state.index_select(1, input.unsorted_indices) for state in last)
            output = PackedSequence(rows, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        else:
            output = shaped(rows, len(sizes), batched, this.batch_first)
            last = last if batched else tuple(state.squeeze(1) for state in last)
        return output, last if len(last) > 1 else last[0]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return nn.Module._apply(self, fn, recurse)

    def flatten_parameters(self) -> None:
        """Nothing: there is no kernel to prepare for."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return revived, (self.float_class,), self.__dict__


STEPS: dict[type[nn.Module], Callable[..., State]] = {nn.LSTM: lstm_step, nn.GRU: gru_step, nn.RNN: rnn_step}


def revived(cls: type[nn.Module]) -> nn.Module:
    """An empty object of the class that ``cls`` becomes, for pickle."""
    made: nn.Module = object.__new__(CLASSES[cls])
    return made


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    cls: type(f"Unrolled{cls.__name__}", (Unrolled, cls), {"float_class": cls, "step": step, "__module__": __name__})
    for cls, step in STEPS.items()
}


def rows_of(x: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, list[int]]:
    """A sequence [T, B, n] (or [B, T, n], or [T, n]) as rows [T * B, n], and the rows of each step."""
    steps = x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if batch_first else x
    return steps.reshape(-1, x.shape[-1]), [steps.shape[1]] * steps.shape[0]


def shaped(rows: torch.Tensor, steps: int, batched: bool, batch_first: bool) -> torch.Tensor:
    """Undo ``rows_of``."""
    if not batched:
        return rows
    sequence = rows.reshape(steps, -1, rows.shape[-1])
    return sequence.transpose(0, 1) if batch_first else sequence


def started(module: Any, hx: Any, data: torch.Tensor, rows: int, batched: bool) -> State:
    """The first states [layers * directions, B, n]: those given, or zeros."""
    if hx is not None:
        given = hx if isinstance(hx, tuple) else (hx,)
        return given if batched else tuple(state.unsqueeze(1) for state in given)
    count = module.num_layers * (2 if module.bidirectional else 1)
    lengths = [module.proj_size or module.hidden_size] + [module.hidden_size] * isinstance(module, nn.LSTM)
    return tuple(data.new_zeros(count, rows, length) for length in lengths)


def layers(module: Any, data: torch.Tensor, sizes: list[int], states: State) -> tuple[torch.Tensor, State]:
    """All layers and directions over packed rows; the output, and the last states."""
    last: list[State] = []
    ways = ("", "_reverse") if module.bidirectional else ("",)
    for layer in range(module.num_layers):
        made = []
        for way in ways:
            first = tuple(state[len(last)] for state in states)
            output, final = direction(module, data, sizes, first, f"_l{layer}{way}")
            made.append(output)
            last.append(final)
        data = torch.cat(made, -1)
        if layer < module.num_layers - 1:
            data = nn.functional.dropout(data, module.dropout, module.training)
    return data, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


def direction(
    module: Any, data: torch.Tensor, sizes: list[int], state: State, suffix: str
) -> tuple[torch.Tensor, State]:
    """One layer in one direction: rows that are not running keep their state."""
    steps = getattr(module, f"ih{suffix}")(data).split(sizes)
    outputs: list[torch.Tensor] = [data] * len(steps)
    for number in reversed(range(len(steps))) if suffix.endswith("_reverse") else range(len(steps)):
        rows = sizes[number]
        new = type(module).step(module, steps[number], tuple(part[:rows] for part in state), suffix)
        outputs[number] = new[0]
        state = tuple(torch.cat((fresh, old[rows:])) for fresh, old in zip(new, state, strict=True))
    return torch.cat(outputs), state


# ---- taken apart and put back ----------------------------------------------------------------------------------------


def unroll_recurrent(model: nn.Module) -> dict[nn.Module, Callable[[], None]]:
    """Take all recurrent layers of ``model`` apart.

    Returns:
        For each, what puts it back together.
    """
    found = [module for module in model.modules() if type(module) in STEPS and is_plain(module)]
    return {module: unroll(module) for module in found}


def is_plain(module: nn.Module) -> bool:
    """Whether all parameters are there, and none is computed."""
    return bool(module._parameters) and all(
        PARAMETER.match(name) and value is not None for name, value in module._parameters.items()
    )


def unroll(module: nn.Module) -> Callable[[], None]:
    """Take one recurrent layer apart; what is returned puts it back."""
    before = dict(module._parameters)
    flat = {name: module.__dict__.pop(name) for name in FLAT if name in module.__dict__}
    cls = RECURRENT[type(module)]
    for name, value in before.items():
        kind, part, suffix = known(PARAMETER.match(name), f"the part of {name!r}").groups()
        if kind == "weight" and value is not None:
            layer = cls(value.shape[1], value.shape[0], bias=False, device="meta")
            layer._parameters.update(weight=value, bias=before.get(f"bias_{part}{suffix}"))
            module._modules[f"{part}{suffix}"] = layer.train(module.training)
    module._parameters.clear()
    module.__class__ = CLASSES[type(module)]
    return partial(roll, module, before, flat)


def roll(module: Any, before: dict[str, nn.Parameter | None], flat: dict[str, Any]) -> None:
    """Undo ``unroll``."""
    module._modules.clear()
    module._parameters.update(before)
    module.__dict__.update(flat)
    module.__class__ = module.float_class


def roll_untouched(taken: dict[nn.Module, Callable[[], None]]) -> list[nn.Module]:
    """Put those layers back together of which no part is quantized, and return them."""
    untouched = [module for module in taken if not any(True for _ in quantized_layers(module))]
    for module in untouched:
        taken[module]()
    return untouched
