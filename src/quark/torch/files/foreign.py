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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.config.file_formats import FORMATS, check_caches, check_formats, works
from quark.dataclass import dataclass
from quark.errors import ModelError, as_a, check_name
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.schemes import cache_like, names_like
from quark.torch.experts import count_of, fact, is_fused, layers_of, stacked_name, unfuse_experts
from quark.torch.export.before_work import check_before_work
from quark.torch.export.checkpoint import SUFFIX, Checkpoint, method_of, read_checkpoint
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.declared import check_written, not_coded, refuse_method
from quark.torch.export.gguf_tensors import FileLoss
from quark.torch.export.huggingface import config_of as written_as
from quark.torch.export.left_out import GIVEN, is_prediction
from quark.torch.export.model_files import float_dtype, take_settings
from quark.torch.export.original import FileNames, names_of
from quark.torch.export.places import load
from quark.torch.export.reader_scales import is_before_rope
from quark.torch.export.readers import skeleton_of
from quark.torch.export.reload import Scheme, check_float, map_model, own_model
from quark.torch.export.shards import SHARD_SIZE, Item
from quark.torch.export.skeleton import mark_loaded
from quark.torch.export.state import renamed
from quark.torch.export.write_as import export_as
from quark.torch.fake_quantize import make_quantizer
from quark.torch.files.carried import codes_under
from quark.torch.files.coded import decoding
from quark.torch.files.folder_caches import FolderCaches, caches_in
from quark.torch.files.fp8 import exponents_of
from quark.torch.files.grids import FolderGrid, Steps, Uncarried, refuse
from quark.torch.files.methods import GRIDS, CodedFolder, found_in
from quark.torch.files.prequantized import LEFT, coded_in, coded_item, plain_item
from quark.torch.files.skeleton import architecture_of
from quark.torch.layers import kind_of
from quark.torch.patterns import Usual

OWN = ("quark",)  # methods that the import reads as they are


@dataclass(frozen=True)
class Translated(Checkpoint):
    """A checkpoint whose quantized layers have our own tensors.

    Attributes:
        source: the folder.
        layers: what is quantized in it.
        caches: tensors of the cache.
    """

    source: CodedFolder = None  # type: ignore[assignment]
    layers: FolderLayers = None  # type: ignore[assignment]
    caches: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every tensor."""
        for name, stored in self.source.tensors.items():
            if name in self.layers.stacks:
                yield from self.layers.stacks[name](stored.read(self.folder)).items()
            elif name not in self.source.taken and not LEFT.search(name):
                yield name, stored.read(self.folder)
        for layer in self.layers.layers.values():
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


@dataclass(frozen=True)
class FolderLayers:
    """The quantized layers of a folder.

    Attributes:
        layers: by the names of their weights outside.
        inside: these, by the names of the layers in memory.
        stacks: what takes the float parts of stacked experts apart, by their names outside.
    """

    layers: dict[str, FolderLayer] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    stacks: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = field(default_factory=dict)


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
    source = coded_folder(folder)
    checkpoint = source.checkpoint
    model = empty_model(checkpoint) if given is None else check_float(given)
    found = layers_of_model(model, source)
    caches = caches_in(model, checkpoint)
    own = (checkpoint.folder, checkpoint.config, checkpoint.files, None)
    map_model(model, Scheme(config_of(model, found, caches), JsonExporterConfig(), "quark"))
    load(model, Translated(*own, source, found, caches.tensors))
    if given is None:
        library: Any = model
        library.config._name_or_path = str(folder)
        take_settings(model, folder)
    model.__dict__[GIVEN] = prediction_items(model, source)
    return mark_loaded(model).eval()


def prediction_items(model: nn.Module, source: CodedFolder) -> list[Item]:
    """The heads for multi-token prediction of a folder; those that are coded are decoded, in the model's type."""
    items = [coded_item(source, name, float_dtype(model)) for name in source.found if is_prediction(model, name)]
    others = (name for name in source.tensors if is_prediction(model, name) and name not in source.taken)
    return items + [plain_item(source.folder, name, source.tensors[name]) for name in others if not LEFT.search(name)]


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
        model = empty_model(checkpoint)
        load(
            model, DecodedCheckpoint(checkpoint.folder, checkpoint.config, checkpoint.files, None, found_in(checkpoint))
        )
        take_settings(model, folder)
        return model.eval()


@dataclass(frozen=True)
class DecodedCheckpoint(Checkpoint):
    """A checkpoint whose quantized tensors are decoded as they are read."""

    source: CodedFolder = None  # type: ignore[assignment]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every tensor."""
        for name, stored in self.source.tensors.items():
            if name not in self.source.taken and not LEFT.search(name):
                yield name, stored.read(self.folder)
        yield from ((name, self.source.values(name)) for name in self.source.found)


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
    untie_stored(model, checkpoint.names)
    return model


def untie_stored(model: nn.Module, stored: Collection[str]) -> None:
    """A weight that the files have beside the one that it is tied to has its own values, as transformers reads it,
    whatever the configuration says."""
    names, ties = names_of(model), getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(ties.items()):
        if {names.outside(target), names.outside(source)} <= set(stored):
            owner, _, own = target.rpartition(".")
            module = model.get_submodule(owner)
            shared = as_a(nn.Parameter, module._parameters[own])
            module._parameters[own] = nn.Parameter(torch.empty_like(shared), requires_grad=False)
            del ties[target]


def coded_folder(folder: Path) -> CodedFolder:
    """A folder whose codes can be carried over.

    Raises:
        ConfigError, ModelError: as ``quantized_model``.
    """
    method = method_of(folder)
    if not any(folder.glob(f"*{SUFFIX}")):
        check_written(folder)
    if method not in GRIDS:
        if method is not None:
            refuse_method(folder / "config.json", method, ["quark", *GRIDS])
        raise Uncarried(not_coded(folder))
    return coded_in(read_checkpoint(folder))


def layers_of_model(model: nn.Module, source: CodedFolder) -> FolderLayers:
    """The quantized layers of a folder, whose stacked experts are taken apart in ``model``.

    Raises:
        ModelError: a coded weight that the model has no layer for.
    """
    stacks = {path: module for path, module in model.named_modules() if is_fused(module)}
    shells = {path: copy.copy(module) for path, module in stacks.items()}
    for path, module in stacks.items():
        shells[path].__dict__["_parameters"] = dict(module._parameters)
    apart = unfuse_experts(model)
    names, made = names_of(model), FolderLayers()
    for path, module in model.named_modules():
        if kind_of(module) is None:
            continue
        weight, parent = f"{names.layer(path)}.weight", path.rpartition(".")[0].rpartition(".")[0]
        layer: FolderLayer | None = None
        if weight in source.found:
            layer = layer_of(weight, source)
        elif parent in stacks:
            own = path.removeprefix(f"{parent}.")
            stack = names.renamed(f"{parent}.{stacked_name(shells[parent], f'{own}.weight')}")
            layer = stacked_layer(weight, shells[parent], own, stack, source) if stack in source.found else None
        if layer is not None:
            made.layers[weight], made.inside[path] = layer, weight
    known = {name for name in source.found if is_stack(name, stacks, names) or is_prediction(model, name)}
    if lost := sorted(set(source.found) - set(made.layers) - known):
        raise ModelError(f"{str(source.folder)!r}: the model has no layer for {lost[0]!r}")
    for path, module in stacks.items():
        if not any(name.startswith(f"{path}.") for name in made.inside):
            apart[module]()
            continue
        for own in shells[path]._parameters:
            if (outside := names.renamed(f"{path}.{own}")) not in source.found:
                made.stacks[outside] = partial(taken_apart, shells[path], path, own, names)
    return made


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


def layer_of(name: str, source: CodedFolder) -> FolderLayer:
    """A layer with tensors of its own."""
    grid, grid_of = source.grid, f"{str(source.folder)!r}: the grid of {name!r}"

    def values() -> Any:
        own = source.parts(name)
        made = source.values(name, own)
        with decoding(grid_of):
            return made, *grid.parameters(name, own), grid.blocks(own)

    stored = {key: source.tensors.get(f"{name.removesuffix('weight')}{key}") for key in grid.inputs}
    given = {key: tensor.read(source.folder) for key, tensor in stored.items() if tensor is not None}
    with decoding(grid_of):
        config = grid.config(name, lambda: source.parts(name))
        return FolderLayer(name, config, values, grid.activations(config, given))


def stacked_layer(name: str, shell: nn.Module, own: str, stack: str, source: CodedFolder) -> FolderLayer:
    """A layer of one expert, whose values are a part of a stacked tensor."""
    config, steps = grid_of_expert(shell, own, stack, source.grid)

    def values() -> Any:
        read = source.parts(stack)
        weight = of_expert(shell, own, source.values(stack, read))
        return weight, *((None, None, None) if steps is None else told_by(config, of_expert(shell, own, steps(read))))

    return FolderLayer(name, config, values, {})


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


def config_of(model: nn.Module, found: FolderLayers, caches: FolderCaches) -> QConfig:
    """The configuration of a model with these layers: what most of them have, and what others have by name."""
    if not found.layers:
        raise ModelError("the folder has no quantized layer")
    kinds = {name: repr(layer.config.to_dict()) for name, layer in found.layers.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    common = next(found.layers[name].config for name, kind in kinds.items() if kind == usual)
    others = {path: found.layers[name].config for path, name in found.inside.items() if kinds[name] != usual}
    modules = (path for path, module in model.named_modules() if kind_of(module) is not None)
    floats = [path for path in modules if path not in found.inside]
    floats += [f"{path}.*" for path, module in model.named_modules() if is_fused(module)]
    return QConfig(common, layer_quant_config=others, exclude=floats, **caches.fields)


def convert(
    source: Path, target: Path, format: str, program: str | None = None, max_shard_size: int = SHARD_SIZE
) -> FileLoss | None:
    """Write the quantized model in ``source`` in another format, with the codes and scales that it has.

    Returns:
        What the file loses, as ``export_as`` says.

    Raises:
        ModelError: a folder without a quantized model that can be read.
        ConfigError: codes that cannot be carried over, or a format that cannot hold them, or in which the program does
            not read them.
    """
    check_name("format", format, FORMATS)
    return move(quantized_model(Path(source)), source, target, format, program, max_shard_size)


def move(
    model: nn.Module, source: Path, target: Path, format: str, program: str | None, max_shard_size: int = SHARD_SIZE
) -> FileLoss | None:
    """As ``convert``, of the model that is in ``source``."""
    config = written_as(model)
    check_asked(model, config, source, format, program)
    turned = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    if turned and is_before_rope(config, format, program):
        raise Uncarried(
            f"keys of the cache were quantized before the rotary embedding, and what reads {format!r} quantizes them "
            f"behind it; `quark torch convert --requantize SCHEME` keeps codes of weights and leaves the cache float, "
            f"and `quark torch quantize --kv-cache` with this --format and --for finds its scales anew"
        )
    return export_as(model, target, format, source, max_shard_size, program=program)


def check_asked(model: nn.Module, config: QConfig, source: Path, format: str, program: str | None) -> None:
    """Refuse what would be refused if the model were quantized so: by the table of formats, and by the layers.

    Raises:
        ConfigError, ModelError: as ``check_before_work``.
    """
    check_program(config, format, program)
    check_caches(cache_like(config), format, program)
    bare = skeleton_of(model, source)
    if bare is not None:
        check_before_work(bare, as_it_is(config), format, program, source)


def as_it_is(config: QConfig) -> QConfig:
    """The configuration of codes that are there: scales are found, and patterns that fit no layer are no mistake."""
    layers: dict[str, QLayerConfig] = {Usual(name): one for name, one in config.layer_quant_config.items()}
    return replace(config, layer_quant_config=layers, exclude=[*map(Usual, config.exclude)], shared_scale_groups=[])


def check_program(config: QConfig, format: str, program: str | None) -> None:
    """Refuse a layer that a format has not, or that a program does not read there; of layers that are no scheme of ours
    nobody knows.

    Raises:
        ConfigError: as ``check_formats``.
    """
    for one in (config.global_quant_config, *config.layer_quant_config.values()):
        names = [] if one is None else names_like(one)
        if names and not any(works(name, format, program) for name in names):
            check_formats(names[-1:], format, program)
