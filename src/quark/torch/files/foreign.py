"""A folder that another program has quantized, as a model of ours that keeps its codes: FP8, GPTQ, AWQ,
compressed-tensors, ModelOpt, MXFP4 (gpt_oss).

    tensors of the folder → values, scales, zero points (``prequantized``) → the tensors of a quark checkpoint → import

Each layer is decoded, stored in our own layout under the scales of the folder, and decoded again: what is not equal bit
for bit is refused. So nothing has to be believed about a format; only what is the same is carried over.

Not handled: inputs in another order (``desc_act``), int8 caches; they are refused by name. To be run, a model whose
inputs are float is decoded instead (``model_to_run``).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError, as_a, check_name
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.experts import count_of, fact, is_fused, layers_of, stacked_name, unfuse_experts
from quark.torch.export.checkpoint import Checkpoint, read_checkpoint
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.declared import refuse_method
from quark.torch.export.formats import FORMATS
from quark.torch.export.gguf_tensors import FileLoss
from quark.torch.export.left_out import GIVEN, is_prediction
from quark.torch.export.model_files import float_dtype, take_settings
from quark.torch.export.original import FileNames, names_of
from quark.torch.export.places import load
from quark.torch.export.reload import Scheme, check_float, map_model, own_model
from quark.torch.export.shards import SHARD_SIZE, Item
from quark.torch.export.skeleton import mark_loaded
from quark.torch.export.state import renamed
from quark.torch.export.write_as import export_as
from quark.torch.fake_quantize import make_quantizer
from quark.torch.files.carried import codes_under
from quark.torch.files.coded import Coded, Found, decoded, decoding
from quark.torch.files.folder_caches import FolderCaches, caches_in
from quark.torch.files.fp8 import exponents_of
from quark.torch.files.grids import FolderGrid, Parts, Steps, Uncarried, refuse
from quark.torch.files.methods import GRIDS, found_in, grid_in
from quark.torch.files.prequantized import LEFT, coded_item, method_of, plain_item
from quark.torch.files.skeleton import StoredSource, architecture_of, stored_tensors
from quark.torch.layers import kind_of

OWN = ("quark",)  # methods that the import reads as they are


@dataclass(frozen=True)
class Translated(Checkpoint):
    """A checkpoint whose quantized layers have our own tensors.

    Attributes:
        source: the tensors of the folder.
        layers: what makes the tensors of a layer, by the name outside of its weight.
        taken: names of the tensors that layers are made of.
        stacks: what takes stacked tensors apart whose experts are quantized, by their names.
        caches: tensors of the cache.
    """

    source: Mapping[str, StoredSource] = None  # type: ignore[assignment]
    layers: Mapping[str, FolderLayer] = None  # type: ignore[assignment]
    taken: frozenset[str] = frozenset()
    stacks: Mapping[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = field(default_factory=dict)
    caches: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every tensor."""
        for name, stored in self.source.items():
            if name in self.stacks:
                yield from self.stacks[name](stored.read(self.folder)).items()
            elif name not in self.taken and not LEFT.search(name):
                yield name, stored.read(self.folder)
        for layer in self.layers.values():
            yield from layer.tensors().items()
        yield from self.caches.items()


@dataclass(frozen=True)
class FolderLayer:
    """One quantized layer of a folder.

    Attributes:
        name: outside, of its weight.
        config: how it is quantized.
        values: gives its float32 values, and their scales, zero points, and scales of blocks, where these are not
            found in the values.
        inputs: static parameters of its inputs, by their names behind the layer's.
    """

    name: str
    config: QLayerConfig
    values: Any
    inputs: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors in the layout of quark.

        Raises:
            ConfigError: they do not stand for the same values.
        """
        values, scale, zero_point, blocks = self.values()
        stages = self.config.stages("weight")
        quantizer = make_quantizer(stages, f"weight {self.name!r}", True)
        given = {"0.scale": scale, "0.zero_point": zero_point, "0.blocks": blocks}
        with decoding(f"{self.name!r}"):  # scales of a type that is none of them
            made = codes_under(quantizer, values, {key: value for key, value in given.items() if value is not None})
        if made is None:
            refuse(f"the codes of {self.name!r} do not fit {stages[0].format.name} with these scales")
        prefix = self.name.removesuffix("weight")
        return {**renamed(self.name, made), **{f"{prefix}{key}": value for key, value in self.inputs.items()}}


def quantized_model(folder: Path, given: nn.Module | None = None) -> nn.Module:
    """The quantized model in a folder, with the codes and scales that it has.

    Args:
        folder: with ``config.json`` and safetensors files; of any method that can be read.
        given: the float model, which becomes quantized; None: made by transformers from ``config.json``.

    Raises:
        ConfigError: a folder that is float, or whose codes cannot be carried over.
        ModelError: files that are missing, broken, or do not fit the model.
    """
    if method_of(folder) in OWN:
        with decoding(f"{str(folder)!r}, quantized by 'quark',"):
            return own_model(given, folder)
    model, layers, inside, stacks, taken = layers_in(folder, given)
    checkpoint = read_checkpoint(folder)
    tensors = stored_tensors(checkpoint)
    caches = caches_in(model, checkpoint)
    own = (layers, taken, stacks, caches.tensors)
    translated = Translated(checkpoint.folder, checkpoint.config, checkpoint.files, None, tensors, *own)
    map_model(model, Scheme(config_of(model, layers, inside, caches), JsonExporterConfig(), "quark"))
    load(model, translated)
    if given is None:
        library: Any = model
        library.config._name_or_path = str(folder)
        take_settings(model, folder)
    model.__dict__[GIVEN] = prediction_items(model, checkpoint)
    return mark_loaded(model).eval()


def prediction_items(model: nn.Module, checkpoint: Checkpoint) -> list[Item]:
    """The heads for multi-token prediction of a folder; those that are coded are decoded, in the model's type."""
    tensors, found = stored_tensors(checkpoint), found_in(checkpoint)
    heads: Found = {name: coded for name, coded in found.items() if is_prediction(model, name)}
    taken = {part for coded in found.values() for part in coded.parts.values()}
    items = [coded_item(checkpoint, name, coded, tensors, float_dtype(model)) for name, coded in heads.items()]
    plain = [name for name in tensors if is_prediction(model, name) and name not in taken and not LEFT.search(name)]
    return items + [plain_item(checkpoint.folder, name, tensors[name]) for name in plain]


def model_to_run(folder: Path) -> nn.Module:
    """The quantized model in a folder as it computes: with its codes, or, where no grid of ours has them and nothing
    but weights is quantized, with the values that they stand for.

    Raises:
        ConfigError, ModelError: as ``quantized_model``.
    """
    try:
        return quantized_model(folder)
    except Uncarried:
        checkpoint = read_checkpoint(folder)
        described: Any = checkpoint.config["quantization_config"]
        if not WEIGHTS_ALONE.get(str(method_of(folder)), lambda said: False)(described):
            raise
        tensors = stored_tensors(checkpoint)
        found = found_in(checkpoint)
        own = (checkpoint.folder, checkpoint.config, checkpoint.files)
        model = empty_model(checkpoint)
        load(model, DecodedCheckpoint(*own, None, tensors, found))
        take_settings(model, folder)
        return model.eval()


@dataclass(frozen=True)
class DecodedCheckpoint(Checkpoint):
    """A checkpoint whose quantized tensors are decoded as they are read.

    Attributes:
        source: the tensors of the folder.
        found: those that are coded.
    """

    source: Mapping[str, StoredSource] = field(default_factory=dict)
    found: Found = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every tensor."""
        taken = {name for coded in self.found.values() for name in coded.parts.values()}
        for name, stored in self.source.items():
            if name not in taken and not LEFT.search(name):
                yield name, stored.read(self.folder)
        for name, coded in self.found.items():
            parts = {role: self.source[stored].read(self.folder) for role, stored in coded.parts.items()}
            yield name, decoded(self.folder, name, coded, parts)


WEIGHTS_ALONE: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {  # what is said → whether inputs stay float
    "gptq": lambda said: True,
    "awq": lambda said: True,
    "mxfp4": lambda said: True,
    "bitsandbytes": lambda said: not said.get("load_in_8bit"),
    "fp8": lambda said: not said.get("activation_scheme"),
    "modelopt": lambda said: str(said.get("quant_algo")).startswith("W4A16"),
    "compressed-tensors": lambda said: (
        not said.get("kv_cache_scheme")
        and not any(group.get("input_activations") for group in dict(said.get("config_groups") or {}).values())
    ),
}


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """The architecture of a folder, in its own type, without values.

    Raises:
        ModelError: transformers does not have it.
    """
    dtype = getattr(torch, str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")), torch.float32)
    model = architecture_of(checkpoint, True, False, dtype)  # a model that is cast has other rotary frequencies
    if model is None:
        raise ModelError(f"{str(checkpoint.folder / 'config.json')!r} names no architecture that transformers has")
    return model


def layers_in(
    folder: Path, given: nn.Module | None = None
) -> tuple[
    nn.Module,
    dict[str, FolderLayer],
    dict[str, str],
    dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]],
    frozenset[str],
]:
    """The architecture of a folder, what ``layers_of_model`` finds in it, and the tensors that its layers are made of.

    Raises:
        ConfigError, ModelError: as ``quantized_model``.
    """
    method = method_of(folder)
    if method not in GRIDS:
        if method is not None:
            refuse_method(folder / "config.json", method, ["quark", *GRIDS])
        refuse(f"{str(folder)!r} is float; codes are carried over from {', '.join(['quark', *GRIDS])}")
    checkpoint = read_checkpoint(folder)
    found = found_in(checkpoint)
    model = empty_model(checkpoint) if given is None else check_float(given)
    layers, inside, stacks = layers_of_model(model, checkpoint, found, grid_in(checkpoint))
    return model, layers, inside, stacks, frozenset(name for coded in found.values() for name in coded.parts.values())


def layers_of_model(
    model: nn.Module, checkpoint: Checkpoint, found: Found, grid: FolderGrid
) -> tuple[dict[str, FolderLayer], dict[str, str], dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]]]:
    """The quantized layers of a folder by the names of their weights outside, these by the names in memory, and what
    takes the float parts of stacked experts apart."""
    stacks = {path: module for path, module in model.named_modules() if is_fused(module)}
    shells = {path: copy.copy(module) for path, module in stacks.items()}
    for path, module in stacks.items():
        shells[path].__dict__["_parameters"] = dict(module._parameters)
    apart = unfuse_experts(model)
    names, tensors = names_of(model), stored_tensors(checkpoint)
    layers: dict[str, FolderLayer] = {}
    inside: dict[str, str] = {}
    for path, module in model.named_modules():
        if kind_of(module) is None:
            continue
        weight = f"{names.layer(path)}.weight"
        if weight in found:
            layers[weight] = layer_of(weight, found[weight], grid, checkpoint, tensors)
            inside[path] = weight
        parent = path.rpartition(".")[0].rpartition(".")[0]
        if parent in stacks and weight not in found:
            made = stacked_layer(shells[parent], parent, path, names, found, grid, checkpoint)
            if made is not None:
                layers[weight], inside[path] = made, weight
    known = {name for name in found if is_stack(name, stacks, names) or is_prediction(model, name)}
    if lost := sorted(set(found) - set(layers) - known):
        raise ModelError(f"{str(checkpoint.folder)!r}: the model has no layer for {lost[0]!r}")
    shares: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {}
    for path, module in stacks.items():
        if not any(name.startswith(f"{path}.") for name in inside):
            apart[module]()
            continue
        for own in shells[path]._parameters:
            if (outside := names.renamed(f"{path}.{own}")) not in found:
                shares[outside] = partial(taken_apart, shells[path], path, own, names)
    return layers, inside, shares


def taken_apart(
    shell: nn.Module, path: str, own: str, names: FileNames, value: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What every expert has of the float tensor ``own`` of a stack, by its name outside."""
    view = copy.copy(shell)
    view.__dict__["_parameters"] = {**shell._parameters, own: value}
    made: dict[str, torch.Tensor] = {}
    for number in range(count_of(shell)):
        for name, weight, bias in layers_of(view, number):
            outside, source = names.layer(f"{path}.{number}.{name}"), stacked_name(shell, f"{number}.{name}.weight")
            made |= {f"{outside}.weight": weight.contiguous()} if own == source else {}
            if bias is not None and own == f"{source}_bias":
                made[f"{outside}.bias"] = bias.contiguous()
    return made


def is_stack(name: str, stacks: Mapping[str, nn.Module], names: FileNames) -> bool:
    """Whether a coded tensor is one of stacked experts."""
    return any(
        name == names.renamed(f"{path}.{own}") for path in stacks for own in ("gate_up_proj", "up_proj", "down_proj")
    )


def layer_of(
    name: str, coded: Coded, grid: FolderGrid, checkpoint: Checkpoint, tensors: Mapping[str, StoredSource]
) -> FolderLayer:
    """A layer with tensors of its own."""
    grid_of = f"{str(checkpoint.folder)!r}: the grid of {name!r}"

    def read() -> Parts:
        return {role: tensors[stored].read(checkpoint.folder) for role, stored in coded.parts.items()}

    def values() -> Any:
        own = read()
        made = decoded(checkpoint.folder, name, coded, own)
        with decoding(grid_of):
            return made, *grid.parameters(name, own), grid.blocks(own)

    prefix = name.removesuffix("weight")
    given = {
        key: tensors[f"{prefix}{key}"].read(checkpoint.folder) for key in grid.inputs if f"{prefix}{key}" in tensors
    }
    with decoding(grid_of):
        config = grid.config(name, read)
        return FolderLayer(name, config, values, grid.activations(config, given))


def stacked_layer(
    shell: nn.Module, parent: str, path: str, names: FileNames, found: Found, grid: FolderGrid, checkpoint: Checkpoint
) -> FolderLayer | None:
    """A layer of one expert, whose values are a part of a stacked tensor; None where that is float."""
    own = path.removeprefix(f"{parent}.")
    source = names.renamed(f"{parent}.{stacked_name(shell, f'{own}.weight')}")
    if source not in found:
        return None
    coded, tensors = found[source], stored_tensors(checkpoint)
    config, steps = grid_of_expert(shell, own, source, grid)

    def values() -> Any:
        read = {role: tensors[stored].read(checkpoint.folder) for role, stored in coded.parts.items()}
        weight = of_expert(shell, own, decoded(checkpoint.folder, source, coded, read))
        return weight, *((None, None, None) if steps is None else told_by(config, of_expert(shell, own, steps(read))))

    return FolderLayer(f"{names.layer(path)}.weight", config, values, {})


def grid_of_expert(shell: nn.Module, own: str, source: str, grid: FolderGrid) -> tuple[QLayerConfig, Steps | None]:
    """How a layer of an expert is quantized, and what makes the scales of all elements of the stack that it is in."""
    if grid.stacks is None:
        return grid.config(source, dict), None
    stack = shell._parameters[stacked_name(shell, f"{own}.weight")]
    rows, columns = of_expert(shell, own, as_a(torch.Tensor, stack)).shape
    return grid.stacks(source, (rows, columns), fact(shell, "is_transposed"))


def of_expert(shell: nn.Module, own: str, stack: torch.Tensor) -> torch.Tensor:
    """What the layer ``own`` of one expert has of a stacked tensor, [out, in]."""
    number, name = own.split(".")
    view = copy.copy(shell)
    view.__dict__["_parameters"] = {**shell._parameters, stacked_name(shell, f"{own}.weight"): stack}
    return next(weight for key, weight, _ in layers_of(view, int(number)) if key == name).contiguous()


def told_by(config: QLayerConfig, steps: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
    """Scale, zero point and scales of blocks, as a layer has them, from the scale of each of its elements."""
    stage = config.stages("weight")[0]
    picked = steps[tuple(slice(None, None, length) for length in stage.spec.granularity.blocks(tuple(steps.shape)))]
    return (None, None, exponents_of(picked)) if stage.is_block else (picked, None, None)


def config_of(
    model: nn.Module, layers: Mapping[str, FolderLayer], inside: Mapping[str, str], caches: FolderCaches
) -> QConfig:
    """The configuration of a model with these layers: what most of them have, and what others have by name."""
    if not layers:
        raise ModelError("the folder has no quantized layer")
    kinds = Counter(repr(layer.config.to_dict()) for layer in layers.values())
    usual = kinds.most_common(1)[0][0]
    common = next(layer.config for layer in layers.values() if repr(layer.config.to_dict()) == usual)
    others = {
        path: layers[name].config for path, name in inside.items() if repr(layers[name].config.to_dict()) != usual
    }
    floats = [path for path, module in model.named_modules() if kind_of(module) is not None and path not in inside]
    return QConfig(common, layer_quant_config=others, exclude=floats, **caches.fields)


def convert(
    source: Path, target: Path, format: str, program: str | None = None, max_shard_size: int = SHARD_SIZE
) -> FileLoss | None:
    """Write the quantized model in ``source`` in another format, with the codes and scales that it has.

    Returns:
        What the file loses, as ``export_as`` says.

    Raises:
        ModelError: a folder without a quantized model that can be read.
        ConfigError: codes that cannot be carried over, or a format that cannot hold them.
    """
    check_name("format", format, FORMATS)
    return export_as(quantized_model(Path(source)), target, format, source, max_shard_size, program=program)
