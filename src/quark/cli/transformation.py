"""``quark onnx transform``: a list of graph passes from a YAML file."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

from quark.cli.output import print_json, say, show
from quark.errors import ConfigError, QuarkError
from quark.report import Table


def register(path: Path) -> None:
    """Run a Python file that registers passes.

    Raises:
        ConfigError: there is no such file, or it fails.
    """
    if not path.is_file():
        raise ConfigError(f"--register: there is no file {str(path)!r}")
    try:
        runpy.run_path(str(path), run_name="passes_of_your_own")
    except QuarkError:
        raise
    except Exception as error:
        raise ConfigError(f"--register: {str(path)!r} fails: {type(error).__name__}: {error}") from error


def run(model: Path, output: Path, config: str, json: bool, own: Sequence[Path] = ()) -> None:
    """Transform, and tell what each pass did; first run the files that register passes of the user's own."""
    from quark.onnx.shapeshifter import transform

    for path in own:
        register(path)
    result = transform(model, config, output)
    if json:
        print_json({one.name: {"fired": one.fired, "refused": list(one.refused)} for one in result.reports})
        return
    rows = tuple((one.name, str(one.fired), one.refused[0] if one.refused else "") for one in result.reports)
    show(Table("Passes", ("pass", "fired", "first reason where it did not"), rows))
    say(f"Written: {output}")
