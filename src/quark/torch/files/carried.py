"""The codes that a layer has already, kept where the new grid holds the values that they stand for.

A folder that was quantized is decoded (``prequantized``); the scales and zero points that its codes were decoded by lie
beside it. A layer is quantized under these where they give its values back bit for bit, and its codes are then those of
the folder; else it is quantized anew. So nothing has to be believed about formats: what is the same shows itself.

    <name>             empty: the tensor was quantized before
    <name>.<k>.scale, <name>.<k>.zero_point    of its stage ``k``, flat; none where values tell them (MX)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import as_a
from quark.files.schema import Schema
from quark.numerics.affine import axis_of
from quark.numerics.blocks import Encoded
from quark.numerics.elements import Int
from quark.torch.digest import GRIDS
from quark.torch.export.checkpoint import names_in, opened
from quark.torch.export.layout import CODES, BlockLayout, Layout, PairLayout, Stored, layout_of_quantizer, store
from quark.torch.export.original import names_of
from quark.torch.export.storage import storage_of
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts
from quark.torch.quantized_layer import QuantLayer, forget_quantized, quantized_layers
from quark.torch.shared_scales import tensor_parts

EXPERT = re.compile(r"\.\d+\.[^.]+\.weight$")
Known = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class CarriedLayers:
    """What became of the layers of a folder that was quantized before.

    Attributes:
        kept: layers whose codes were carried over.
        anew: layers that were quantized again.
        error, total: sums of squares of the differences to the values of the folder, and of these, over both.
    """

    kept: int = 0
    anew: int = 0
    error: float = 0.0
    total: float = 0.0

    @property
    def loss(self) -> float:
        """Norm of the differences over the norm of the values."""
        return float((self.error / self.total) ** 0.5) if self.total else 0.0

    def __add__(self, other: CarriedLayers) -> CarriedLayers:
        return CarriedLayers(
            self.kept + other.kept, self.anew + other.anew, self.error + other.error, self.total + other.total
        )


class Record(Schema):
    """A ``CarriedLayers`` in a journal."""

    kept: int
    anew: int
    error: float
    total: float


def places_of(folder: Path) -> dict[str, Path]:
    """Where the parameters of a decoded checkpoint's tensors are, by the names of these; empty for any other folder."""
    path = folder / GRIDS
    names = names_in(path) if path.is_file() else []
    return {name: path for name in names if not name.endswith((".scale", ".zero_point"))}


def known_of(places: Mapping[str, Path], name: str) -> Known | None:
    """The parameters of a tensor by "<k>.scale" and "<k>.zero_point"; None: it was float."""
    stack = f"{EXPERT.sub('', name)}." if EXPERT.search(name) else None  # one expert of a stack that was coded whole
    found = name if name in places else next((key for key in places if stack and key.startswith(stack)), None)
    if found is None:
        return None
    with opened(places[found]) as file:
        keys = [key for key in file.keys() if key.startswith(f"{found}.")]  # noqa: SIM118
        return {key.removeprefix(f"{found}."): file.get_tensor(key) for key in keys}


@torch.no_grad()
def codes_under(quantizer: Quantizer, value: torch.Tensor, known: Known, pack_method: str = "reorder") -> Stored | None:
    """The stored tensors of ``value`` under known parameters, which ``quantizer`` has then.

    Returns:
        None where they do not give ``value`` back; ``quantizer`` is as it was.
    """
    stages = list(parts(quantizer))
    before = [(part.scale, part.zero_point) for part in stages]
    first = stages[0].stage.format
    for shift in dict.fromkeys((0, first.middle if isinstance(first, Int) else 0)):  # symmetric codes in unsigned ones
        if all(settle(part, known, number, tuple(value.shape), shift) for number, part in enumerate(stages)):
            layout = layout_of_quantizer(quantizer, tuple(value.shape), pack_method)
            told = known.get("0.blocks") if isinstance(layout, BlockLayout) else None
            made = store(value, quantizer, pack_method) if told is None else under_blocks(layout, value, told, known)
            if torch.equal(layout.restore(made).to(value.dtype), value):
                return made
        for part, (scale, zero_point) in zip(stages, before, strict=True):
            part.scale, part.zero_point = scale, zero_point
    return None


def under_blocks(layout: Layout | PairLayout, value: torch.Tensor, told: torch.Tensor, known: Known) -> Stored:
    """``value`` under scales of blocks that are told, which need not be those that its values ask for."""
    layout = as_a(BlockLayout, layout)
    block, axis, above = layout.block, axis_of(layout.granularity), known.get("0.scale")
    scales = told.contiguous().view(torch.uint8).reshape(layout.grid(block.size))
    ones = block.element.encode(torch.ones(layout.shape))
    step = block.decode(Encoded(ones, scales, None), axis, None if above is None else above.float().reshape(()))
    elements = torch.where(step > 0, value.float() / step, torch.zeros_like(step))
    codes = block.element.encode(block.element.round(elements))
    made = {
        CODES: layout.codes.put(codes, layout.pack_method),
        layout.name("scale"): scales.view(storage_of(block.storage).dtype),
    }
    return made if above is None else {**made, layout.name("scale", 1): above.float().reshape(())}


def settle(part: FakeQuantize, known: Known, number: int, shape: tuple[int, ...], shift: int) -> bool:
    """Give one stage its known parameters, zero points moved by ``shift``; whether they fit it."""
    if not part.stage.needs_range:
        return True
    scale, zeros = known.get(f"{number}.scale"), known.get(f"{number}.zero_point")
    own = () if part.stage.is_block else part.granularity.parameter_shape(shape)
    size = torch.Size(own).numel()
    if scale is None or scale.numel() not in (1, size) or part.stage.real_zero:
        return False
    zeros = torch.zeros_like(scale) if zeros is None else zeros
    part.scale = scale.float().reshape(-1).expand(size).reshape(own).clone()
    part.zero_point = (zeros.to(torch.int32) + shift).reshape(-1).expand(size).reshape(own).clone()
    return True


def one_scale(known: Iterable[Known | None]) -> bool:
    """Whether tensors that have to share a scale do."""
    scales = [None if one is None else one.get("0.scale") for one in known]
    first = scales[0]
    return first is not None and all(scale is not None and torch.equal(scale, first) for scale in scales)


def changed_to(value: torch.Tensor, made: Stored, quantizer: Quantizer, pack_method: str) -> CarriedLayers:
    """What one layer that is quantized anew loses."""
    found = layout_of_quantizer(quantizer, tuple(value.shape), pack_method).restore(made)
    error, total = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in (found - value, value))
    return CarriedLayers(0, 1, error, total)


def unchanged(value: torch.Tensor) -> CarriedLayers:
    """One layer that keeps its codes."""
    return CarriedLayers(1, 0, 0.0, float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2)


# ---- models in memory ------------------------------------------------------------------------------------------------


def carry_over(model: nn.Module, folder: Path, groups: Iterable[Iterable[str]] = ()) -> CarriedLayers | None:
    """Give the quantized weights of a model the codes that they had in the folder that it was decoded from.

    Args:
        model: quantized, not frozen.
        folder: from which it was loaded; of any other None comes back.
        groups: names or globs of siblings that share a scale.
    """
    places = places_of(folder)
    if not places:
        return None
    names, total = names_of(model), CarriedLayers()
    patterns = [[name.rpartition(".")[2] for name in group] for group in groups]
    layers = dict(quantized_layers(model))
    known = {name: known_of(places, f"{names.layer(name)}.weight") for name in layers}
    for name, layer in layers.items():
        value, own, quantizer = layer._parameters["weight"], known[name], layer.weight_quantizer
        if own is None or quantizer is None or value is None:
            continue
        members = list(siblings_of(name, layers, patterns)) if any(True for _ in tensor_parts(layer)) else []
        together = len(members) < 2 or one_scale(known[member] for member in members)
        made = codes_under(quantizer, value.detach(), own) if together else None
        if made is None:
            made = store(value.detach(), quantizer)
            total += changed_to(value.detach().float(), made, quantizer, "reorder")
        else:
            total += unchanged(value.detach())
            forget_quantized([layer])
    return total


def siblings_of(name: str, layers: Mapping[str, QuantLayer], patterns: list[list[str]]) -> Iterator[str]:
    """The layers that share a scale with one, itself among them."""
    parent, _, last = name.rpartition(".")
    for group in patterns:
        if any(fnmatchcase(last, pattern) for pattern in group):
            for other in layers:
                where, _, own = other.rpartition(".")
                if where == parent and any(fnmatchcase(own, pattern) for pattern in group):
                    yield other


def facts_of(found: CarriedLayers | None) -> dict[str, Any]:
    """What the summary of a command says."""
    if found is None:
        return {}
    return {"carried_over": found.kept, "quantized_again": found.anew, "loss_to_source": found.loss}
