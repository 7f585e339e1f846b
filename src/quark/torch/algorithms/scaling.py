"""Scales per channel between what writes a tensor and what reads it: the ground of SmoothQuant and AWQ.

    norm → linears      weight / s (and bias / s),  columns * s
    linear → linear     rows / s (and bias / s),    columns * s      input channels that share a row share its scale

Where such places are is found from the model (``quark.torch.structure``), which proves that the model computes the
same; ``scaling_layers`` of a configuration chooses among them. Blocks are read one at a time: of the inputs of each
place running statistics and a fixed number of rows are kept, spread over all samples, by which candidates are judged
without running the model again. What was chosen is then tried on the whole model, and made where that is worth it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.algorithms.smoothquant import shared_channels
from quark.dataclass import dataclass
from quark.errors import ConfigError, known, unknown
from quark.measure.guard import best_change
from quark.torch.algorithms.answers import BlockWalk, walk_of
from quark.torch.algorithms.blocks import BlockRun, Stream
from quark.torch.algorithms.context import ModelContext, Undo, matrix
from quark.torch.algorithms.guard import change_all, output_distance
from quark.torch.algorithms.inputs import Watch
from quark.torch.algorithms.squares import add_squares, complete
from quark.torch.layers import kind_of, known_kind, own_parameter
from quark.torch.matching import Match
from quark.torch.structure import Structure, find_structure

log = logging.getLogger(__name__)
ROWS = 1024  # inputs kept per place
TOGETHER = 1 << 22  # values of the layers whose scales are chosen together


@dataclass(frozen=True)
class Place:
    """Where a scale per channel can go.

    Attributes:
        source: name of the norm or linear layer that is divided.
        readers: names of the linear layers that are multiplied.
        others: names of further modules whose weight's columns are multiplied (routers).
        offset: of a norm's weight.
        channels: of a linear source: its output channel for each input channel of the reader; None for norms.
        block: name of the decoder block; empty outside.
    """

    source: str
    readers: tuple[str, ...]
    others: tuple[str, ...] = ()
    offset: float = 0.0
    channels: torch.Tensor | None = field(default=None, repr=False)
    block: str = ""


@dataclass
class PlaceInputs:
    """What was read at a place.

    Attributes:
        amax, total: largest magnitude and sum of magnitudes per channel, float32.
        count: rows seen.
        rows: some of them, float32 [n, channels].
        hessian: sum of x x^T, where it is asked for; while inputs are taken in, without what is below the diagonal.
    """

    amax: torch.Tensor
    total: torch.Tensor
    count: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)
    hessian: torch.Tensor | None = None

    @property
    def mean(self) -> torch.Tensor:
        """Mean magnitude per channel."""
        return self.total / max(self.count, 1)

    @property
    def sample(self) -> torch.Tensor:
        """The rows that were kept."""
        return torch.cat(self.rows)

    @property
    def root(self) -> torch.Tensor:
        """As few rows as there are channels, whose squared errors are those of all rows that were seen."""
        squares = known(self.hessian, "the sum of squares").double()
        upper, failed = torch.linalg.cholesky_ex(squares, upper=True)
        if not int(failed):
            return upper.float()
        values, vectors = torch.linalg.eigh(squares)  # some channels follow from others: there is no inverse
        return (vectors * values.clamp(min=0).sqrt()).T.float()

    def add(self, x: torch.Tensor, keep: int, squares: bool) -> None:
        """Take in one input, and keep up to ``keep`` of its rows, evenly spread."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.amax = torch.maximum(self.amax, rows.abs().amax(0))
        self.total += rows.abs().sum(0)
        self.count += len(rows)
        self.rows.append(rows[:: max(1, -(-len(rows) // keep))].clone())
        if squares:
            self.hessian = rows.new_zeros(rows.shape[1], rows.shape[1]) if self.hessian is None else self.hessian
            add_squares(self.hessian, rows)


@dataclass(frozen=True)
class ScalingChoice:
    """What was chosen at a place.

    Attributes:
        place: where.
        scale: per input channel of the readers; None: as it is.
        values: of readers, by name, from which ``Finisher`` changes them, behind the scale.
    """

    place: Place
    scale: torch.Tensor | None = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadPlace:
    """A place, and what reads it.

    Attributes:
        place: where a scale is asked for.
        items: the quantized layers that read it.
        inputs: what they read.
    """

    place: Place
    items: list[Match]
    inputs: PlaceInputs


# the scales of several places, or None, in turn; the readers of none change with the scales of those before
Chooser = Callable[[ModelContext, Sequence[ReadPlace]], Iterable[torch.Tensor | None]]


@dataclass(frozen=True)
class Finisher:
    """Changes readers of a place that has its scales.

    Attributes:
        find: called with the readers, their inputs and the scales; values by the names of the readers that change.
        make: changes a reader from its values.
    """

    find: Callable[[ModelContext, list[Match], PlaceInputs, torch.Tensor | None], dict[str, torch.Tensor]]
    make: Callable[[ModelContext, Match, torch.Tensor], None]


@dataclass(frozen=True)
class ScaleSearch:
    """How the scales of places are found.

    Attributes:
        items: the layers whose weights are quantized, by name.
        choose: the scales of places.
        finish: further changes of its readers.
        squares: the inputs hold their Hessian.
    """

    items: Mapping[str, Match]
    choose: Chooser
    finish: Finisher | None = None
    squares: bool = False


def places(structure: Structure) -> Iterator[Place]:
    """Every place of a model."""
    for group in structure.groups:
        yield Place(group.norm, group.linears, group.others, group.offset, None, group.block)
    for pair in structure.pairs:
        yield Place(pair.source, (pair.target,), channels=pair.channels, block=pair.block)


def chosen(structure: Structure, layers: Sequence[Mapping[str, Any]] | None) -> list[Place]:
    """The places that ``scaling_layers`` names (all, where it is empty).

    Raises:
        ConfigError: an entry that names no place of the model; what there is, is shown.
    """
    found = list(places(structure))
    if not layers:
        return found
    kept: list[Place] = []
    for entry in layers:
        source, readers = str(entry.get("prev_op", "")), [str(name) for name in entry.get("layers", ())]
        fit = [place for place in found if ends(place.source, source) and same_names(place.readers, readers)]
        if not fit:
            known = sorted({relative(place) for place in found})
            raise ConfigError(
                "scaling_layers: " + unknown("prev_op → layers", f"{source} → {', '.join(readers)}", known)
            )
        kept += [place for place in fit if place not in kept]
    return kept


def ends(name: str, suffix: str) -> bool:
    """Whether a name is, or ends with, another."""
    return f".{name}".endswith(f".{suffix}")


def same_names(names: tuple[str, ...], suffixes: list[str]) -> bool:
    """Whether each name ends with one of the suffixes, and each suffix is used."""
    return len(names) == len(suffixes) and all(any(ends(name, suffix) for suffix in suffixes) for name in names)


def relative(place: Place) -> str:
    """A place in the words of ``scaling_layers``."""
    cut = len(place.block) + 1 if place.block else 0
    return f"{place.source[cut:]} → {', '.join(name[cut:] for name in place.readers)}"


@torch.no_grad()
def scale_places(
    context: ModelContext,
    layers: Sequence[Mapping[str, Any]] | None,
    path: str,
    choose: Chooser,
    finish: Finisher | None = None,
    squares: bool = False,
) -> None:
    """Scale every place whose readers are quantized as ``choose`` says.

    What is chosen has the least errors of layers. All places, those of norms or those between linear layers are then
    changed, whichever gives the best quantized answers, if those get better (``measure.guard.best_of``).

    Args:
        context: the float model.
        layers, path: ``scaling_layers`` and ``model_decoder_layers`` of a configuration.
        choose: the scales of places.
        finish: further changes of its readers.
        squares: the inputs hold their Hessian.

    Raises:
        DataError: no samples.
    """
    sample = context.samples[0] if context.samples else None
    found = chosen(find_structure(context.model, sample, path, context.store), layers)
    items = {name: item for item in context.found.quantized for name in item.layer.names if item.stages["weight"]}
    wanted = [place for place in found if any(name in items for name in place.readers)]
    if not wanted:
        log.warning("the model stays as it was: no quantized layer reads a norm, or channels that can be scaled")
        return
    walk = walk_of(context, path)
    way = ScaleSearch(items, choose, finish, squares)
    made, handed_on = choices(walk, wanted, way)
    changes = [partial(make, walk, way, some) for some in subsets(made)]
    best = best_change(changes, output_distance(walk, handed_on).errors) if changes else None
    if best is None:
        log.warning("the model keeps its scales: no others make its quantized answers better than chance")
    else:
        change_all(walk, best)


def subsets(found: list[ScalingChoice]) -> Iterator[list[ScalingChoice]]:
    """The choices that are tried together: all, those at norms, those between linear layers."""
    kinds = [[choice for choice in found if (choice.place.channels is None) == norms] for norms in (True, False)]
    yield from ([found] if found else [])
    yield from (kinds if all(kinds) else [])


def make(walk: BlockWalk, way: ScaleSearch, some: Sequence[ScalingChoice], context: ModelContext, part: str) -> None:
    """Change what was chosen in one part of the model."""
    for choice in some:
        if part == (choice.place.block if choice.place.block in walk.blocks.modules else ""):
            apply(context, way, choice)


def apply(context: ModelContext, way: ScaleSearch, choice: ScalingChoice) -> None:
    """Change one place."""
    if choice.scale is not None:
        fold(context, choice.place, choice.scale)
    for name, values in choice.values.items():
        if way.finish is not None:
            way.finish.make(context, way.items[name], values)


def choices(walk: BlockWalk, wanted: list[Place], way: ScaleSearch) -> tuple[list[ScalingChoice], list[Any]]:
    """What is chosen at each place, block by block, and what the last block hands on; the model stays as it is.

    Blocks that an interrupted job has behind it are neither searched nor run again (``BlockStore.known``,
    ``BlockStore.passing``).
    """
    from quark.report.progress import bars

    context, stream, notes = walk.context, walk.stream, walk.context.store.passing()
    before, (handed_on, *_) = notes.read()
    found: list[ScalingChoice] = []

    def chosen_at(run: BlockRun, here: list[Place]) -> list[Any]:
        made, hidden = choices_in(context, way, run, here)
        found.extend(made)
        return hidden

    with bars() as update:
        for done, (name, block) in enumerate(walk.blocks.modules.items()):
            update("choose scales", done, len(walk.blocks.modules))
            here = [place for place in wanted if place.block == name]
            if done < before:
                found.extend(choices_of(here, context.store.known(name).read() or {}))
                stream = stream.behind(name, handed_on)
                continue
            with context.store.visiting(name):
                handed_on = chosen_at(BlockRun(name, block, stream), here)
            stream = stream.behind(name, handed_on)
            notes.write(done + 1, [stream.hidden])
    notes.forget()
    if outside := [place for place in wanted if place.block not in walk.blocks.modules]:
        with context.store.recording():
            chosen_at(BlockRun("", context.model, Stream(list(context.samples))), outside)
    return found, handed_on


def choices_in(
    context: ModelContext, way: ScaleSearch, run: BlockRun, here: list[Place]
) -> tuple[list[ScalingChoice], list[Any]]:
    """What is chosen in one block, or was by an interrupted job; and what the block hands on."""
    kept = context.store.known(run.name)
    if (values := kept.read()) is not None:
        return list(choices_of(here, values)), [run.handed_on(k) for k in range(len(run))]
    undo = Undo()
    own = replace(context, undo=undo)
    try:
        inputs, hidden = read_block(own, run, here, way.squares)
        asked = [
            ReadPlace(place, [way.items[name] for name in place.readers if name in way.items], seen)
            for place, seen in inputs
        ]
        made = [choice for some in together(asked) for choice in choices_at(own, way, some)]
        made = [choice for choice in made if choice.scale is not None or choice.values]
        kept.write(values_of(here, made))
        return made, hidden
    finally:
        undo.restore()


def together(asked: Iterable[ReadPlace]) -> Iterator[list[ReadPlace]]:
    """Places in turn, those of small layers together: no reader is changed by a place before it."""
    some, changed, size = list[ReadPlace](), set[str](), 0
    for one in asked:
        place, own = one.place, sum(own_parameter(item.layer.module).numel() for item in one.items)
        if some and (size + own > TOGETHER or not changed.isdisjoint(place.readers)):
            yield some
            some, changed, size = [], set(), 0
        some.append(one)
        changed |= {place.source, *place.readers, *place.others}
        size += own
    yield from ([some] if some else [])


def choices_at(context: ModelContext, way: ScaleSearch, asked: Sequence[ReadPlace]) -> Iterator[ScalingChoice]:
    """What is chosen at some places, which are changed so."""
    for one, scale in zip(asked, way.choose(context, asked), strict=True):
        choice = ScalingChoice(one.place, scale)
        apply(context, way, choice)
        if way.finish is not None:
            values = way.finish.find(context, one.items, one.inputs, choice.scale)
            choice = replace(choice, values=values)
            apply(context, way, replace(choice, scale=None))
        yield choice


def values_of(here: list[Place], made: list[ScalingChoice]) -> dict[str, torch.Tensor]:
    """The choices at some places as tensors by name."""
    found: dict[str, torch.Tensor] = {}
    for choice in made:
        number = next(k for k, place in enumerate(here) if place is choice.place)
        found |= {} if choice.scale is None else {f"{number}.scale": choice.scale}
        found |= {f"{number}.values.{name}": value for name, value in choice.values.items()}
    return found


def choices_of(here: list[Place], values: Mapping[str, torch.Tensor]) -> Iterator[ScalingChoice]:
    """What ``values_of`` was made of."""
    for number, place in enumerate(here):
        start = f"{number}.values."
        own = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
        scale = values.get(f"{number}.scale")
        if scale is not None or own:
            yield ScalingChoice(place, scale, own)


def read_block(
    context: ModelContext, run: BlockRun, here: list[Place], squares: bool
) -> tuple[list[tuple[Place, PlaceInputs]], list[Any]]:
    """The inputs of the places of one block, and what it hands on, from one run per sample.

    Readers that are called with one tensor share what is kept of it.
    """
    modules = dict(context.model.named_modules())
    keep = max(1, ROWS // max(len(run), 1))
    found: dict[str, PlaceInputs] = {}
    source = {reader: place.source for place in here for reader in place.readers}
    latest: dict[str, torch.Tensor] = {}

    def see(reader: str, x: torch.Tensor) -> None:
        if x.numel() and latest.get(source[reader]) is not x:
            size = torch.zeros(x.shape[-1], device=x.device)
            found.setdefault(reader, PlaceInputs(size, size.clone())).add(x, keep, squares)
            latest[source[reader]] = x

    watch, hidden = Watch({reader: modules[reader] for reader in source}, see, stop=False), []
    for k in range(len(run)):
        latest.clear()
        hidden.append(watch.run(partial(run.handed_on, k)))
    for seen in found.values():
        if seen.hessian is not None:
            complete(seen.hessian)
    reached = ((place, [found[reader] for reader in place.readers if reader in found]) for place in here)
    inputs = [(place, max(seen, key=lambda item: item.count)) for place, seen in reached if seen]
    return inputs, hidden


def fold(context: ModelContext, place: Place, s: torch.Tensor) -> None:
    """Put the scales ``s`` (per input channel of the readers) into the weights around a place."""
    modules = dict(context.model.named_modules())
    source = modules[place.source]
    down = s if place.channels is None else source_scales(source, place.channels, s)
    if place.channels is None:
        weight = source._parameters["weight"].detach().float()
        context.undo.set_parameter(source, "weight", (weight + place.offset) / s - place.offset)
    else:
        known = known_kind(source)
        value = matrix(source, known) / down[:, None]
        context.undo.set_parameter(source, "weight", value.T.contiguous() if known.transposed else value)
        s = down[place.channels]
    if source._parameters.get("bias") is not None:
        context.undo.set_parameter(source, "bias", source._parameters["bias"].detach().float() / down)
    for name in (*place.readers, *place.others):
        module = modules[name]
        kind = kind_of(module)
        weight = module._parameters["weight"].detach().float()
        context.undo.set_parameter(module, "weight", weight * (s[:, None] if kind and kind.transposed else s))


def source_scales(source: nn.Module, channels: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """What each output channel of a linear source is divided by."""
    kind = known_kind(source)
    count = own_parameter(source).shape[1 if kind.transposed else 0]
    return shared_channels(s, channels.to(s.device), count)


def effective(context: ModelContext, place: Place, s: torch.Tensor) -> torch.Tensor:
    """``s`` as ``fold`` will apply it: equal where input channels share a row of the source."""
    if place.channels is None:
        return s
    source = dict(context.model.named_modules())[place.source]
    return source_scales(source, place.channels, s)[place.channels]
