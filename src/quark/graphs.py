"""Questions about any graph: of ONNX, of torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Member = TypeVar("Member", bound=Hashable)


def connected(members: Iterable[Member], near: Callable[[Member], Iterable[Member]]) -> Iterator[list[Member]]:
    """The parts of which no member is near one of another part.

    Args:
        members: of the graph, each once.
        near: the neighbours of a member, in both directions; others than ``members`` are passed over.
    """
    left = dict.fromkeys(members)
    while left:
        part = [next(iter(left))]
        left.pop(part[0])
        for member in part:  # which grows
            for other in near(member):
                if other in left:
                    left.pop(other)
                    part.append(other)
        yield part
