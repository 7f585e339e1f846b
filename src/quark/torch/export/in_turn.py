"""Experts whose rows of gate and up take turns (gpt_oss), in the quark format as vLLM and AMD's exporter have them.

    <experts>.<n>.gate_up_proj.weight, .bias, .weight_scale    first rows of gate and up, then the second ones, ...
    <experts>.<n>.gate_up_proj.weight_scale, .input_scale      one for both, where scales have no axis
    <experts>.<n>.down_proj.*                                  as everywhere

In memory, and in files that are for nobody, gate and up are layers of their own. What is read here reads both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn

from quark.errors import ConfigError
from quark.numerics.granularity import Channel, Tensor
from quark.torch.config.model import QConfig
from quark.torch.experts import UnfusedExperts, count_of
from quark.torch.export.layout import Form, Stored
from quark.torch.export.original import FileNames
from quark.torch.export.shards import Item
from quark.torch.export.stacked_blocks import MODE, SOURCES, takes_turns
from quark.torch.matching import Candidate, choose_all, find_candidates
from quark.torch.stage import Stage

JOINED = "gate_up_proj"
FP8 = str(torch.float8_e4m3fn).removeprefix("torch.")
ATTENTION = (".self_attn.", ".attn.")  # of names, and in vLLM (GptOssForCausalLM.hf_to_vllm_mapper)
HEAD = "GptOssForCausalLM gives it no quant_config"
READS = "GptOssModel._load_weights_quark"
FLOATS = "--format compressed-tensors --exclude '*experts*' has float ones"
SLOTS = ("weight", "input_tensors")
#: Layers that are one in a file, by its name there: those of gate and of up, by theirs.
Pairs = Mapping[str, tuple[str, ...]]


def experts_in_turn(model: nn.Module) -> Iterator[tuple[str, UnfusedExperts]]:
    """(path, module) of such experts, taken apart."""
    for path, module in model.named_modules():
        if isinstance(module, UnfusedExperts) and takes_turns(module):
            yield path, module


def pairs_of(model: nn.Module, names: FileNames) -> Pairs:
    """The layers of a model, whose experts are taken apart, that are one in files for vLLM."""
    found = {}
    for path, module in experts_in_turn(model):
        for number in range(count_of(module)):
            halves = tuple(names.layer(f"{path}.{number}.{own}") for own in SOURCES[JOINED])
            found[f"{halves[0].rpartition('.')[0]}.{JOINED}"] = halves
    return found


def checked_pairs(model: nn.Module, config: QConfig, names: FileNames) -> Pairs:
    """``pairs_of`` a model that vLLM reads, or the error of ``check_in_turn``."""
    check_in_turn(model, config)
    return pairs_of(model, names)


def check_in_turn(model: nn.Module, config: QConfig) -> None:
    """Refuse what vLLM does not read of such experts in the quark format; it passes over it without a word.

    Args:
        model: quantized, or a copy without values whose experts are taken apart.
        config: that it is, or will be, quantized by.

    Raises:
        ConfigError: experts of another scheme, or of several, or a layer that vLLM takes for one of another scheme; the
            first layer is named.
    """
    paths = [path for path, module in model.named_modules() if takes_turns(module)]
    everything = list(find_candidates(model)) if paths else []
    for path in paths:
        layers = [one for one in everything if one.name.startswith(f"{path}.")]
        schemes = {one.name: chosen_stages(one, config) for one in layers} or {path: ((), ())}
        first = next(iter(schemes))
        for name, stages in schemes.items():
            if not is_read(stages[0]):
                what = " under ".join(stage.format.name for stage in stages[0]) or "float"
                raise ConfigError(
                    f"vLLM reads experts whose rows take turns in the quark format as MXFP4, or as FP8 with a scale "
                    f"per tensor or row ({READS}), and {name!r} would be {what}; {FLOATS}"
                )
            if stages != schemes[first]:
                raise ConfigError(
                    f"vLLM reads all experts of {path!r}, whose rows take turns, in one scheme ({READS}), and "
                    f"{name!r} has another one than {first!r}"
                )
    for layer in everything:
        check_name_there(layer, next((path for path in paths if layer.name.startswith(f"{path}.")), layer.name), config)


def check_name_there(layer: Candidate, name: str, config: QConfig) -> None:
    """Refuse a layer for which vLLM, that looks for ``name``, finds another scheme than it has."""
    stages, there = chosen_stages(layer, config), name.replace(*ATTENTION)
    if not any(stages):
        return
    if name == layer.name and there == name:
        raise ConfigError(
            f"{name!r} is quantized, which vLLM holds in float ({HEAD}); leave it out of the quantization"
        )
    layers = ((str(key).replace(*ATTENTION), own) for key, own in config.layer_quant_config.items())
    hits = (own for key, own in layers if (fnmatchcase(there, key) if "*" in key else there in key))
    found = next(hits, config.global_quant_config)
    if tuple(tuple(found.stages(slot)) for slot in SLOTS) != stages:
        raise ConfigError(
            f"vLLM looks for the scheme of {layer.name!r} by the name {there!r}, and finds another one "
            f"(QuarkConfig._find_matched_config); patterns such as '*experts*' and '*q_proj' fit names here and there"
        )


def chosen_stages(layer: Candidate, config: QConfig) -> tuple[tuple[Stage, ...], ...]:
    """How the weight and the inputs of a layer are quantized."""
    chosen = choose_all(layer, config)[0]
    return tuple(tuple(chosen.stages(slot)) if chosen is not None else () for slot in SLOTS)


def is_read(stages: tuple[Stage, ...]) -> bool:
    """Whether vLLM reads such weights."""
    if len(stages) != 1:
        return False
    (stage,) = stages
    if stage.is_block:
        return stage.format.name.removesuffix("_even") == MODE
    return getattr(stage.spec.row, "torch_dtype", None) == FP8 and isinstance(stage.spec.granularity, Tensor | Channel)


def joined(items: Iterable[Item], pairs: Pairs) -> list[Item]:
    """Items, under their names outside, with gate and up of ``pairs`` in one.

    Raises:
        ConfigError: gate and up that are stored unlike.
    """
    items = list(items)
    own = {next(iter(item.form)): item for item in items}
    ends = {halves[0]: (whole, halves[1]) for whole, halves in pairs.items()}
    made, taken = [], set()
    for name, item in own.items():
        layer, _, end = name.rpartition(".")
        if layer in ends:
            whole, up = ends[layer]
            other = own.get(f"{up}.{end}")
            if other is None or [*other.form.values()] != [*item.form.values()]:
                raise ConfigError(f"{layer!r} and {up!r} are not stored alike, and vLLM reads them as one ({READS})")
            taken.add(f"{up}.{end}")
            made.append(joined_item(whole, item, other))
        else:
            made.append(item)
    return [item for item in made if next(iter(item.form)) not in taken]


def joined_item(whole: str, gate: Item, up: Item) -> Item:
    """The tensors of two layers as those of the layer ``whole``."""
    form: Form = {}
    for name, (shape, dtype) in gate.form.items():
        form[f"{whole}.{name.rpartition('.')[2]}"] = (shape if prod(shape) == 1 else (2 * shape[0], *shape[1:])), dtype

    def make() -> Stored:
        parts = gate.make(), up.make()
        pairs = zip(*([one[name].detach() for name in item.form] for one, item in zip(parts, (gate, up), strict=True)),
                    strict=True)  # fmt: skip
        return {name: in_turn(name, *pair) for name, pair in zip(form, pairs, strict=True)}

    return Item(form, make)


def in_turn(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of two tensors, one of each in turn; of two scales without an axis, which are equal, one.

    Raises:
        ConfigError: they are not.
    """
    if gate.numel() > 1:
        rows = torch.stack((bytes_of(gate), bytes_of(up)), 1).flatten(0, 1)
        return rows.view(gate.dtype)
    if not torch.equal(gate.cpu(), up.cpu()):
        raise ConfigError(
            f"{name!r} would be {float(gate):.6g} for the rows of gate and {float(up):.6g} for those of up, and vLLM "
            f"reads one ({READS}); --for vllm, or shared_scale_groups in the configuration, makes them one"
        )
    return gate


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor that torch can move: of types of eight bits its bytes."""
    return value.contiguous().view(torch.uint8) if value.dtype.itemsize == 1 else value


def halves_in(names: Iterable[str], pairs: Pairs) -> dict[str, tuple[str, int]]:
    """Of the tensors in files that are joined: the name there, and the first row, by the names of gate and up."""
    found: dict[str, tuple[str, int]] = {}
    for name in names:
        layer, _, end = name.rpartition(".")
        found |= {f"{half}.{end}": (name, start) for start, half in enumerate(pairs.get(layer, ()))}
    return found


def half_of(value: torch.Tensor, start: int) -> torch.Tensor:
    """The rows of gate (0) or up (1) of a joined tensor; a scale without an axis is that of both."""
    return value if value.numel() == 1 else bytes_of(value)[start::2].contiguous().view(value.dtype)


def taken_apart(tensors: Iterable[tuple[str, torch.Tensor]], pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of files by name, with those that are joined as gate and up."""
    for name, value in tensors:
        halves = halves_in([name], pairs)
        if not halves:
            yield name, value
        yield from ((half, half_of(value, start)) for half, (_, start) in halves.items())


def is_joined(names: Iterable[str]) -> bool:
    """Whether files hold experts, one by one, whose gate and up are one tensor."""
    parts = (name.split(".") for name in names)
    return any(len(one) > 3 and one[-2] == JOINED and one[-3].isdigit() and one[-4] == "experts" for one in parts)
