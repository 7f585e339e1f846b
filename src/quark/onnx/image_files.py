"""PNG and JPEG files as arrays of 8-bit pixels. The one place that opens images.

Not handled: more than 8 bits per channel, which Pillow would cut off above 255; other formats; several images a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quark.errors import DataError
from quark.reading import reason_of, regular_file

IMAGES = (".png", ".jpg", ".jpeg")
GREY = 114
"""Of the bars that ``letterbox`` leaves, as detectors are trained with."""
PIXELS = 2**26
"""Of one image: a file of some kilobytes can unpack to any number."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow's names of what has at most 8 bits per channel."""
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, OverflowError, MemoryError),
    *(TypeError, IndexError, KeyError, AttributeError),
)
"""What Pillow's plugins raise on files that are cut or changed."""


def pillow() -> ModuleType:
    """Pillow's ``Image``.

    Raises:
        DataError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow: pip install pillow") from error
    return Image


class UnreadableImage(DataError):
    """A file that is not a picture, or a damaged one."""


def read_image(
    path: Path,
    mode: str | None = None,
    size: tuple[int | None, int | None] = (None, None),
    resize: str = "stretch",
) -> np.ndarray:
    """One image as uint8.

    Args:
        mode: "L" (grey) or "RGB"; None: as it is stored.
        size: (height, width) to resize to; None leaves a side as it is.
        resize: "stretch"; "letterbox": shrunk or grown to fit, grey 114 on both sides; "crop": filled, both sides cut.

    Returns:
        ``[height, width, channels]``; with ``mode`` None ``[height, width]`` or ``[height, width, channels]``.

    Raises:
        UnreadableImage: no regular file, damaged, no PNG or JPEG, more than 8 bits per channel, or more than
            ``PIXELS``.
    """
    with _opened(path, ("PNG", "JPEG"), "image") as opened:
        if opened.mode not in MODES:
            raise ValueError(f"Pillow's mode {opened.mode}: its channels have more than 8 bits, convert it first")
        shown = opened.convert(mode) if mode else opened
        wanted = (size[1] or shown.width, size[0] or shown.height)
        pixels = np.asarray(_fitted(shown, wanted, resize, pillow().Resampling.BILINEAR))
    return pixels.reshape(*pixels.shape[:2], -1) if mode else pixels


def read_mask(path: Path, size: tuple[int, int], resize: str, around: int) -> np.ndarray:
    """The class of every pixel, uint8 [height, width], in the place where ``read_image`` puts the picture's pixels.

    Args:
        path: a .png file with one channel, or a palette whose indices are the classes.
        size: (height, width).
        resize: as of ``read_image``.
        around: the class of pixels that ``letterbox`` adds.

    Raises:
        UnreadableImage: no regular file, damaged, or of several channels, or of more than ``PIXELS``.
    """
    image = pillow()
    with _opened(path, ("PNG",), "mask") as opened:
        if opened.mode not in ("L", "P", "1"):
            raise ValueError(f"Pillow's mode {opened.mode}: a mask has one channel of 8 bits")
        shown = opened if opened.mode == "L" else image.fromarray(np.asarray(opened).astype(np.uint8), "L")
        return np.asarray(_fitted(shown, (size[1], size[0]), resize, image.Resampling.NEAREST, around))


@contextmanager
def _opened(path: Path, formats: tuple[str, ...], what: str) -> Iterator[Any]:
    """A picture whose pixels are not read yet; whatever it turns out to be while they are is an ``UnreadableImage``."""
    image = pillow()
    regular_file(path, UnreadableImage, f"the {what}")
    try:
        with image.open(path, formats=formats) as opened:
            if opened.width * opened.height > PIXELS:
                raise ValueError(f"it has {opened.width} x {opened.height} pixels; at most {PIXELS} are taken")
            yield opened
    except (*_DAMAGED, image.DecompressionBombError) as error:
        raise UnreadableImage(f"{str(path)!r} is not a readable {what}: {reason_of(error)}") from error


def _fitted(shown: Any, wanted: tuple[int, int], resize: str, method: Any, around: int = GREY) -> Any:
    """A picture of ``wanted`` (width, height)."""
    if wanted == shown.size:
        return shown
    if resize == "stretch":
        return shown.resize(wanted, method)
    choose = min if resize == "letterbox" else max
    factor = choose(side / own for side, own in zip(wanted, shown.size, strict=True))
    least = (1, 1) if resize == "letterbox" else wanted
    width, height = (max(low, round(own * factor)) for low, own in zip(least, shown.size, strict=True))
    left, top = (wanted[0] - width) // 2, (wanted[1] - height) // 2
    canvas = shown.resize((width, height), method)
    if resize == "crop":
        return canvas.crop((-left, -top, wanted[0] - left, wanted[1] - top))
    framed = shown.copy().resize(wanted)
    framed.paste(around if len(shown.getbands()) == 1 else (around,) * len(shown.getbands()), (0, 0, *wanted))
    framed.paste(canvas, (left, top))
    return framed
