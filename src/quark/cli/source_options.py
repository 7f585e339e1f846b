"""The options that say where samples come from, the same for every command that runs an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from quark.cli.common import COUNT
from quark.cli.paths import Reads
from quark.dataclass import dataclass

_DATA = (
    "Samples: a .npz (one array per input, axis 0 counts samples), a .npy, a folder of .npy, .npz, .png, .jpg or .wav "
    "files (one file a sample), folders of such folders, or a .txt that lists files."
)


@dataclass(frozen=True)
class SampleSource:
    """Where samples come from, as typed; ``shapes`` and ``ranges`` of generated samples, per input name."""

    data: Annotated[Path | None, Reads(), typer.Option("--data", help=_DATA)] = None
    random: Annotated[
        bool, typer.Option("--random", help="Use generated data: to try things out, not for real results.")
    ] = False
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, max=COUNT, help="Use only the first N samples.")
    ] = None
    size: Annotated[str | None, typer.Option(metavar="HxW", help="Images: the size, if the model does not fix it.")] = (
        None
    )
    resize: Annotated[str, typer.Option(help="Images: `stretch`, `letterbox` (grey bars) or `crop`.")] = "stretch"
    bgr: Annotated[
        bool, typer.Option("--bgr", help="Images: channels in the order blue, green, red, as in OpenCV and Caffe.")
    ] = False
    scale: Annotated[float, typer.Option(help="Images: divide pixels by this; 255 gives 0..1, 1 keeps 0..255.")] = 255.0
    mean: Annotated[str, typer.Option(help="Images: subtract this after --scale; one number, or one per channel.")] = (
        "0"
    )
    std: Annotated[str, typer.Option(help="Images: divide by this after --mean; one number, or one per channel.")] = "1"
    preprocess: Annotated[
        str | None,
        Reads(function=True),
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your function from the path of a file to an array, instead of the options of images.",
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at a broken image or sound; otherwise it is skipped and named.")
    ] = False
    shapes: Mapping[str, Sequence[int]] | None = None
    ranges: Mapping[str, Sequence[float]] | None = None


def source_words(source: SampleSource) -> list[str]:
    """The words of the command line that name the same samples."""
    words: list[str] = []
    for field in fields(source):
        value, flag = getattr(source, field.name), f"--{field.name}"
        if value == field.default or field.name in ("shapes", "ranges"):
            continue
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words
