"""How the layers of a decoder-only model hang together, found from the model itself: no table of architectures.

    norm → linears      y = n(x) (offset + weight) is read by linear layers and by nothing else, so that
                        weight / s and linear columns * s compute the same
    linear → linear     channel j of the input of one is a multiple of channel c(j) of the output of the other (value
                        projection → attention → output projection; up projection → gate → down projection), so that
                        rows / s and columns * s compute the same

Candidates come from one forward (a linear layer whose input rows are rows of a norm's output), and each is then proved
by an experiment: the outputs of the one are scaled by powers of two, the inputs of the other are scaled back, and the
block must answer exactly what it answered before. The channels of a pair are read from the ratios of scaled to plain
inputs. For projections that make query, key and value in one matrix the ratios are taken with a single token, where
attention hands the value on whatever query and key are.

Experiments run on a short window of the sample. Of blocks that are built alike one is searched; what was found there is
proved on each of the others in one experiment, and a block where that fails is searched as well.

Not handled: norms without a weight; linear layers hidden in functions (fused experts): what feeds them is in no group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.algorithms.blocks import Blocks, Stream, find_blocks, record
from quark.torch.algorithms.context import BlockStore
from quark.torch.calibration import device_of, evaluating, run
from quark.torch.layers import kind_of, own_parameter
from quark.torch.outputs import tensors_of
from quark.torch.probe import Trace, all_equal, edited, equal, keep, magnitude, powers, swapped, trace
from quark.torch.short_sample import cut, example, token_ids, window

LEVELS = 8  # different powers of two in one experiment
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class NormGroup:
    """A norm and the layers that read its output.

    Attributes:
        norm: name of the module; it has a one-dimensional ``weight``, and perhaps a ``bias``.
        linears: names of the linear layers, in the order in which they are called.
        offset: what is added to the weight before it is multiplied (1 for Gemma).
        block: name of the decoder block, or empty outside of them.
        others: names of other modules that multiply the output by their ``weight`` [.., features] (routers).
    """

    norm: str
    linears: tuple[str, ...]
    offset: float = 0.0
    block: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerPair:
    """Two linear layers, the second of which reads what the first wrote, channel by channel.

    Attributes:
        source, target: their names.
        channels: for each input channel of the target, the output channel of the source.
        block: name of the decoder block.
    """

    source: str
    target: str
    channels: torch.Tensor = field(repr=False)
    block: str = ""


@dataclass(frozen=True)
class Structure:
    """What was found.

    Attributes:
        blocks: path of the list of decoder blocks; empty if there is none.
        names: of the blocks.
        groups: norms and what reads them; those outside of blocks last.
        pairs: linear layers in a row.
    """

    blocks: str
    names: tuple[str, ...]
    groups: tuple[NormGroup, ...]
    pairs: tuple[LayerPair, ...]


@dataclass(frozen=True)
class Segment:
    """A part of a model that can be run.

    Attributes:
        prefix: of the names of its modules; empty: the model.
        module: the part.
        forward: runs it on the sample and returns its answers: all of them, since none may change.
        single: the same with one token, or None.
    """

    prefix: str
    module: nn.Module
    forward: Callable[[], list[torch.Tensor]]
    single: Callable[[], list[torch.Tensor]] | None


def find_structure(model: nn.Module, sample: Any = None, path: str = "", store: BlockStore | None = None) -> Structure:
    """The structure of ``model``, which is not changed.

    Args:
        model: a float model.
        sample: an input; None makes one of token numbers.
        path: where the decoder blocks are; empty: found.
        store: of the blocks.

    Raises:
        DataError: no sample, and none can be made.
    """
    store = store or BlockStore()
    sample = example(model) if sample is None else window(sample)
    with evaluating(model):
        with store.recording():
            blocks, stream = record(model, find_blocks(model, path), [sample])
        inside = {module for block in blocks.modules.values() for module in block.modules()} if blocks.path else set()
        groups: list[NormGroup] = []
        pairs: list[LayerPair] = []
        if blocks.path:
            with store.recording():
                single = single_token(model, blocks, sample)
            known: dict[Hashable, tuple[str, list[NormGroup], list[LayerPair]]] = {}
            for segment in segments(blocks, stream, single, store):
                found = found_in(segment, known)
                groups += found[0]
                pairs += found[1]
        whole = Segment("", model, lambda: tensors_of(run_model(model, sample)), None)
        with store.recording():
            groups += groups_of(whole, inside)
        if not blocks.path:
            pairs += pairs_of(whole, {name for group in groups for name in group.linears})
    names = tuple(blocks.modules) if blocks.path else ()
    return Structure(blocks.path, names, tuple(groups), tuple(pairs))


def found_in(
    segment: Segment, known: dict[Hashable, tuple[str, list[NormGroup], list[LayerPair]]]
) -> tuple[list[NormGroup], list[LayerPair]]:
    """Groups and pairs of a block: those of one that is built alike, where they hold here, else searched.

    Args:
        segment: the block.
        known: by how it is built: name, groups and pairs of the block that was searched last.
    """
    build = built(segment.module)
    if build in known:
        here = alike(segment.prefix, *known[build])
        if holds(segment, *here):
            return here
    groups = groups_of(segment, set())
    pairs = pairs_of(segment, {name for group in groups for name in group.linears})
    known[build] = segment.prefix, groups, pairs
    return groups, pairs


def segments(blocks: Blocks, stream: Stream, single: Stream | None, store: BlockStore) -> Iterator[Segment]:
    """The blocks, each on what the float model hands it."""
    for name, block in blocks.modules.items():
        with store.visiting(name):
            forward = runner(name, block, stream)
            yield Segment(name, block, forward, None if single is None else runner(name, block, single))
            stream = stream.advance(name, block)
            single = None if single is None else single.advance(name, block)


def runner(name: str, block: nn.Module, stream: Stream) -> Callable[[], list[torch.Tensor]]:
    """A function that runs a block on a stream."""
    return lambda: tensors_of(stream.forward(name, block, 0))


def run_model(model: nn.Module, sample: Any) -> Any:
    """The model on one sample."""
    answers: list[Any] = []
    with model.register_forward_hook(lambda module, args, output: answers.append(output)):
        run(model, sample[""] if isinstance(sample, Mapping) and "" in sample else sample)
    return answers[0]


def single_token(model: nn.Module, blocks: Blocks, sample: Any) -> Stream | None:
    """The stream of the first token of a sample, or None where a sample cannot be cut."""
    ids = token_ids(sample)
    if ids is None:
        return None
    short = cut(sample, ids, (slice(1), slice(1)))
    short = short[""] if isinstance(short, dict) and "" in short else short
    found, stream = record(model, blocks, [short])
    return stream if found.path else None


# ---- blocks that are built alike -------------------------------------------------------------------------------------


def built(block: nn.Module) -> Hashable:
    """How a block is built: its modules with their classes, and the shapes and types of their values."""
    return tuple(
        (
            name,
            type(module),
            *((key, value.shape, value.dtype) for key, value in module.named_parameters(recurse=False)),
        )
        for name, module in block.named_modules()
    )


def alike(
    block: str, other: str, groups: list[NormGroup], pairs: list[LayerPair]
) -> tuple[list[NormGroup], list[LayerPair]]:
    """Groups and pairs of the block ``other`` under the names that they have in ``block``."""

    def here(name: str) -> str:
        return block + name.removeprefix(other)

    def every(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(here, names))

    return (
        [replace(g, norm=here(g.norm), linears=every(g.linears), others=every(g.others), block=block) for g in groups],
        [replace(pair, source=here(pair.source), target=here(pair.target), block=block) for pair in pairs],
    )


def holds(segment: Segment, groups: list[NormGroup], pairs: list[LayerPair]) -> bool:
    """Whether these are groups and pairs of a block: all are scaled at once, and every layer that can be quantized has
    to read what it read before, and the block to answer what it answered."""
    modules = dict(segment.module.named_modules())
    local = {full(segment, name): name for name in modules}
    layers = {name: module for name, module in modules.items() if reads_features(module)}
    seen = trace({**layers, **{local[group.norm]: modules[local[group.norm]] for group in groups}}, segment.forward)
    if not all(local[group.norm] in seen.outputs for group in groups):
        return False
    rows, columns = {}, dict.fromkeys(seen.inputs, torch.ones((), device=device_of(segment.module)))
    for number, group in enumerate(groups):
        y = seen.outputs[local[group.norm]]
        rows[local[group.norm]] = r = powers(y.shape[-1], number, y.device).to(y.dtype)
        columns |= {local[name]: r for name in (*group.linears, *group.others)}
    for number, pair in enumerate(pairs, len(groups)):
        if (made := seen.outputs.get(local[pair.source])) is not None:  # an expert may have had no token
            channels = pair.channels.to(made.device)
            used = torch.zeros(made.shape[-1], dtype=torch.bool, device=made.device).index_fill_(0, channels, True)
            scales = powers(len(used), number, made.device).to(made.dtype)
            rows[local[pair.source]] = r = torch.where(used, scales, 1.0)
            columns[local[pair.target]] = r[channels]
    kept: dict[str, torch.Tensor] = {}

    def back(x: torch.Tensor, name: str, s: torch.Tensor) -> torch.Tensor:
        kept[name] = x / s.to(x.dtype)
        return kept[name]

    readers = {name: partial(back, name=name, s=s) for name, s in columns.items()}
    writers = {name: partial(torch.mul, r) for name, r in rows.items()}
    with edited(modules, readers, writers):
        same = all_equal(segment.forward(), seen.output)
    return same and all(name in kept and equal(kept[name], x) for name, x in seen.inputs.items() if name in layers)


# ---- norms -----------------------------------------------------------------------------------------------------------


def groups_of(segment: Segment, inside: set[nn.Module]) -> list[NormGroup]:
    """The norms of a segment that are in no block (``inside`` holds what is) and the linear layers that they feed."""
    modules = {name: module for name, module in segment.module.named_modules() if name and module not in inside}
    readers = {name: module for name, module in modules.items() if reads_features(module)}
    norms = {name: module for name, module in modules.items() if is_norm(module)}
    seen = trace({**norms, **readers}, segment.forward)
    found = []
    for name in (name for name in seen.order if name in norms):
        fed = [other for other in seen.order if other in readers and fed_by(seen.inputs[other], seen.outputs[name])]
        linears = tuple(other for other in fed if is_linear(modules[other]))
        if linears and proved_group(segment, modules, seen, name, fed):
            others = tuple(full(segment, other) for other in fed if other not in linears)
            names = tuple(full(segment, other) for other in (*linears, *idle_siblings(segment, modules, seen, linears)))
            offset = offset_of(modules[name], seen.inputs[name])
            found.append(NormGroup(full(segment, name), names, offset, segment.prefix, others))
    return found


def idle_siblings(segment: Segment, modules: dict[str, nn.Module], seen: Trace, linears: tuple[str, ...]) -> list[str]:
    """The layers of experts that no token of the sample reached, by those that were: same names but for the number."""
    forms = {numberless(name) for name in linears if NUMBER.search(name)} if segment.prefix else set()
    idle = (name for name, module in modules.items() if name not in seen.called and is_linear(module))
    return [name for name in idle if NUMBER.search(name) and numberless(name) in forms]


def full(segment: Segment, name: str) -> str:
    """The name of a module in the model."""
    return f"{segment.prefix}.{name}" if segment.prefix else name


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies features by a matrix that can be quantized."""
    kind = kind_of(module)
    return kind is not None and kind.tokens


def is_norm(module: nn.Module) -> bool:
    """Whether a module has a one-dimensional weight, and no other parameters than that and a bias of its shape."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    return weight is not None and weight.dim() == 1 and all(value.shape == weight.shape for value in own.values())


def reads_features(module: nn.Module) -> bool:
    """Whether a module may multiply features by its own weight: a linear layer, or a router."""
    weight = module._parameters.get("weight")
    return is_linear(module) or (weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding))


def fed_by(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether every row of ``x`` is a row of ``y`` (experts read some of them)."""
    if x.shape[-1] != y.shape[-1] or x.dtype != y.dtype:
        return False
    if x.shape == y.shape and torch.equal(x, y):
        return True
    return {*row_keys(x)} <= {*row_keys(y)}


def row_keys(x: torch.Tensor) -> Iterator[bytes]:
    """The rows as bytes."""
    return (row.tobytes() for row in x.detach().reshape(-1, x.shape[-1]).cpu().contiguous().view(torch.uint8).numpy())


def proved_group(segment: Segment, modules: dict[str, nn.Module], seen: Trace, norm: str, fed: list[str]) -> bool:
    """Whether nothing but ``fed`` reads the norm, and each of the others is linear in its weight."""
    r = powers(seen.outputs[norm].shape[-1], 1, seen.outputs[norm].device).to(seen.outputs[norm].dtype)
    with edited(modules, {name: lambda x: x / r for name in fed}, {norm: lambda y: y * r}):
        if not all_equal(segment.forward(), seen.output):
            return False
    return all(is_linear(modules[name]) or absorbs(modules[name], seen.inputs[name], r) for name in fed)


def absorbs(module: nn.Module, x: torch.Tensor, r: torch.Tensor) -> bool:
    """Whether a module's answer to ``x / r`` with its weight times ``r`` is its answer to ``x``."""
    if own_parameter(module).shape[-1] != len(r):
        return False
    plain = tensors_of(module.forward(x))
    with swapped(module, own_parameter(module) * r):
        return all_equal(tensors_of(module.forward(x / r)), plain)


def offset_of(norm: nn.Module, x: torch.Tensor) -> float:
    """What a norm adds to its weight: c in n(x) (c + weight), from its answers under the weights 0 and 1."""
    weight = own_parameter(norm)
    answers = []
    for value in (torch.zeros_like(weight), torch.ones_like(weight)):
        with swapped(norm, value):
            bias = norm._parameters.get("bias")
            answers.append(norm.forward(x).double() - (0 if bias is None else bias.double()))
    normal = answers[1] - answers[0]
    return round(float((answers[0] * normal).sum() / normal.square().sum()), 3)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pairs_of(segment: Segment, normed: set[str]) -> list[LayerPair]:
    """The pairs of a segment; ``normed`` are the layers that read a norm, which are in no pair as targets."""
    linears = {name: module for name, module in segment.module.named_modules() if is_linear(module)}
    seen = trace(linears, segment.forward)
    alone = None if segment.single is None else trace(linears, segment.single)
    found: list[LayerPair] = []
    for place, target in enumerate(seen.order):
        if full(segment, target) in normed:
            continue
        for source in reversed(seen.order[:place]):
            channels = channels_of(segment, linears, seen, alone, source, target)
            if channels is not None:
                found.append(LayerPair(full(segment, source), full(segment, target), channels, segment.prefix))
                break
    return found + siblings(segment, linears, found)


def channels_of(
    segment: Segment, linears: dict[str, nn.Module], seen: Trace, alone: Trace | None, source: str, target: str
) -> torch.Tensor | None:
    """The channels of a pair, proved; None where the two are none."""
    channels = None
    count, width = seen.outputs[source].shape[-1], seen.inputs[target].shape[-1]
    if count <= width:
        channels = ratios(segment.forward, linears, seen, source, target, range(count))
    elif alone is not None and segment.single is not None:
        channels = ratios(segment.single, linears, alone, source, target, range(count))
    if channels is None and count == 2 * width:  # gate and up in one: which half passes straight through?
        halves = (range(width, count), range(width), range(1, count, 2), range(0, count, 2))
        tried = (ratios(segment.forward, linears, seen, source, target, half) for half in halves)
        channels = next((found for found in tried if found is not None), None)
    if channels is None:
        return None
    made = seen.outputs[source]
    r = powers(count, 2, made.device).to(made.dtype)
    used = torch.zeros(count, dtype=torch.bool, device=r.device).index_fill_(0, channels, True)
    r = torch.where(used, r, 1.0)
    kept: list[torch.Tensor] = []

    def back(x: torch.Tensor) -> torch.Tensor:
        kept.append(x / r[channels])
        return kept[-1]

    with edited(linears, {target: back}, {source: lambda y: y * r}):
        same = all_equal(segment.forward(), seen.output)
    return channels if same and kept and equal(kept[0], seen.inputs[target]) else None


def ratios(
    forward: Callable[[], list[torch.Tensor]],
    linears: dict[str, nn.Module],
    plain: Trace,
    source: str,
    target: str,
    among: range,
) -> torch.Tensor | None:
    """The output channel of ``source`` that each input channel of ``target`` is a multiple of; None if there is none.

    The digits of a channel's place ``among`` those that may be scaled are written into the scales of one experiment
    each, and read from the ratios of the inputs of ``target``.
    """
    if source not in plain.outputs or target not in plain.inputs:
        return None
    base = magnitude(plain.inputs[target])
    number = torch.full((plain.outputs[source].shape[-1],), -1, device=base.device)
    number[among.start : among.stop : among.step] = torch.arange(len(among), device=base.device)
    found = torch.zeros(base.shape, dtype=torch.long, device=base.device)
    place = 1
    while place < len(among):
        digits = torch.where(number < 0, 0, number // place % LEVELS + 1)  # 0: not scaled
        kept: list[torch.Tensor] = []
        scale = (2.0**digits).to(plain.outputs[source].dtype)
        with edited(linears, {target: partial(keep, kept)}, {source: scale.mul}):
            forward()
        if not kept:  # the scales have sent the tokens to other experts
            return None
        exponent = torch.log2(magnitude(kept[0]) / base)
        digit = exponent.round()
        wrong = ((exponent - digit).abs() > 0.01) | (digit < 1) | (digit > LEVELS)
        if bool((wrong & (base > 0)).any()):
            return None
        found += place * torch.where(base > 0, digit - 1, 0).long()
        place *= LEVELS
    return None if int(found.max()) >= len(among) else settle(found, base == 0, among)


def settle(found: torch.Tensor, dead: torch.Tensor, among: range) -> torch.Tensor | None:
    """Places ``among`` the channels as channel numbers; channels that were always 0 tell nothing, so that only the
    plain layout can be completed."""
    if bool(dead.any()):
        plain = torch.arange(len(found), device=found.device)
        if len(found) != len(among) or not torch.equal(found[~dead], plain[~dead]):
            return None
        found = plain
    return among.start + among.step * found


def siblings(segment: Segment, linears: dict[str, nn.Module], found: list[LayerPair]) -> list[LayerPair]:
    """Pairs of experts that no token reached, by those that were: same names but for the number, same shapes."""
    inner = (pair for pair in found if NUMBER.findall(pair.source) == NUMBER.findall(pair.target))  # of one expert
    known = {(numberless(pair.source), numberless(pair.target)): pair for pair in inner}
    done = {pair.target for pair in found}
    more = []
    for target in linears:
        for (source_form, target_form), pair in known.items():
            name = full(segment, target)
            if name in done or numberless(name) != target_form:
                continue
            source = source_form
            for number in NUMBER.findall(name):
                source = source.replace("*", number, 1)
            if source.removeprefix(f"{segment.prefix}.") in linears:
                more.append(replace(pair, source=source, target=name))
    return more


def numberless(name: str) -> str:
    """A name without the numbers that are its parts: ``experts.*.up``, but ``fc1``."""
    return NUMBER.sub("*", name)
