"""The JSON file that a job goes on with, and the one before it, until the job is over.

Every write is brought to the disk and renamed, so a kill finds a whole file. A disk that loses what it had confirmed
leaves the last write damaged: then the one before counts (before the first: a job that has done nothing yet), and what
came after it is done again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from quark.errors import QuarkError
from quark.files.untrusted import Kept, read_state
from quark.files.whole import replace_file

log = logging.getLogger(__name__)


class KeptFile(Generic[Kept]):
    """Two generations of one file.

    Args:
        path: the file.
        previous: where the one before is.
        schema: what they may hold.
        name: what users call the file.
        refuse: makes the error of a reason in words.
        empty: of a job that has done nothing yet.
    """

    def __init__(self, path: Path, previous: Path, name: str, refuse: Callable[[str], QuarkError], empty: Kept) -> None:
        self._path, self._previous, self._schema = path, previous, type(empty)
        self._name, self._refuse = name, refuse
        self._text = empty.model_dump_json(indent=1)

    def read(self, whole: Callable[[Kept], bool] = lambda state: True) -> Kept | None:
        """What was written last, or the time before; ``None`` where nothing was.

        Args:
            whole: whether everything that a state names is there.

        Raises:
            QuarkError: that of ``refuse``: there is something else.
        """
        if not os.path.lexists(self._path):
            return None
        earlier = self._read(self._previous) if os.path.lexists(self._previous) else None
        if earlier is None:
            state = read_state(self._path, self._schema, self._refuse)
        else:
            last = self._read(self._path)
            if last is None or not whole(last):
                log.warning(
                    "%s %r: its last write is damaged; going on from the one before", self._name, str(self._path)
                )
            state = last if last is not None and whole(last) else earlier
        self._text = state.model_dump_json(indent=1)
        return state

    def _read(self, path: Path) -> Kept | None:
        try:
            return read_state(path, self._schema, self._refuse)
        except QuarkError:  # the caller has another generation, or says why this one cannot be used
            return None

    def write(self, state: Kept) -> None:
        """Put ``state`` in the place of the last one, which becomes the one before."""
        text = state.model_dump_json(indent=1)
        if os.path.islink(self._previous):  # not of ours: what it points to is left alone
            self._previous.unlink()
        replace_file(self._previous, self._text, self._name)
        replace_file(self._path, text, self._name)
        self._text = text

    def settle(self) -> None:
        """The job is over: the last write is all that is kept."""
        self._previous.unlink(missing_ok=True)
