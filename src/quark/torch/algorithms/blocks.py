"""Decoder blocks: where they are in a model, and running them one at a time.

The blocks are the members of the ``ModuleList`` (or ``Sequential``) that holds at least three quarters of the linear
layers and whose members hand their hidden state on to the next; a model without one is a single block. A run of the
float model records what each block is called with besides its hidden state (masks, positions: mostly one tensor for all
blocks) and the hidden states that enter the first block. Where blocks that only hand on what enters are called with the
same, which the first sample tells, the others run through such blocks: nothing is computed or read for them. From then
on one block at a time runs, on the hidden states that the blocks before it left.

Not handled: blocks whose further arguments depend on earlier blocks in a way that quantization changes (they get what
the float model gave them), and blocks that change their inputs in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError, unknown
from quark.torch.algorithms.context import BlockStore
from quark.torch.calibration import arguments_of, device_of, run, without_cache
from quark.torch.first_input import attached, first_input, with_input
from quark.torch.layers import kind_of
from quark.torch.short_sample import kinds

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model.

    Attributes:
        path: name of the list that holds them; empty: the model is the only block.
        modules: the blocks by name, in order.
    """

    path: str
    modules: dict[str, nn.Module]


def find_blocks(model: nn.Module, path: str = "") -> Blocks:
    """The blocks of ``model``.

    Args:
        model: any model.
        path: name of the list that holds them, where the caller knows it.

    Raises:
        ConfigError: ``path`` names no list of modules.
    """
    lists = {name: module for name, module in model.named_modules() if is_list(module)}
    if path and path not in lists:
        raise ConfigError("model_decoder_layers: " + unknown("list of modules", path, lists))
    total = linear_count(model)
    fit = [name for name, module in lists.items() if 4 * linear_count(module) >= 3 * total]
    path = path or max(fit, key=lambda name: (len(lists[name]), -len(name)), default="")
    if not path:
        return Blocks("", {"": model})
    return Blocks(path, {f"{path}.{name}": module for name, module in lists[path].named_children()})


def is_list(module: nn.Module) -> bool:
    """Whether ``module`` is a list of at least one block with linear layers, each of which can be run alone."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        return False
    return all(not isinstance(child, nn.ModuleList) and linear_count(child) for child in module)


def linear_count(module: nn.Module) -> int:
    """Number of linear layers in ``module``."""
    kinds = (kind_of(child) for child in module.modules())
    return sum(kind is not None and kind.tokens for kind in kinds)


@dataclass
class Stream:
    """Hidden states on their way through the blocks, one per sample.

    Attributes:
        hidden: what enters the next block.
        calls: per block, per sample: its positional and keyword arguments, the first input None.
        values: how many values a block returns; 0: its hidden state alone, not in a tuple.
        host: hidden states wait in the host's memory; only those of the sample that runs are on the block's device.
    """

    hidden: list[Any]
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    values: int = 0
    host: bool = False

    def forward(self, name: str, block: nn.Module, k: int) -> Any:
        """The block called ``name`` on sample ``k``."""
        if not name:
            run(block, self.hidden[k])
            return None
        args, kwargs = self.arguments(name, block, k)
        return block(*args, **kwargs)

    def handed_on(self, name: str, block: nn.Module, k: int) -> Any:
        """The hidden state that the block called ``name`` makes of sample ``k``, where hidden states wait."""
        return self.waiting(first(self.forward(name, block, k)))

    def waiting(self, hidden: torch.Tensor) -> torch.Tensor:
        """A hidden state where it waits for its turn."""
        return hidden.cpu() if self.host else hidden

    def called(self, hidden: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """A hidden state that waits, where a module can read it."""
        return hidden.to(device_of(module)) if self.host else hidden

    def arguments(self, name: str, block: nn.Module, k: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the block called ``name`` (the model, without a name) is called with on sample ``k``."""
        if not name:
            return arguments_of(block, self.hidden[k])
        return with_input(block, *self.calls[name][k], self.called(self.hidden[k], block))

    def advance(self, name: str, block: nn.Module) -> Stream:
        """The stream behind a block; what the block was called with is forgotten. Nothing is behind the last one."""
        count = 0 if not name or self.ends_with(name) else len(self.hidden)
        return self.behind(name, [self.handed_on(name, block, k) for k in range(count)])

    def ends_with(self, name: str) -> bool:
        """Whether the block called ``name`` is the last one."""
        return not any(other != name for other in self.calls)

    def behind(self, name: str, hidden: list[Any]) -> Stream:
        """As ``advance``, of a block that has run already and handed on ``hidden``."""
        calls = {other: calls for other, calls in self.calls.items() if other != name}
        if name and not calls:
            return Stream([])
        return replace(self, hidden=hidden if name else self.hidden, calls=calls)

    def joined(self, other: Stream) -> Stream:
        """The stream of these samples, and then those of another."""
        calls = {name: [*calls, *other.calls[name]] for name, calls in self.calls.items()}
        return replace(self, hidden=[*self.hidden, *other.hidden], calls=calls)

    def of(self, samples: list[int]) -> Stream:
        """The stream of some samples."""
        calls = {name: [calls[k] for k in samples] for name, calls in self.calls.items()}
        return replace(self, hidden=[self.hidden[k] for k in samples], calls=calls)

    def copy(self) -> Stream:
        """One that goes its own way."""
        return replace(self, hidden=list(self.hidden), calls=dict(self.calls))


@dataclass(frozen=True)
class BlockRun:
    """A block, its name (empty: the model) and what enters it."""

    name: str
    block: nn.Module
    stream: Stream

    def __len__(self) -> int:
        return len(self.stream.hidden)

    def forward(self, k: int) -> Any:
        """What it returns on sample ``k``; nothing where it is the model."""
        return self.stream.forward(self.name, self.block, k)

    def arguments(self, k: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it is called with on sample ``k``."""
        return self.stream.arguments(self.name, self.block, k)

    def handed_on(self, k: int) -> Any:
        """The hidden state that it makes of sample ``k``, where hidden states wait."""
        return self.stream.handed_on(self.name, self.block, k)


def first(output: Any) -> Any:
    """The hidden state of what a block returns."""
    return output[0] if isinstance(output, tuple | list) else output


class Enough(Exception):
    """Every layer of interest has been called; the rest need not run."""


def record(
    model: nn.Module, blocks: Blocks, samples: list[Any], store: BlockStore | None = None
) -> tuple[Blocks, Stream]:
    """The stream in front of the first block; blocks that are no chain are replaced by the model as one block.

    Args:
        model, blocks: the float model.
        samples: of the stream.
        store: of the blocks.

    Raises:
        DataError: no samples.
    """
    if not samples:
        raise DataError("the algorithms of algo_config need samples, and there are none: give a dataloader")
    whole = Blocks("", {"": model}), Stream(list(samples))
    if not blocks.path:
        return whole
    store = store or BlockStore()
    first_one, *others = samples
    with store.recording():
        found = recorded(model, blocks, [first_one], store.host)
    if others and found is not None:
        wholes: dict[int, Stream | None] = {0: found}
        for k in kinds(samples)[1:]:
            with store.recording():
                wholes[k] = recorded(model, blocks, [samples[k]], store.host)
        if all(calls_agree(model, blocks, samples[k], found.values, whole) for k, whole in wholes.items()):
            rest = recorded(model, blocks, others, store.host, found.values)
        else:
            with store.recording():
                rest = recorded(model, blocks, others, store.host)
        found = None if rest is None else found.joined(rest)
    if found is None:
        log.info("the modules of %r do not hand one hidden state on; the model is tuned as one block", blocks.path)
        return whole
    return blocks, found


def calls_agree(model: nn.Module, blocks: Blocks, sample: Any, values: int | None, whole: Stream | None) -> bool:
    """Whether blocks that hand on what enters let all others be called as ``whole`` has it, where all run."""
    alone = recorded(model, blocks, [sample], whole is not None and whole.host, values)
    return whole is not None and alone is not None and equal_arguments(alone.calls, whole.calls)


def recorded(
    model: nn.Module, blocks: Blocks, samples: list[Any], host: bool, values: int | None = None
) -> Stream | None:
    """What enters the first block, and what all are called with besides; None: they are no chain.

    Args:
        model, blocks, samples: what runs.
        host: where hidden states wait.
        values: how many values a block returns; the blocks then hand on what enters instead of running.
    """
    recorder = Recorder(next(iter(blocks.modules)), Stream([], {name: [] for name in blocks.modules}, host=host))
    hooks = [handle for name, block in blocks.modules.items() for handle in recorder.attach(name, block)]
    with (
        attached(hooks),
        without_cache(model),
        torch.no_grad(),
        nullcontext() if values is None else handing_on(blocks.modules.values(), values),
    ):
        for sample in samples:
            with suppress(Enough):
                run(model, sample)
    counts = {len(calls) for calls in recorder.stream.calls.values()}
    return recorder.stream if counts == {len(samples)} and recorder.chained else None


def end_run() -> Any:
    """Nothing behind this block need run."""
    raise Enough


@contextmanager
def handing_on(blocks: Iterable[nn.Module], values: int, made: Callable[[], Any] = end_run) -> Iterator[None]:
    """Blocks that hand on what enters them; the last one hands on what is ``made``.

    Args:
        blocks: in their order.
        values: how many values a block returns.
        made: the hidden state that the last one hands on.
    """
    *others, last = blocks
    with (
        answering(others, lambda block, *args, **kwargs: returned(first_input(block, args, kwargs), values)),
        answering([last], lambda *args, **kwargs: returned(made(), values)),
    ):
        yield


def returned(x: torch.Tensor, values: int) -> Any:
    """A hidden state as a block returns it, among so many values; 0: alone."""
    return (x, *(None,) * (values - 1)) if values else x


@contextmanager
def answering(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Modules with another ``forward`` for a while, which gets the module first."""
    before = [(module, "forward" in module.__dict__, module.__dict__.get("forward")) for module in modules]
    for module, _, _ in before:
        module.__dict__["forward"] = partial(forward, module)
    try:
        yield
    finally:
        for module, own, value in before:
            del module.__dict__["forward"]
            if own:
                module.__dict__["forward"] = value


@contextmanager
def hooked(model: nn.Module, hooks: Mapping[str, Callable[..., Any]], kwargs: bool = False) -> Iterator[None]:
    """Forward hooks at modules by name."""
    modules = dict(model.named_modules())
    with attached(modules[name].register_forward_hook(hook, with_kwargs=kwargs) for name, hook in hooks.items()):
        yield


def equal_arguments(one: Any, other: Any) -> bool:
    """Whether arguments are the same values; what is neither tensors nor plain values is not known to be."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_arguments(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(equal_arguments, one, other))
    return isinstance(one, bool | int | float | str | None) and type(one) is type(other) and one == other


@dataclass
class Recorder:
    """Hooks that fill a stream.

    Attributes:
        start: name of the first block.
        stream: what is filled.
        chained: every block so far got what the block before it returned.
        last: what the last block returned.
        same: tensors of this sample's calls, by where they are, each with the one that is kept for it.
    """

    start: str
    stream: Stream
    chained: bool = True
    last: torch.Tensor | None = None
    same: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attach(self, name: str, block: nn.Module) -> list[Any]:
        """Hooks for the block called ``name``."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = first_input(module, args, kwargs)
            if name == self.start:
                self.same.clear()
                self.stream.hidden.append(self.stream.waiting(hidden.detach()))
            else:
                self.chained &= (
                    self.last is not None and hidden.shape == self.last.shape and bool(torch.equal(hidden, self.last))
                )
            calls = self.stream.calls[name]
            call = with_input(module, args, kwargs, None)
            calls.append(self.shared(call, calls[-1]) if calls else call)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.last = first(output)
            self.stream.values = len(output) if isinstance(output, tuple | list) else 0

        return [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after),
        ]

    def shared(self, value: Any, before: Any) -> Any:
        """Arguments, with the tensors of the sample before where they are the same values: masks, positions."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.same:
                self.same[id(value)] = value, before if equal_arguments(value, before) else value
            return self.same[id(value)][1]
        if type(value) is type(before) in (tuple, list) and len(value) == len(before):
            return type(value)(map(self.shared, value, before))
        if type(value) is dict and isinstance(before, dict) and value.keys() == before.keys():
            return {key: self.shared(one, before[key]) for key, one in value.items()}
        return value
