"""Where each tensor of a file goes in a model that has been made ready for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from quark.errors import ModelError
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.custom_modes import quark_name
from quark.torch.export.in_turn import pairs_of, taken_apart
from quark.torch.export.left_out import is_ignored
from quark.torch.export.original import way_in
from quark.torch.export.state import attention_parameters
from quark.torch.export.stored import PREFIXES, StoredParameters, activation_name
from quark.torch.fake_quantize import FakeQuantize, parts
from quark.torch.kv_cache import CacheQuantizer
from quark.torch.layers import name_in
from quark.torch.matching import FLOATS
from quark.torch.quantized_layer import QuantLayer, quantized_layers
from quark.torch.softmax import SoftmaxQuantizer

Place = tuple[nn.Module, str]


def load(model: nn.Module, checkpoint: Checkpoint, method: str = "quark") -> None:
    """Put every tensor of a checkpoint in its place.

    Raises:
        ModelError: tensors that are missing, that the model has no place for, or of another shape or type.
    """
    places = places_of(model)
    loaded: set[int] = set()
    for name, value in inside(model, places, checkpoint, method):
        group = places.get(name)
        if group is None and is_ignored(model, name):
            continue
        if group is None:
            raise ModelError(f"{str(checkpoint.folder)!r}: the model has no place for the tensor {name!r}")
        kept = [put(module, own, value, f"{str(checkpoint.folder)!r}: tensor {name!r}") for module, own in group[:1]]
        for module, own in group[1:]:
            share(module, own, kept[0])
        loaded.add(id(group))
    missing = [name for name, group in places.items() if id(group) not in loaded]
    if missing:
        raise ModelError(
            f"{str(checkpoint.folder)!r} lacks {len(missing)} tensors of the model; the first is {missing[0]!r}"
        )
    check_complete(model)


def inside(
    model: nn.Module, places: Mapping[str, list[Place]], checkpoint: Checkpoint, method: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in memory, value) of every tensor of a checkpoint; those that the model joins, joined."""
    way = way_in(model, {name: form_of(*group[0]) for name, group in places.items()})
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for stored, value in taken_apart(checkpoint.tensors(), pairs_of(model, way.names)):
        name = quark_name(stored, method)
        key = way.member.get(name)
        if key is None:
            yield way.single.get(name, stored if stored in places else name), value
            continue
        group = waiting.setdefault(key, {})
        group[name] = value
        if set(group) == set(way.groups[key][1]):
            yield from way.joined(key, waiting.pop(key)).items()


def form_of(module: nn.Module, own: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a place."""
    value = held_in(module, own)
    return tuple(value.shape), value.dtype


def held_in(module: nn.Module, own: str) -> torch.Tensor:
    """What a place holds now."""
    value: Any = module._parameters[own] if own in module._parameters else getattr(module, own)
    return cast(torch.Tensor, value)


def places_of(model: nn.Module) -> dict[str, list[Place]]:
    """Name in a file → the places of that tensor; names that share a tensor share the list."""
    places: dict[str, list[Place]] = {}
    groups: dict[int, list[Place]] = {}
    for name, module in own_modules(model):
        for own, value in own_values(module):
            group = groups.setdefault(id(value), [])
            if (module, own) not in group:
                group.append((module, own))
            places[name_in(name, own)] = group
    for name, layer in quantized_layers(model):
        places.update({name_in(name, key): [place] for key, place in quantizer_places(layer)})
    for name, part, kind in attention_parameters(model):
        places[name] = [(part, kind)]
    return places


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) without the quantizers, shared modules under each of their names."""
    owned: list[nn.Module] = [quantizer for _, layer in quantized_layers(model) for _, quantizer in layer.quantizers()]
    owned += [module for module in model.modules() if isinstance(module, CacheQuantizer | SoftmaxQuantizer)]
    hidden = {id(part) for quantizer in owned for part in quantizer.modules()}
    return ((name, module) for name, module in model.named_modules(remove_duplicate=False) if id(module) not in hidden)


def own_values(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of a module's own parameters and persistent buffers."""
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)
    for name, value in module._buffers.items():
        if value is not None and name not in module._non_persistent_buffers_set:
            yield name, value


def quantizer_places(layer: QuantLayer) -> Iterator[tuple[str, Place]]:
    """(name behind the layer's, place) of the parameters of a layer's quantizers."""
    for slot, quantizer in layer.quantizers():
        prefix = PREFIXES[slot]
        if isinstance(quantizer, StoredParameters):
            yield from ((f"{prefix}_{name}", (quantizer, name)) for name in quantizer._buffers)
            continue
        for number, part in enumerate(parts(quantizer), 1):
            for kind in ("scale", "zero_point"):
                if getattr(part, kind) is not None:
                    yield f"{prefix}_{activation_name(part, kind, number)}", (part, kind)


def place_of(model: nn.Module, name: str) -> Place:
    """The module and the name in it that the dotted ``name`` means."""
    owner, _, own = name.rpartition(".")
    return model.get_submodule(owner), own


def put(
    module: nn.Module, own: str, value: torch.Tensor, what: str, device: torch.device | None = None
) -> torch.Tensor:
    """One tensor to its place, on ``device`` (None: where the place is, or the CPU).

    Returns:
        What the module holds now.

    Raises:
        ModelError: another shape or type than the place has, or a scale that is not a number.
    """
    old = held_in(module, own)
    if own.startswith("scale") and value.dtype in FLOATS and not bool(value.isfinite().all()):
        raise ModelError(f"{what} has scales that are not finite: the file is broken")
    free = isinstance(module, FakeQuantize) and not old.numel()  # a scale whose number the configuration does not tell
    if not free and tuple(value.shape) != tuple(old.shape):
        raise ModelError(f"{what} has the shape {list(value.shape)}, and the model needs {list(old.shape)}")
    if old.dtype == torch.uint8 and value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        value = value.view(torch.uint8)
    if value.dtype != old.dtype:
        if not (value.dtype in FLOATS and old.dtype in FLOATS) and not isinstance(module, FakeQuantize):
            raise ModelError(f"{what} is {value.dtype}, and the model needs {old.dtype}")
        value = value.to(old.dtype)
    return share(module, own, value.to(device or ("cpu" if old.is_meta else old.device)))


def share(module: nn.Module, own: str, value: torch.Tensor) -> torch.Tensor:
    """Let a module hold ``value``, as the kind of thing that it held before."""
    if own in module._buffers:
        module._buffers[own] = value
        return value
    old = module._parameters[own]
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=bool(old is not None and old.requires_grad))
    module._parameters[own] = value
    return value


def check_complete(model: nn.Module) -> None:
    """No tensor is left without values."""
    values = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, value in values if value.is_meta]
    if empty:
        raise ModelError(
            f"{len(empty)} tensors of the model are on the meta device and in no file, the first is {empty[0]!r}; make "
            f"the model with its buffers on the CPU"
        )
