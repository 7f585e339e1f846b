"""The work on a block shared out over the workers of joblib, with the bits of a serial run: samples in parts, and
layers that do not wait for each other.

Which samples are a part does not depend on the workers, nor do the pairs in which parts are summed, so that sums over
samples are the same bits however many work on them:

    ((1 + 2) + (3 + 4)) + ((5 + 6) + (7 + 8))      one worker; two: the halves; four: the pairs

Workers are threads, each with a copy of the block that shares its tensors, or processes here or elsewhere, which get
the block as it is now. Each computes with as many threads of torch as this process does: the bits of a float product
depend on them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from quark import parallel
from quark.torch.algorithms.blocks import BlockRun, Stream

PARTS = 8  # of the samples, at most
Value = TypeVar("Value")


def at_once(workers: int | None) -> int:
    """How many tasks the samples of a block become: 1, 2, 4 or 8, not fewer than there are workers, up to that."""
    if workers == 1 or (workers is None and parallel.is_serial()):
        return 1
    return min(PARTS, 1 << (parallel.count(workers, "processes") - 1).bit_length())


def parts_of(count: int, most: int = PARTS) -> list[range]:
    """Samples in as many parts as there are samples, ``most`` at most, in their order."""
    bounds = [count * k // min(most, count) for k in range(min(most, count) + 1)] if count else []
    return [range(*pair) for pair in pairwise(bounds)]


def halves(parts: Sequence[Value], tasks: int) -> list[Sequence[Value]]:
    """Parts for at most so many tasks (a power of two): halves of halves."""
    if tasks == 1 or len(parts) <= 1:
        return [parts]
    middle = len(parts) // 2
    return [*halves(parts[:middle], tasks // 2), *halves(parts[middle:], tasks // 2)]


def joined(
    found: Sequence[Value] | Iterator[Value], parts: int, tasks: int, join: Callable[[Value, Value], Value]
) -> Value:
    """What was found of ``halves``, in their order, joined in pairs."""
    found = iter(found)
    if tasks == 1 or parts <= 1:
        return next(found)
    first = joined(found, parts // 2, tasks // 2, join)
    return join(first, joined(found, parts - parts // 2, tasks // 2, join))


def on(run: BlockRun, samples: range) -> BlockRun:
    """A block on some of its samples."""
    own = replace(run.stream, calls={name: calls for name, calls in run.stream.calls.items() if name == run.name})
    return replace(run, stream=own.of(list(samples)))


def shared_out(function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], workers: int | None) -> Iterator[Any]:
    """What ``function`` returns of each task, in their order.

    Args:
        function: of a module, which changes none of its arguments.
        tasks: its arguments; runs of blocks are copied where workers are threads.
        workers: that work at once; None: as joblib's ``parallel_config`` says.
    """
    if at_once(workers) == 1:
        return (function(*task) for task in tasks)
    here = os.getpid(), torch.get_num_threads()
    calls = (parallel.delayed(_at_work, here, function, *task) for task in tasks)
    return parallel.results(calls, workers, "processes")


@torch.no_grad()
def _at_work(driver: tuple[int, int], function: Callable[..., Any], *task: Any) -> Any:
    """A task in a thread of the driver, or in a process of its own."""
    process, threads = driver
    if os.getpid() == process:
        return function(*(replace(one, block=twin(one.block)) if isinstance(one, BlockRun) else one for one in task))
    torch.set_num_threads(threads)
    return function(*task)


def twin(block: nn.Module) -> nn.Module:
    """A copy of a block that shares its tensors: hooks of one do not see what runs through the other."""
    tensors = (*block.parameters(), *block.buffers())
    return copy.deepcopy(block, {id(tensor): tensor for tensor in tensors})


def each_sample(function: Callable[[BlockRun, int], Any], run: BlockRun, workers: int | None) -> list[Any]:
    """What ``function`` returns of a block on each of its samples."""
    tasks = ((function, on(run, samples)) for samples in parts_of(len(run), at_once(workers)))
    return [found for part in shared_out(_on_part, tasks, workers) for found in part]


def _on_part(function: Callable[[BlockRun, int], Any], run: BlockRun) -> list[Any]:
    return [function(run, k) for k in range(len(run))]


def advance(run: BlockRun, workers: int | None) -> Stream:
    """The stream behind a block; what the block was called with is forgotten. Nothing is behind the last one."""
    ends = not run.name or run.stream.ends_with(run.name)
    return run.stream.behind(run.name, [] if ends else each_sample(BlockRun.handed_on, run, workers))
