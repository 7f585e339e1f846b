"""Functions and files of the user's, which run inside of ours: what they raise becomes one sentence with their line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import ConfigError, QuarkError

OURS = str(Path(__file__).parent)


@contextmanager
def users_code(who: str, file: str = "") -> Iterator[None]:
    """What is raised within the block becomes a ``ConfigError``, whose cause it is; errors of this package stay.

    Args:
        who: whose code runs, in words.
        file: where it is; empty: in the first file on the way down that is none of this package.
    """
    try:
        yield
    except QuarkError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() would end the command as if all were done
        raise said(who, error, file) from error


def said(who: str, error: BaseException, file: str = "") -> ConfigError:
    """The sentence about what was raised; arguments of ``users_code``."""
    lines = lines_of(error)
    file = file or next((name for name, _ in lines if not name.startswith(OURS)), "")
    inside = [line for name, line in lines if name == file]
    line = error.lineno if isinstance(error, SyntaxError) else inside[-1] if inside else None
    where = "" if line is None else f" in line {line} of {Path(file).name}"
    return ConfigError(f"{who} raised {type(error).__name__}{where}: {error}")


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """Files and lines on the way down to where it was raised."""
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
