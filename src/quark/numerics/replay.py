"""Many short steps on a GPU, asked for at once: a CUDA graph, recorded when they come the second time.

A step on some thousand values takes such a device 2 microseconds; asking for it from Python takes 10 to 20.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from quark.dataclass import dataclass
from quark.numerics.array import Same, is_torch, namespace

Steps = Callable[[Sequence[Same]], None]
KEPT = 4  # recordings, each with the arrays that it works on


@dataclass
class Recording:
    """Steps that were taken once, in places of their own."""

    places: list[Same]
    graph: Any = None

    def again(self, steps: Steps) -> None:
        """The same steps once more."""
        torch = namespace(self.places[0])
        with torch.cuda.device(self.places[0].device):
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    steps(self.places)
            self.graph.replay()


_recordings: ContextVar[OrderedDict[Hashable, Recording] | None] = ContextVar("recordings", default=None)


def can_record(x: Same) -> bool:
    """Whether steps on ``x`` can be recorded: on an NVIDIA GPU, or an AMD one, which torch calls by the same name."""
    return is_torch(x) and x.device.type == "cuda"


@contextmanager
def recordings() -> Iterator[None]:
    """Steps on a GPU are recorded in here; at the end its memory is free again."""
    token = _recordings.set(OrderedDict())
    try:
        yield
    finally:
        _recordings.reset(token)


def replayed(steps: Steps, key: Hashable, arrays: Sequence[Same], filled: int) -> None:
    """``steps(arrays)``, the fast way where there is one.

    Args:
        steps: overwrites arrays, and depends on nothing but them and ``key``; it does not wait for the device, and
            its branches do not look at values.
        key: equal for equal steps.
        arrays: what the steps read and write.
        filled: how many of them, the last ones, are results; what is in the others afterwards is not defined.
    """
    kept = _recordings.get()
    if kept is None or not can_record(arrays[0]):
        steps(arrays)
        return
    key = key, *((tuple(x.shape), x.dtype, x.device) for x in arrays)
    first = key not in kept
    if first:
        kept[key] = Recording([x.new_empty(x.shape) for x in arrays])
    kept.move_to_end(key)
    recording = kept[key]
    while len(kept) > KEPT:
        kept.popitem(last=False)
    for place, x in zip(recording.places[: len(arrays) - filled], arrays, strict=False):
        place.copy_(x)
    if first:
        steps(recording.places)  # in the same places from the start: no bit depends on when the recording began
    else:
        recording.again(steps)
    for place, x in zip(recording.places[-filled:], arrays[-filled:], strict=True):
        x.copy_(place)
