"""How often Python looks for objects that hold one another: a tenth of the time of imports and of large graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects after which Python looks for cycles meanwhile (its default is 700), and rounds of the middle generation
#: after which it looks through everything (10): two looks at a graph of 10,000 nodes took a tenth of its time.
YOUNG, ALL = 200_000, 100
#: Bytes of a model that are worth a look through everything: a twentieth of a second.
MUCH = 256_000_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cycles less often.

    Weights do not wait for it: who works on models lets go of them by itself.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], YOUNG) if before[0] else 0, before[1], max(before[2], ALL))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def forget(bytes: int | None) -> None:
    """Have Python free a model of so many bytes that nothing names any more.

    A graph is a circle, so that its weights would wait for the next look at everything, beside those of the next model.
    """
    if bytes is not None and bytes >= MUCH:
        gc.collect()
