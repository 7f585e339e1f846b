"""Safetensors files written as their tensors are made, one at a time.

A safetensors file is [8 bytes: length n of the header][n bytes: JSON][tensors without gaps]. Shapes and types are known
before any value is (``Item.form``), so the header comes first, each tensor is written to its place when it is made, and
memory holds a few items whatever the size of the file: one is written while the next are made, in as many threads as
torch has, up to ``MAKERS``. Wider types come first, as the readers need aligned tensors.

An item is never cut: all tensors of a layer are in one file.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import torch

from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.torch.export.layout import Form

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
ALIGNMENT = 8
PAGE = 4096  # bytes of the smallest pages of memory
MAKERS = 4  # items that are made at once
SHARD_SIZE = 5_000_000_000  # bytes, as transformers has it


@dataclass(frozen=True)
class Item:
    """Tensors that are made together.

    Attributes:
        form: shape and type of each, by its full name.
        make: makes them.
    """

    form: Form
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(nbytes(*entry) for entry in self.form.values())


def item_of(name: str, value: torch.Tensor) -> Item:
    """One tensor that is there already."""
    return Item({name: (tuple(value.shape), value.dtype)}, lambda: {name: value.detach()})


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Size of a tensor."""
    return prod(shape) * dtype.itemsize


def split(items: Iterable[Item], shard_size: int) -> list[list[Item]]:
    """Items in order, in files of at most ``shard_size`` bytes (or one item)."""
    shards: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.size > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.size
    return shards


def write_shards(folder: Path, items: Iterable[Item], stem: str = "model", shard_size: int = SHARD_SIZE) -> list[str]:
    """Write ``items`` to ``folder``: ``model.safetensors``, or numbered files and their index.

    Args:
        folder: exists.
        items: tensors, in the order in which they are made.
        stem: beginning of the file names.
        shard_size: bytes of tensors in a file, unless a single item is larger.

    Returns:
        Names of the files with tensors.

    Raises:
        ModelError: two tensors of one name, or a type that safetensors does not have.
    """
    shards = split(items, shard_size)
    check_names(shards)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
        write_index(folder / f"{stem}.safetensors.index.json", shards, names)
    for shard, name in zip(shards, names, strict=True):
        write_file(folder / name, shard)
    return names


def check_names(shards: list[list[Item]]) -> None:
    """Every name once, every type known."""
    seen: set[str] = set()
    for item in (item for shard in shards for item in shard):
        for name, (_, dtype) in item.form.items():
            if name in seen:
                raise ModelError(f"two tensors have the name {name!r}")
            if dtype not in DTYPES:
                raise ModelError(f"{name!r} is {dtype}, which safetensors files cannot hold")
            seen.add(name)


def write_index(path: Path, shards: list[list[Item]], names: list[str]) -> None:
    """Which file has which tensor."""
    found = {tensor: name for shard, name in zip(shards, names, strict=True) for item in shard for tensor in item.form}
    total = sum(item.size for shard in shards for item in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(found.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, items: list[Item]) -> None:
    """One safetensors file."""
    form = {name: entry for item in items for name, entry in item.form.items()}
    header, places = header_of(form)
    with path.open("wb") as file:
        file.write(header)
        for made in made_ahead(items):
            for name, value in made.items():
                check_made(name, value, form)
                file.seek(len(header) + places[name])
                file.write(in_memory(flat_bytes(value).numpy()).data)
        file.truncate(len(header) + sum(item.size for item in items))


def is_whole(path: Path) -> bool:
    """Whether a safetensors file is there and ends where its header says."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            return False
        try:
            entries = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False
    return size == 8 + length + max(ends, default=0)


def made_ahead(items: list[Item]) -> Iterator[Mapping[str, torch.Tensor]]:
    """What each item makes, in order; while one is used, the next are made."""
    count = min(torch.get_num_threads(), MAKERS, len(items))
    if count < 2:
        yield from (item.make() for item in items)
        return
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[Future[Mapping[str, torch.Tensor]]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(item.make))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def header_of(form: Form) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where each tensor begins behind them."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in sorted(form, key=lambda name: -form[name][1].itemsize):
        shape, dtype = form[name]
        places[name], end = end, end + nbytes(shape, dtype)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, places


def check_made(name: str, value: torch.Tensor, form: Form) -> None:
    """What was made is what was announced."""
    if form.get(name) != (tuple(value.shape), value.dtype):
        raise ModelError(f"{name!r} was announced as {form.get(name)} and is {tuple(value.shape)}, {value.dtype}")


def in_memory(values: np.ndarray) -> np.ndarray:
    """``values`` (bytes), after a byte of every page was read: of tensors that are mapped from a file and were never
    looked at, the system otherwise writes a few pages at a time, which takes three times as long, and so does reading
    the new file."""
    values[::PAGE].max(initial=0)
    return values


def flat_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the CPU; a copy only where it is elsewhere or not contiguous."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
