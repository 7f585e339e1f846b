"""The command line ``quark``. Exit codes: 0 done, 1 an error of the input (one sentence on standard error), 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quark.errors import QuarkError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` are those of the process when they are not given.

    Returns:
        The exit code. An error that a user's input can cause is one sentence; anything else is a defect and shows
        itself.
    """
    from quark.cli.app import app

    try:
        app(args=None if arguments is None else list(arguments), prog_name="quark")
    except QuarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
