"""Damage that nobody thought of: bytes changed, taken out, doubled, cut off; numbers put where numbers are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

#: Numbers at which readers err: ends of ranges, signs, nothing.
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63)


def flip(content: bytearray, rng: Random) -> None:
    """Another bit in one byte."""
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def put_byte(content: bytearray, rng: Random) -> None:
    """Another byte."""
    content[rng.randrange(len(content))] = rng.randrange(256)


def put_number(content: bytearray, rng: Random) -> None:
    """A number of 1 to 8 bytes, in either order."""
    at, size = rng.randrange(len(content)), rng.choice("BHIQ")
    number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(size))
    content[at : at + struct.calcsize(size)] = struct.pack(rng.choice("<>") + size, number)


def take_out(content: bytearray, rng: Random) -> None:
    """Up to 64 bytes less."""
    at = rng.randrange(len(content))
    del content[at : at + rng.randint(1, 64)]


def double(content: bytearray, rng: Random) -> None:
    """Up to 64 bytes twice."""
    at = rng.randrange(len(content))
    content[at:at] = content[at : at + rng.randint(1, 64)]


def cut(content: bytearray, rng: Random) -> None:
    """The end is gone."""
    del content[rng.randrange(len(content)) :]


def move(content: bytearray, rng: Random) -> None:
    """Some bytes over others."""
    here, there, size = rng.randrange(len(content)), rng.randrange(len(content)), rng.randint(1, 64)
    content[there : there + size] = content[here : here + size]


KINDS: tuple[Callable[[bytearray, Random], None], ...] = (
    *(flip, flip, put_byte, put_byte, put_number, put_number),
    *(take_out, double, cut, move),
)


def mutated(content: bytes, seed: int) -> bytes:
    """The content with one to four changes that the seed decides."""
    rng, changed = Random(seed), bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if changed:
            rng.choice(KINDS)(changed, rng)
    return bytes(changed)


def mutate_files(make: Callable[[Path], None], seed: int, folder: Path) -> None:
    """What a cause writes, its files mutated."""
    make(folder)
    files = sorted(one for one in folder.rglob("*") if one.is_file() and not one.is_symlink())
    for index, path in enumerate(files):
        path.write_bytes(mutated(path.read_bytes(), seed + index))
