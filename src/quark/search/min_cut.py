"""Two labels for every element at the least cost: a minimum cut, by Dinic's algorithm on integers.

    cost = sum of yes[u] over elements with the label, + no[u] over the others, + w(u, v) for every u with, v without

Costs are integers, so that the same question has the same answer everywhere; of several best answers, the one with the
most labelled elements is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

FOREVER = 1 << 60


class _Network:
    """Residual capacities: arc k and arc k ^ 1 are each other's way back."""

    def __init__(self, size: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(size)]
        self.head: list[int] = []
        self.room: list[int] = []

    def arc(self, tail: int, head: int, capacity: int) -> None:
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.out[start].append(len(self.head))
            self.head.append(end)
            self.room.append(room)

    def levels(self, source: int) -> list[int]:
        """Arcs from the source to every node that can still be reached, -1 for the others."""
        level, queue = [-1] * len(self.out), deque([source])
        level[source] = 0
        while queue:
            node = queue.popleft()
            for arc in self.out[node]:
                if self.room[arc] and level[self.head[arc]] < 0:
                    level[self.head[arc]] = level[node] + 1
                    queue.append(self.head[arc])
        return level

    def push(self, source: int, sink: int, level: list[int]) -> None:
        """Fill every shortest way from the source to the sink."""
        place, path, node = [0] * len(self.out), list[int](), source
        while True:
            if node == sink:
                least = min(self.room[arc] for arc in path)
                for arc in path:
                    self.room[arc] -= least
                    self.room[arc ^ 1] += least
                path, node = [], source
                continue
            while place[node] < len(self.out[node]):
                arc = self.out[node][place[node]]
                if self.room[arc] and level[self.head[arc]] == level[node] + 1:
                    break
                place[node] += 1
            else:
                if node == source:
                    return
                node = self.head[path.pop() ^ 1]
                place[node] += 1
                continue
            path.append(arc)
            node = self.head[arc]

    def reaches(self, sink: int) -> list[bool]:
        """Which nodes can still send something to the sink."""
        found, queue = [False] * len(self.out), deque([sink])
        found[sink] = True
        while queue:
            for arc in self.out[queue.popleft()]:
                tail = self.head[arc]
                if self.room[arc ^ 1] and not found[tail]:
                    found[tail] = True
                    queue.append(tail)
        return found


def labels(yes: Sequence[int], no: Sequence[int], pairs: Iterable[tuple[int, int, int]]) -> list[bool]:
    """Which elements get the label.

    Args:
        yes: the cost of every element with the label; ``FOREVER`` where it cannot have it.
        no: its cost without.
        pairs: (u, v, cost where u has the label and v does not).
    """
    size = len(yes)
    source, sink, network = size, size + 1, _Network(size + 2)
    for k, (with_it, without) in enumerate(zip(yes, no, strict=True)):
        network.arc(source, k, without)
        network.arc(k, sink, with_it)
    for tail, head, cost in pairs:
        network.arc(tail, head, cost)
    while (level := network.levels(source))[sink] >= 0:
        network.push(source, sink, level)
    return [not lost for lost in network.reaches(sink)[:size]]
