"""The layers that can be quantized, one row each, and what has to be known about them.

A subclass is quantized as its base; its own ``forward`` is kept. Recurrent layers are taken apart into linear layers
(``quark.torch.recurrent``), which have rows here. Not handled: modules whose weight is computed (parametrizations) or
read by somebody else (the output projection inside ``nn.MultiheadAttention``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quark.dataclass import dataclass
from quark.errors import ConfigError, known, unknown
from quark.numerics.granularity import Block2D, Channel, Granularity, Group


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Attributes:
        type: the float class.
        features: axis of the input that the weights sum over, or None for layers that look up rows.
        tokens: axis 1 of activations counts tokens, not channels.
        transposed: the weight is [in, out], where configurations speak of [out, in].
        by_default: ``global_quant_config`` applies.
    """

    type: type[nn.Module]
    features: int | None
    tokens: bool = False
    transposed: bool = False
    by_default: bool = True

    def weight_granularity(self, granularity: Granularity) -> Granularity:
        """What a granularity, written for [out, in], means for the weight as it is stored."""
        if not self.transposed:
            return granularity
        if isinstance(granularity, Channel | Group):
            return replace(granularity, axis={0: 1, 1: 0, -1: 0, -2: 1}.get(granularity.axis, granularity.axis))
        return Block2D(granularity.columns, granularity.rows) if isinstance(granularity, Block2D) else granularity


KINDS = (
    LayerKind(nn.Linear, -1, tokens=True),
    LayerKind(nn.Conv1d, 1),
    LayerKind(nn.Conv2d, 1),
    LayerKind(nn.Conv3d, 1),
    LayerKind(nn.ConvTranspose2d, 1),
    LayerKind(nn.Embedding, None, by_default=False),
    LayerKind(nn.EmbeddingBag, None, by_default=False),
)


def known_kind(module: nn.Module) -> LayerKind:
    """The kind of a layer that is known to have one."""
    return known(kind_of(module), f"the kind of a {type(module).__name__}")


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Exchange the class of a module: it stays the object that the model knows."""
    module.__class__ = cls


def name_in(module: str, name: str) -> str:
    """The dotted name of what a module holds; a model that is one layer has no name."""
    return f"{module}.{name}" if module else name


def own_parameter(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """The parameter that a module holds itself: what its attribute of that name shows may be computed.

    Raises:
        AttributeError: it has none of that name.
    """
    value = module._parameters.get(name)
    if value is None:
        raise AttributeError(f"{type(module).__name__} has no parameter {name!r} of its own")
    return value


class Projection(nn.Linear):
    """A linear layer of a recurrent one."""


class LSTMProjection(Projection):
    """Of an LSTM."""


class GRUProjection(Projection):
    """Of a GRU."""


class RNNProjection(Projection):
    """Of an RNN."""


RECURRENT: dict[type[nn.Module], type[Projection]] = {
    nn.LSTM: LSTMProjection,
    nn.GRU: GRUProjection,
    nn.RNN: RNNProjection,
}
PROJECTION = LayerKind(Projection, -1, tokens=True, by_default=False)  # its float kernel is faster: only where named
CONV1D = ("transformers.pytorch_utils", "Conv1D")


def kind_of(module: nn.Module) -> LayerKind | None:
    """The row for ``module``, or None if it cannot be quantized."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None
    for kind in (PROJECTION, *KINDS):
        if isinstance(module, kind.type):
            return kind
    for cls in type(module).__mro__:
        if (cls.__module__, cls.__name__) == CONV1D:
            return LayerKind(cls, -1, tokens=True, transposed=True)
    return None


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight of a layer is stored [in, out]."""
    kind = kind_of(module)
    return kind is not None and kind.transposed


def type_names() -> list[str]:
    """Names of the types that a configuration file can hold."""
    return [kind.type.__name__ for kind in KINDS] + [CONV1D[1]] + [cls.__name__ for cls in RECURRENT]


def type_of_name(key: object) -> type[nn.Module]:
    """The class of layers that a key of ``layer_type_quant_config`` means: a module class, or the name of a row.

    Raises:
        ConfigError: neither.
    """
    for cls, projection in RECURRENT.items():
        if key in (cls, cls.__name__, projection, projection.__name__):
            return projection
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key
    for kind in KINDS:
        if kind.type.__name__ == key:
            return kind.type
    if key == CONV1D[1]:
        from transformers.pytorch_utils import Conv1D

        return Conv1D
    raise ConfigError(unknown("layer type", key, type_names()))
