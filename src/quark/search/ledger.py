"""What a search has finished, in a JSON file, so that one that was killed goes on where it was.

    {"version": 1, "belongs": {"model": digest, "data": digest, …}, "done": {key: {…}, …}}

The file is replaced as a whole after every entry (written beside it, then renamed), so it is complete whenever it is
there. One that belongs to another model, other data or another configuration is refused with the first difference.

One process writes a file (workers hand their results to the one that has the ledger); another one is refused.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from quark.errors import ConfigError
from quark.files.identity import difference
from quark.files.kept import KeptFile
from quark.files.lock import working_on
from quark.files.untrusted import Schema, first_reason
from quark.measure.score import Score

VERSION = 1
#: A number of a trial; one that JSON lacks, in words.
Number = int | float | dict[Literal["float"], Literal["inf", "-inf", "nan"]]
Kept = str | Number


class State(Schema):
    """What the file may hold."""

    version: int
    belongs: dict[str, str]
    done: dict[str, Kept | list[Kept] | dict[str, Kept | list[Kept]]]


class _Score(Schema):
    """A metric in a file: as ``Score``."""

    value: float
    without: list[float]


def plan_key(layers: Sequence[str], plan: Sequence[str], metric: str, data: str) -> str:
    """The entry of a whole plan (a candidate for each layer) that is measured by ``metric`` on data of this digest."""
    named = "\n".join(f"{layer} as {name}" for layer, name in zip(layers, plan, strict=True))
    return f"plan {hashlib.blake2b(named.encode(), digest_size=8).hexdigest()} {metric} on {data}"


class Ledger:
    """Finished entries; without a path they are forgotten with the process.

    Args:
        path: the JSON file, or ``None``.
        belongs: what the entries belong to, by name, in comparable words.

    Raises:
        ConfigError: the file belongs to something else, is damaged, or its folder does not exist.
    """

    def __init__(self, path: str | os.PathLike[str] | None, belongs: Mapping[str, str]) -> None:
        self._path, self._belongs = None if path is None else Path(path), dict(belongs)
        self._done: dict[str, Any] = {}
        if self._path is not None:
            previous = self._path.with_name(f".{self._path.name}.previous")
            empty = State(version=VERSION, belongs=self._belongs, done={})
            self._kept = KeptFile(self._path, previous, "the ledger", self._strange, empty)
            self._open(self._path)

    def done(self, key: str, kind: Any, one_of: Sequence[str] = ()) -> Any:
        """What ``finish`` was given; ``None`` where that is still to be done.

        Args:
            key: of the entry.
            kind: what it is: a type that pydantic knows.
            one_of: keys of a mapping, one of which it has.

        Raises:
            ConfigError: the file has something else there.
        """
        known = self._done.get(key)
        if known is None:
            return None
        try:
            found = TypeAdapter(kind).validate_python(known, strict=True)
        except ValidationError as error:
            raise self._useless(f"its entry {key!r:.80} is none: {first_reason(error)}") from error
        if one_of and not any(name in found for name in one_of):
            raise self._useless(f"its entry {key!r:.80} has no {one_of[0]!r}")
        return found

    def finish(self, key: str, value: Any) -> None:
        """Remember an entry; on disk when this returns. Numbers that JSON lacks become words and come back."""
        self._done[key] = value
        if self._path is None:
            return
        self._kept.write(State(version=VERSION, belongs=self._belongs, done=_written(self._done)))

    def settle(self) -> None:
        """The work is over: only the last write is kept."""
        if self._path is not None:
            self._kept.settle()

    @staticmethod
    def held(path: str | os.PathLike[str] | None) -> AbstractContextManager[None]:
        """No other process works on the file meanwhile.

        Raises:
            OutputError: another one does.
        """
        return working_on(None if path is None else Path(path), "the ledger")

    def number(self, key: str, measure: Callable[[], float]) -> float:
        """What is known under ``key``; measured, and remembered, where nothing is."""
        known = self.done(key, float)
        if known is None:
            known = measure()
            self.finish(key, known)
        return float(known)

    def score(self, key: str, measure: Callable[[], Score]) -> Score:
        """The same of a metric with what tells how far it is chance."""
        known = self.done(key, _Score)
        if known is None:
            found = measure()
            self.finish(key, {"value": found.value, "without": list(found.without)})
            return found
        return Score(known.value, tuple(known.without))

    def __len__(self) -> int:
        return len(self._done)

    def _open(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ConfigError(f"the ledger {str(path)!r}: the folder {str(path.parent)!r} does not exist")
        state = self._kept.read()
        if state is None:
            return
        if state.version != VERSION:
            raise self._useless(f"it has the version {state.version}, and this release reads {VERSION}")
        if (other := difference(state.belongs, self._belongs)) is not None:
            raise self._useless(f"it belongs to {other}")
        self._done = {key: _read(value) for key, value in state.done.items()}

    def _strange(self, why: str) -> ConfigError:
        return self._useless(f"is no ledger of a search, or {why}")

    def _useless(self, why: str) -> ConfigError:
        why = why.removeprefix("it ")
        return ConfigError(f"the ledger {str(self._path)!r} cannot be used: it {why}. Remove it, or name another file")


_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _written(value: Any) -> Any:
    """``value`` as strict JSON: ``{"float": "inf"}`` for what is not finite."""
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(item) for item in value]
    return {"float": str(float(value))} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"float"}:
            return _WORDS[value["float"]]
        return {key: _read(item) for key, item in value.items()}
    return [_read(item) for item in value] if isinstance(value, list) else value
