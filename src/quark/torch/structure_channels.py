"""Which layers read the channels that a layer writes, found by experiment: no table of networks.

    y → f → x,   f(s y) = s f(y) for s > 0 per channel         (ReLU, pooling, padding, concatenation, flattening)

The channels of one layer are multiplied by powers of two; the layers whose inputs grow by just these powers, in one run
of channels (or in runs of equal length, behind a flattening), read them. That nothing else does is proved: with the
inputs scaled back, the model must answer what it answered before.

Not handled: channels that pass a normalization, or an activation with a bound or a bend elsewhere than at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.layers import kind_of, own_parameter
from quark.torch.probe import Trace, all_equal, edited, powers, trace


@dataclass(frozen=True)
class ChannelReader:
    """A layer that reads channels of another.

    Attributes:
        name: of the layer.
        channels: for each of its input channels, the channel of the other that it is, or -1.
    """

    name: str
    channels: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Spread:
    """A layer, and all that read what it writes.

    Attributes:
        source: name of the layer.
        readers: the layers that read it.
    """

    source: str
    readers: tuple[ChannelReader, ...]


def find_spreads(model: nn.Module, forward: Callable[[], list[torch.Tensor]]) -> Iterator[Spread]:
    """Every layer whose channels can be scaled and taken back by those that read them, in the order of the calls.

    Args:
        model: in ``eval()``.
        forward: runs it on a sample and returns its answers.
    """
    layers = {name: module for name, module in model.named_modules() if has_channels(module)}
    seen = trace(layers, forward)
    for source in seen.order:
        found = readers_of(layers, seen, source, forward)
        if found and proved(layers, seen, source, found, forward):
            yield Spread(source, tuple(found))


def has_channels(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution."""
    kind = kind_of(module)
    return kind is not None and kind.features is not None


def axis_of(module: nn.Module, x: torch.Tensor) -> int:
    """The axis of the channels in what a layer reads or writes."""
    kind = kind_of(module)
    return x.dim() - 1 if kind is None or kind.tokens else x.dim() - own_parameter(module).dim() + 1


def along(values: torch.Tensor, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``values`` [channels], shaped so that they multiply the channels of ``x``."""
    axis = axis_of(module, x)
    return values.to(x.dtype).reshape([-1 if k == axis else 1 for k in range(x.dim())])


def magnitude(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each channel."""
    axis = axis_of(module, x)
    return x.detach().abs().amax([k for k in range(x.dim()) if k != axis]) if x.dim() > 1 else x.detach().abs()


def readers_of(
    layers: dict[str, nn.Module], seen: Trace, source: str, forward: Callable[[], list[torch.Tensor]]
) -> list[ChannelReader]:
    """The layers whose inputs grow with the channels of ``source``."""
    module, y = layers[source], seen.outputs[source]
    r = powers(y.shape[axis_of(module, y)], 3, y.device)
    later = seen.order[seen.order.index(source) + 1 :]
    grown: dict[str, torch.Tensor] = {}

    def look(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def see(x: torch.Tensor) -> torch.Tensor:
            grown[name] = magnitude(layers[name], x)
            return x

        return see

    with edited(layers, {name: look(name) for name in later}, {source: lambda y: y * along(r, module, y)}):
        forward()
    found = []
    for name in later:
        channels = runs(magnitude(layers[name], seen.inputs[name]), grown[name], r)
        if channels is not None:
            found.append(ChannelReader(name, channels))
    return found


def runs(before: torch.Tensor, after: torch.Tensor, r: torch.Tensor) -> torch.Tensor | None:
    """For each place the channel that it is, or -1; None where the growth is not that of whole runs of ``r``."""
    live, count, width = before > 0, len(r), len(before)
    growth = torch.where(live, after / before.clamp(min=torch.finfo(before.dtype).tiny), 1)
    same = (growth - 1).abs() < 1e-4
    candidates = [(start, 1) for start in range(width - count + 1)]
    candidates += [(0, width // count)] if width % count == 0 and width > count else []
    fits = []
    for start, repeat in candidates:
        stop = start + count * repeat
        wanted = r.repeat_interleave(repeat)
        inside = (growth[start:stop] / wanted - 1).abs() < 1e-4
        rest = torch.cat([same[:start], same[stop:]])
        if bool((inside | ~live[start:stop]).all()) and bool(rest.all()) and bool(live[start:stop].any()):
            fits.append((start, repeat))
    if len(fits) != 1:
        return None
    start, repeat = fits[0]
    channels = torch.full((width,), -1, dtype=torch.long, device=before.device)
    channels[start : start + count * repeat] = torch.arange(count, device=before.device).repeat_interleave(repeat)
    return channels


def proved(
    layers: dict[str, nn.Module],
    seen: Trace,
    source: str,
    readers: list[ChannelReader],
    forward: Callable[[], list[torch.Tensor]],
) -> bool:
    """Whether the answers stay when the readers take the powers back."""
    module, y = layers[source], seen.outputs[source]
    r = powers(y.shape[axis_of(module, y)], 4, y.device)

    def back(reader: ChannelReader) -> Callable[[torch.Tensor], torch.Tensor]:
        s = torch.where(reader.channels < 0, torch.ones_like(reader.channels, dtype=r.dtype), r[reader.channels])
        return lambda x: x / along(s, layers[reader.name], x)

    edits = {reader.name: back(reader) for reader in readers}
    with edited(layers, edits, {source: lambda y: y * along(r, module, y)}):
        return all_equal(forward(), seen.output)
