"""The options that say where samples come from, the same for every command that runs a model: one value, ``source``.

    @app.command()
    @takes_samples()
    def compare(model: ..., source: Source) -> None: ...

gives ``compare`` the options below in the place of its parameter ``source``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.cli.paths import Reads


@dataclass(frozen=True)
class Source:
    """Where samples come from, as typed; ``shapes`` and ``ranges`` of generated samples, per input name."""

    data: Path | None = None
    random: bool = False
    samples: int | None = None
    size: str | None = None
    resize: str = "stretch"
    bgr: bool = False
    scale: float = 255.0
    mean: str = "0"
    std: str = "1"
    preprocess: str | None = None
    strict: bool = False
    shapes: Mapping[str, Sequence[int]] | None = None
    ranges: Mapping[str, Sequence[float]] | None = None


_DATA = (
    "Samples: a .npz (one array per input, axis 0 counts samples), a .npy, a folder of .npy, .npz, .png, .jpg or .wav "
    "files (one file a sample), folders of such folders, or a .txt that lists files."
)
#: Field of ``Source`` -> its option and what it is when it is not given.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "data": (Annotated[Path | None, Reads(), typer.Option("--data", help=_DATA)], None),
    "random": (
        Annotated[bool, typer.Option("--random", help="Use generated data: to try things out, not for real results.")],
        False,
    ),
    "samples": (Annotated[int | None, typer.Option("--samples", min=1, help="Use only the first N samples.")], None),
    "size": (
        Annotated[str | None, typer.Option(metavar="HxW", help="Images: the size where the model leaves it open.")],
        None,
    ),
    "resize": (Annotated[str, typer.Option(help="Images: `stretch`, `letterbox` (grey bars) or `crop`.")], "stretch"),
    "bgr": (Annotated[bool, typer.Option("--bgr", help="Images: blue first, as OpenCV and Caffe have it.")], False),
    "scale": (Annotated[float, typer.Option(help="Images: 255 makes pixels 0..1, 1 leaves them 0..255.")], 255.0),
    "mean": (
        Annotated[str, typer.Option(help="Images: then subtracted; one number or one per channel, in that unit.")],
        "0",
    ),
    "std": (Annotated[str, typer.Option(help="Images: then divided by this, one number or one per channel.")], "1"),
    "preprocess": (
        Annotated[
            str | None,
            Reads(function=True),
            typer.Option(metavar="FILE.py:FUNCTION", help="Your function: path of a file → array, in place of these."),
        ],
        None,
    ),
    "strict": (
        Annotated[bool, typer.Option("--strict", help="Stop at a broken image; otherwise it is skipped and named.")],
        False,
    ),
}


def takes_samples(count: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter ``source`` of a command by the options that make it; ``count``: samples by default."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != "source"]
        kind = inspect.Parameter.KEYWORD_ONLY
        ours = [
            inspect.Parameter(name, kind, default=count if name == "samples" else default, annotation=hint)
            for name, (hint, default) in _OPTIONS.items()
        ]

        def _run(**given: Any) -> None:
            source = Source(**{name: given.pop(name) for name in _OPTIONS})
            command(**given, source=source)

        needed = [p.replace(kind=kind) for p in own if p.default is p.empty]
        every = [*needed, *ours, *(p.replace(kind=kind) for p in own if p.default is not p.empty)]
        _run.__name__, _run.__doc__, _run.__module__ = command.__name__, command.__doc__, command.__module__
        _run.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        _run.__annotations__ = {p.name: p.annotation for p in every} | {"return": None}
        return _run

    return wrap


def source_words(source: Source) -> list[str]:
    """The words of the command line that name the same samples."""
    words: list[str] = []
    for field in fields(source):
        if field.name not in _OPTIONS:
            continue
        value, flag = getattr(source, field.name), f"--{field.name}"
        if value == _OPTIONS[field.name][1]:
            continue
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words
