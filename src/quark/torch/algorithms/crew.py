"""The work on a block shared out over the workers of joblib, with the bits of a serial run: samples in parts, and
layers that do not wait for each other.

Which samples are a part does not depend on the workers, and what parts find comes back in their order, so that sums
over samples are sums over parts however many work on them. Workers are threads, each with a copy of the block that
shares its tensors, or processes here or elsewhere, which get the block as it is now. Each computes with as many threads
of torch as this process does: the bits of a float product depend on them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from quark import parallel
from quark.torch.algorithms.blocks import BlockRun, Stream

PARTS = 8  # of the samples, at most


def in_parts(run: BlockRun, most: int = PARTS) -> list[BlockRun]:
    """A block on one part of its samples after the other: as many of them as there are samples, ``most`` at most."""
    count, stream = min(most, len(run)), run.stream
    bounds = [len(run) * k // count for k in range(count + 1)] if count else []
    calls = {name: own for name, own in stream.calls.items() if name == run.name}
    own = replace(stream, calls=calls)
    return [replace(run, stream=own.of(list(range(*pair)))) for pair in pairwise(bounds)]


def shared_out(function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], workers: int | None) -> Iterator[Any]:
    """What ``function`` returns of each task, in their order.

    Args:
        function: of a module, which changes none of its arguments.
        tasks: its arguments; runs of blocks are copied where workers are threads.
        workers: that work at once; None: as joblib's ``parallel_config`` says.
    """
    if workers == 1 or (workers is None and parallel.is_serial()):
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
    tasks = ((function, part) for part in in_parts(run))
    return [found for part in shared_out(_on_part, tasks, workers) for found in part]


def _on_part(function: Callable[[BlockRun, int], Any], run: BlockRun) -> list[Any]:
    return [function(run, k) for k in range(len(run))]


def advance(run: BlockRun, workers: int | None) -> Stream:
    """The stream behind a block; what the block was called with is forgotten. Nothing is behind the last one."""
    ends = not run.name or run.stream.ends_with(run.name)
    return run.stream.behind(run.name, [] if ends else each_sample(BlockRun.handed_on, run, workers))
