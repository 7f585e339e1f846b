"""Files of a quantized checkpoint, read back before they take their place: of every tensor some windows of rows are
decoded by nothing but the file, and compared with what the quantizer makes of the source.

What is expected is found while the source's tensor is in memory, and kept until the file is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.torch.export.checkpoint import opened, tensor_of
from quark.torch.export.decoded import Windows
from quark.torch.export.in_turn import Pairs, half_of, halves_in
from quark.torch.export.layout import layout_of_quantizer
from quark.torch.export.state import named
from quark.torch.export.verify import check, narrowed, quantizer_of_rows, windows, windows_of
from quark.torch.fake_quantize import Quantizer

PART = 512  # a window is this part of the rows
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """Some rows of one tensor.

    Attributes:
        windows: which.
        values: what they stand for.
        layout: how they are stored; None: as they are.
    """

    windows: Windows
    values: torch.Tensor
    layout: Any = None

    def check(self, name: str, read: Read) -> None:
        """Compare with the tensors that ``read`` gives.

        Raises:
            ModelError: they differ.
        """
        if self.layout is None:
            value = read(name)
            check(name, self.windows.cut(value) if value.dim() else value, self.values)
            return
        form = self.layout.form()
        stored = {key: narrowed(read(named(name, key)), shape, self.windows) for key, (shape, _) in form.items()}
        check(name, self.layout.restore(stored), self.values)


@torch.no_grad()
def expected(value: torch.Tensor, quantizer: Quantizer | None, pack_method: str) -> Expected:
    """What is to be found in the file of a tensor, and of the parameters of its quantizer."""
    shape = tuple(value.shape)
    if quantizer is None:
        own = windows(shape, 1, PART)
        return Expected(own, own.cut(value).clone() if shape else value)
    own = windows_of(quantizer, shape, PART)
    values = quantizer_of_rows([(quantizer, own)], len(shape))(own.cut(value))
    return Expected(own, values, layout_of_quantizer(quantizer, (own.count, *shape[1:]), pack_method))


@contextmanager
def reading(path: Path, outside: Callable[[str], str], pairs: Pairs) -> Iterator[Read]:
    """Gives the tensors of a file by their names in memory; ``pairs`` of layers may be one in it."""
    with opened(path) as file:
        names = set(file.keys())
        halves = halves_in(names, pairs)

        def read(name: str) -> torch.Tensor:
            own = outside(name)
            if own in halves:
                whole, start = halves[own]
                return half_of(tensor_of(file, path, whole), start)
            if own not in names:
                raise ModelError(f"the tensor {own!r} is not in the file that was written")
            return tensor_of(file, path, own)

        yield read
