"""The names and layouts of tensors outside: those of the checkpoint that the model was published as.

transformers renames, joins and stacks tensors while it loads them (its weight conversion tables), so a model in memory
has names that no file on the hub has. Files are written the way back, as ``save_pretrained`` writes them: the tables of
transformers are reversed, and nothing about an architecture is known here.

    quantized layer, expert of a stack   its weight's name outside is that of all its tensors
    other tensors                        renamed; joined ones are taken apart when they are written

Which expert's weight is which tensor of the original is found by an experiment: stacks of numbered elements go through
the reversed tables, and come out as tensors that the slices of experts are equal to. Where the original is stacked
too, experts have the numbered names of the module in memory, under its name outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.experts import UnfusedExperts, numbered_stacks
from quark.torch.export.layout import Form
from quark.torch.export.shards import Item
from quark.torch.kv_cache import CacheQuantizer
from quark.torch.layers import name_in
from quark.torch.quantized_layer import quantized_layers

Tensors = Mapping[str, torch.Tensor]
WEIGHT = ".weight"


@dataclass(frozen=True)
class FileNames:
    """The way from names in memory to names in files.

    Attributes:
        layers: names outside of the layers whose tensors belong together, by their names in memory.
        renames: of transformers, reversed.
        converters: likewise, those that compute.
        model: that they are of.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[Any, ...] = ()
    converters: tuple[Any, ...] = ()
    model: Any = None

    def outside(self, name: str) -> str:
        """The name in a file of a tensor of the model, unless it is computed from several."""
        owner, _, own = name.rpartition(".")
        return name_in(self.layers[owner], own) if owner in self.layers else self.renamed(name)

    def layer(self, name: str) -> str:
        """The name outside of a layer."""
        return self.layers.get(name) or base_of(name, self.renamed)

    def renamed(self, name: str) -> str:
        """``name`` after all renamings."""
        for step in self.renames:
            name = str(step.rename_source_key(name)[0])
        return name

    def hit(self, name: str) -> tuple[Any, str, str] | None:
        """The conversion that makes other tensors of ``name``: it, the key of its group, its pattern."""
        if name.rpartition(".")[0] in self.layers:
            return None
        return conversion_of(name, self.converters)

    def groups(self, tensors: Iterable[str]) -> dict[str, list[str]]:
        """The tensors that are converted together, by the key of their group."""
        found: dict[str, list[str]] = {}
        for name in sorted(tensors, key=natural):
            if (hit := self.hit(name)) is not None:
                found.setdefault(hit[1], []).append(name)
        return found

    def written(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[str]:
        """The names in files of tensors of these shapes and types, taken apart where they are joined."""
        groups = self.groups(tensors)
        joined = {name for members in groups.values() for name in members}
        made = [self.outside(name) for name in tensors if name not in joined]
        for key, members in groups.items():
            empty = {name: torch.empty(tensors[name][0], dtype=tensors[name][1], device="meta") for name in members}
            made += self.taken_apart(key, empty)
        return made

    def taken_apart(self, key: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """What a group of tensors becomes in a file."""
        made = converted(self.model, self.converters, key, tensors)
        return {self.renamed(name): value for name, value in made.items()}


def names_of(model: nn.Module) -> FileNames:
    """The names of the tensors of a model in files; of one that transformers does not know, those in memory."""
    steps = [step.reverse_transform() for step in conversions_of(model)[::-1]]
    renames = tuple(step for step in steps if not hasattr(step, "operations"))
    converters = tuple(step for step in steps if hasattr(step, "operations"))
    bare = FileNames({}, renames, converters, model)
    layers = {name: base_of(name, bare.renamed) for name in owners(model)} | expert_names(bare, model)
    return FileNames(layers, renames, converters, model)


def conversions_of(model: Any) -> list[Any]:
    """What transformers did to the names when it loaded the model, or would do."""
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return []
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    # a prefix that checkpoints may lack is not added where no checkpoint was read
    steps = get_model_conversion_mapping(model, add_legacy=False)
    return [step for step in steps if not isinstance(step, PrefixChange)]


def owners(model: nn.Module) -> Iterator[str]:
    """Names of the layers whose tensors keep together."""
    for name, _ in quantized_layers(model):
        yield name
    for name, module in model.named_modules():
        if isinstance(module, UnfusedExperts):
            yield from (f"{name}.{path}" for path, layer in module.named_modules() if "weight" in layer._parameters)
        if isinstance(module, CacheQuantizer):
            yield from module.projections.values()


def base_of(layer: str, renamed: Callable[[str], str]) -> str:
    """The name outside of a layer: that of its weight. A layer whose weight has a name of its own keeps it."""
    name = renamed(f"{layer}{WEIGHT}")
    return name.removesuffix(WEIGHT) if name.endswith(WEIGHT) else layer


def expert_names(names: FileNames, model: nn.Module) -> dict[str, str]:
    """The names outside of the layers of experts that are taken apart, where the original has them one by one."""
    stacks: dict[str, torch.Tensor] = {}
    wanted: dict[bytes, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, UnfusedExperts):
            whole, parts = numbered_stacks(module, start=sum(value.numel() for value in stacks.values()))
            stacks |= {f"{path}.{name}": value for name, value in whole.items()}
            wanted |= {key_of(value): f"{path}.{name}" for name, value in parts.items()}
    found = {}
    for key, members in names.groups(stacks).items():
        made = names.taken_apart(key, {name: stacks[name] for name in members})
        for name, value in made.items():
            layer = wanted.get(key_of(value))
            if layer is not None and name.endswith(WEIGHT):
                found[layer.removesuffix(WEIGHT)] = name.removesuffix(WEIGHT)
    return found


def key_of(value: torch.Tensor) -> bytes:
    """Equal for tensors of one shape and the same numbers."""
    return bytes(value.shape) + value.contiguous().numpy().tobytes()


def conversion_of(name: str, converters: Iterable[Any]) -> tuple[Any, str, str] | None:
    """The first conversion that takes ``name``: it, the key of its group, its pattern."""
    for step in converters:
        key, pattern = step.rename_source_key(name)
        if pattern is not None:
            return step, str(key), pattern
    return None


def converted(model: Any, converters: Iterable[Any], key: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """What the conversion that has the group ``key`` makes of tensors."""
    step: Any = None
    for name in sorted(tensors, key=natural):
        hit = conversion_of(name, converters)
        if hit is not None and hit[1] == key:
            step = step or copy.deepcopy(hit[0])
            step.add_tensor(key, name, hit[2], tensors[name])
    made = step.convert(key, model=Shapes(model, tensors), config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Shapes:
    """A model as conversions see it, which ask for the shapes of tensors: those at hand go before its own."""

    def __init__(self, model: Any, tensors: Tensors) -> None:
        self.model, self.tensors = model, tensors

    def get_parameter(self, name: str) -> torch.Tensor:
        """A tensor by its name in memory."""
        found = self.tensors.get(name)
        return self.model.get_parameter(name) if found is None else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts numbers in names as numbers, so that lists of tensors are in order."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


# ---- writing ---------------------------------------------------------------------------------------------------------


def outside_items(items: Iterable[Item], names: FileNames) -> list[Item]:
    """Items under their names outside; tensors that were joined are taken apart."""
    items = list(items)
    single = {name: item for item in items for name in item.form if len(item.form) == 1}
    groups = names.groups(single)
    joined = {name for members in groups.values() for name in members}
    kept = [renamed_item(item, names.outside) for item in items if not joined & set(item.form)]
    return kept + [group_item(key, [single[name] for name in members], names) for key, members in groups.items()]


def renamed_item(item: Item, outside: Callable[[str], str]) -> Item:
    """An item under other names."""
    known = {name: outside(name) for name in item.form}
    if all(name == new for name, new in known.items()):
        return item
    form: Form = {known[name]: entry for name, entry in item.form.items()}
    return Item(form, lambda: {known[name]: value for name, value in item.make().items()})


def group_item(key: str, members: list[Item], names: FileNames) -> Item:
    """What tensors become that are converted together."""
    forms = {name: entry for item in members for name, entry in item.form.items()}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forms.items()}
    form: Form = {name: (tuple(value.shape), value.dtype) for name, value in names.taken_apart(key, empty).items()}

    def make() -> dict[str, torch.Tensor]:
        return names.taken_apart(key, {name: value for item in members for name, value in item.make().items()})

    return Item(form, make)


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadingOrder:
    """How the tensors of files come to a model.

    Attributes:
        single: the name in memory of every tensor that is only renamed, by its name outside.
        member: the group that a tensor outside belongs to.
        groups: by key, the names in memory that it makes and the names outside that it is made of.
        names: of the model.
    """

    single: Mapping[str, str]
    member: Mapping[str, str]
    groups: Mapping[str, tuple[list[str], list[str]]]
    names: FileNames

    def joined(self, key: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors in memory of a group whose tensors outside are given."""
        steps = conversions_of(self.names.model)
        renames = [step for step in steps if not hasattr(step, "operations")]
        converters = [step for step in steps if hasattr(step, "operations")]
        inner: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            for step in renames:
                name = str(step.rename_source_key(name)[0])
            inner[name] = value
        made: dict[str, torch.Tensor] = {}
        for group in {hit[1] for name in inner if (hit := conversion_of(name, converters)) is not None}:
            made |= converted(self.names.model, converters, group, inner)
        return made


def way_in(model: nn.Module, places: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LoadingOrder:
    """How the tensors of files come to a model that has these places (shape and type by name)."""
    names = names_of(model)
    groups: dict[str, tuple[list[str], list[str]]] = {}
    member: dict[str, str] = {}
    for key, inside in names.groups(places).items():
        empty = {name: torch.empty(places[name][0], dtype=places[name][1], device="meta") for name in inside}
        outside = list(names.taken_apart(key, empty))
        groups[key] = inside, outside
        member |= dict.fromkeys(outside, key)
    joined = {name for inside, _ in groups.values() for name in inside}
    single = {names.outside(name): name for name in places if name not in joined}
    return LoadingOrder({**{name: name for name in places if name not in joined}, **single}, member, groups, names)
