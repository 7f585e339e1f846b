"""Experts as gpt_oss was published: ``custom_mode="mxfp4"``, which vLLM, transformers and llama.cpp's converter read.

    <experts>.gate_up_proj_blocks   uint8 [experts, 2 i, h / 32, 16]   two FP4 codes a byte, the low nibble first
    <experts>.gate_up_proj_scales   uint8 [experts, 2 i, h / 32]       exponents of two, 127 above
    <experts>.gate_up_proj_bias     [experts, 2 i]                     rows of gate and up take turns
    <experts>.down_proj_...         the same of [experts, h, i]

Nothing else is quantized: the readers have no other layer in this format. Codes and scales are those of our own format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from quark.errors import ConfigError
from quark.torch.config.model import SLOTS, QConfig
from quark.torch.experts import UnfusedExperts, fact, is_fused
from quark.torch.export.decoded import Foreign, Parts, Windows, fp4_values, powers_of_two, rows_cut
from quark.torch.export.layout import Form, Stored
from quark.torch.export.original import FileNames
from quark.torch.export.shards import Item
from quark.torch.matching import choose_all, find_candidates

MODE = "mxfp4"
SIZE = 32  # elements of a block
SOURCES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
OWN = ("weight", "weight_scale", "bias")
REMEDY = "--exclude '*self_attn*' leaves attention in float"


def stacked_config(config: QConfig, excluded: Iterable[str]) -> dict[str, Any]:
    """What such a checkpoint says about itself.

    Args:
        config: of the model; all layers are alike.
        excluded: names of linear layers that stay float.

    Raises:
        ConfigError: weights of another format, or more than weights.
    """
    layer = config.global_quant_config
    stages = layer.stages("weight")
    others = [slot for slot in SLOTS if slot != "weight" and getattr(layer, slot) is not None]
    fits = len(stages) == 1 and stages[0].format.name.removesuffix("_even") == MODE
    if not fits or others or config.kv_cache_quant_config:
        found = " + ".join(stage.format.name for stage in stages) or "float"
        more = ", ".join([*others, *(["caches"] if config.kv_cache_quant_config else [])])
        raise ConfigError(
            f"custom_mode {MODE!r} does not fit this configuration: the weight is {found}"
            f"{f', and {more} quantized' if more else ''}; it has MXFP4 weights alone (--scheme mxfp4_weight_only)"
        )
    return {"quant_method": MODE, "modules_to_not_convert": list(excluded)}


def check_stacks(model: nn.Module, config: QConfig) -> None:
    """Refuse, before any work, layers that the format does not have.

    Args:
        model: float, or a skeleton.
        config: how it will be quantized.

    Raises:
        ConfigError: a quantized layer that is not an expert, or experts of another layout; it is named.
    """
    stacked_config(config, ())
    for path, module in model.named_modules():
        if (is_fused(module) or isinstance(module, UnfusedExperts)) and not takes_turns(module):
            refuse(f"gate and up of {path!r} do not take turns row by row, as those of gpt_oss do")
    stacks = tuple(f"{path}." for path, module in model.named_modules() if is_fused(module) or takes_turns(module))
    for layer in find_candidates(model):
        if not layer.name.startswith(stacks or "\0") and choose_all(layer, config)[0] is not None:
            refuse(f"{layer.name!r} is quantized, and only experts can be; {REMEDY}")


def takes_turns(module: nn.Module) -> bool:
    """Whether a module holds experts in the layout of gpt_oss, stacked or taken apart."""
    if not (is_fused(module) or isinstance(module, UnfusedExperts)):
        return False
    return fact(module, "has_gate") and fact(module, "has_bias") and not fact(module, "is_concatenated")


def refuse(sentence: str) -> NoReturn:
    """Raise ``ConfigError``."""
    raise ConfigError(f"the format MXFP4 of gpt_oss does not fit this model: {sentence}")


def stacked_items(model: nn.Module, items: Iterable[Item], coded: Iterable[str]) -> list[Item]:
    """Items with those of experts joined to the stacks that the format has.

    Args:
        model: quantized.
        items: tensors as ``quark`` stores them.
        coded: names of the weights that are codes.

    Raises:
        ConfigError: as ``check_stacks``; experts of which only some are quantized.
    """
    items = list(items)
    by_name = {name: item for item in items for name in item.form}
    made: list[Item] = []
    taken: set[str] = set()
    for path, module in stacks_of(model):
        for target, sources in SOURCES.items():
            experts = range(int(module.num_experts))
            layers = [[f"{path}.{number}.{source}" for source in sources] for number in experts]
            wanted = [f"{layer}.{end}" for group in layers for layer in group for end in OWN]
            if missing := [name for name in wanted if name not in by_name]:
                refuse(f"{missing[0]!r} is not there, and all experts of a stack are stored alike")
            made += [coded_stack(f"{path}.{target}", layers, by_name), bias_stack(f"{path}.{target}", layers, by_name)]
            taken |= set(wanted)
    if left := set(coded) - taken:
        refuse(f"{min(left).removesuffix('.weight')!r} is quantized, and only experts can be; {REMEDY}")
    return [item for item in items if not taken & set(item.form)] + made


def stacks_of(model: nn.Module) -> Iterator[tuple[str, UnfusedExperts]]:
    """(name, module) of the experts that are quantized."""
    for path, module in model.named_modules():
        if isinstance(module, UnfusedExperts):
            if not takes_turns(module):
                refuse(f"gate and up of {path!r} do not take turns row by row, as those of gpt_oss do")
            yield path, module


def coded_stack(name: str, layers: list[list[str]], items: Mapping[str, Item]) -> Item:
    """Codes and scales of one stack, of the layers of each expert, whose rows take turns."""
    (size, half), _ = items[f"{layers[0][0]}.weight"].form[f"{layers[0][0]}.weight"]
    rows, groups = size * len(layers[0]), half * 2 // SIZE
    shapes = {"blocks": (rows, groups, SIZE // 2), "scales": (rows, groups)}
    form: Form = {f"{name}_{role}": ((len(layers), *shape), torch.uint8) for role, shape in shapes.items()}

    def make() -> Stored:
        found = {role: torch.empty((len(layers), *shape), dtype=torch.uint8) for role, shape in shapes.items()}
        for number, group in enumerate(layers):
            stored = [(layer, items[f"{layer}.weight"].make()) for layer in group]
            for role, end in (("blocks", "weight"), ("scales", "weight_scale")):
                turns = [own[f"{layer}.{end}"].detach().cpu().contiguous().view(torch.uint8) for layer, own in stored]
                found[role][number] = torch.stack(turns, 1).reshape(shapes[role])
        return {f"{name}_{role}": value for role, value in found.items()}

    return Item(form, make)


def bias_stack(name: str, layers: list[list[str]], items: Mapping[str, Item]) -> Item:
    """The biases of one stack."""
    (rows,), dtype = items[f"{layers[0][0]}.bias"].form[f"{layers[0][0]}.bias"]

    def make() -> Stored:
        biases = [[items[f"{layer}.bias"].make()[f"{layer}.bias"].detach() for layer in group] for group in layers]
        return {f"{name}_bias": torch.stack([torch.stack(group, 1).reshape(-1) for group in biases])}

    return Item({f"{name}_bias": ((len(layers), rows * len(layers[0])), dtype)}, make)


def stacked_foreign(model: nn.Module, names: FileNames) -> dict[str, Foreign]:
    """How the weight of each expert is read back, by its name in memory."""
    found = {}
    for path, module in stacks_of(model):
        for target, sources in SOURCES.items():
            places = {role: names.renamed(f"{path}.{target}_{role}") for role in ("blocks", "scales")}
            for turn, source in enumerate(sources):
                cut = partial(turn_cut, slice(turn, None, len(sources)))
                for number in range(int(module.num_experts)):
                    found[f"{path}.{number}.{source}"] = Foreign(places, block_values, cut, index=number)
    return found


def turn_cut(rows: slice, parts: Parts, windows: Windows) -> Parts:
    """Of tensors whose rows take turns, some rows of one source."""
    return rows_cut({role: value[rows] for role, value in parts.items()}, windows)


def block_values(parts: Parts) -> torch.Tensor:
    """FP4 codes [.., rows, groups, 16], low nibbles first, under exponents, as values [.., rows, columns]."""
    return (fp4_values(parts["blocks"]) * powers_of_two(parts["scales"])[..., None]).flatten(-2)
