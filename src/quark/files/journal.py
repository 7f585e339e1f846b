"""What a long job has finished, so that one that was killed goes on where it was.

    {"version": 2, "belongs": {"model": digest, …}, "next": 2,
     "values": {"conv1 as A8W8": {"sqnr": 31.2}},
     "tensors": {"adaround conv1": {"file": "1.safetensors", "crc32": …, "size": …, "types": {}}}}

Every long stage asks before it works on something, and keeps what came of it:

    arrays = journal.arrays(key)
    if arrays is None:
        arrays = {"weight": tune(layer)}
        journal.finish_arrays(key, arrays)

A journal is a JSON file and, where entries hold tensors, a folder ``<name>.tensors`` beside it with a safetensors file
for each of them. An entry is written under a new name, then the JSON file is replaced, and an entry that nothing names
any more is removed. Every write is brought to the disk and renamed, so a kill finds whole files. A disk that loses what
it had confirmed leaves the last write damaged: then the generation before it counts (``.<name>.previous``; before the
first: a job that has done nothing yet), and what came after it is done again.

A journal of another job is refused with what differs; so is one that names files elsewhere. One process writes it
(workers hand their results to the one that has it).
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - registers the narrow types with NumPy, by whose names arrays are read back
import numpy as np

from quark.deferred import when_used
from quark.errors import ConfigError, DataError
from quark.files.atomic import part_of, replace_file
from quark.files.identity import PIECE, difference
from quark.files.lock import working_on
from quark.files.untrusted import own_file

if TYPE_CHECKING:
    from quark.files import journal_state as kept
else:
    kept = when_used("quark.files.journal_state")  # of no use to jobs that keep nothing, which are most

log = logging.getLogger(__name__)
VERSION = 2
SUFFIX = ".safetensors"
FIRST = (f"0{SUFFIX}", f".0{SUFFIX}.part")
"""What the folder of tensors may hold before the JSON file names the first of them."""
Arrays = dict[str, np.ndarray]


class Journal:
    """What is finished of one job. Without a path it keeps values as long as it lives, and no tensors.

    Args:
        path: the JSON file, or ``None``.
        belongs: what the entries belong to, by name, in comparable words.
        name: what users call the file.
        remedy: what they can do where it cannot be used.

    Raises:
        ConfigError: the file belongs to another job, is damaged, or its folder does not exist.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        belongs: Mapping[str, str] | None = None,
        name: str = "the ledger",
        remedy: str = "Remove it, or name another file",
    ) -> None:
        self._path, self._name, self._remedy = None if path is None else Path(path), name, remedy
        self._values: dict[str, Any] = {}
        self._stale: list[str] = []
        if self._path is not None:  # without a file, nobody asks for the state, whose schema takes a while to build
            self._state = kept.State(version=VERSION, belongs=dict(belongs or {}), next=0, values={}, tensors={})
            self._text = self._state.model_dump_json(indent=1)
            self._open(self._path)

    def __bool__(self) -> bool:
        """Whether anything outlives the process."""
        return self._path is not None

    @staticmethod
    def held(path: str | os.PathLike[str] | None, name: str = "the ledger") -> AbstractContextManager[None]:
        """No other process works on the file meanwhile.

        Raises:
            OutputError: another one does.
        """
        return working_on(None if path is None else Path(path), name)

    # ---- values ------------------------------------------------------------------------------------------------------

    def done(self, key: str, kind: Any, one_of: Sequence[str] = ()) -> Any:
        """What ``finish`` was given; ``None`` where that is still to be done.

        Args:
            key: of the entry.
            kind: what it is: a type that pydantic knows.
            one_of: keys of a mapping, one of which it has.

        Raises:
            ConfigError: the file has something else there.
        """
        known = self._values.get(key)
        if known is None:
            return None
        found = kept.valid(known, kind, lambda why: self._useless(f"its entry {key!r:.80} is not valid: {why}"))
        if one_of and not any(name in found for name in one_of):
            raise self._useless(f"its entry {key!r:.80} has no {one_of[0]!r}")
        return found

    def finish(self, key: str, value: Any) -> None:
        """Keep an entry; on disk when this returns. Numbers that JSON lacks become words and come back."""
        self._values[key] = value
        if self._path is not None:
            self._write(self._path, {"values": {**self._state.values, key: _written(value)}})

    def number(self, key: str, measure: Callable[[], float]) -> float:
        """What is known under ``key``; measured, and kept, where nothing is."""
        known = self.done(key, float)
        if known is None:
            known = measure()
            self.finish(key, known)
        return float(known)

    def same(self, what: str, digest: bytes) -> None:
        """Keep an input that comes while the job runs, or compare it with the one that came before.

        Raises:
            DataError: another one came before.
        """
        known = self.done(f"input: {what}", str)
        if known is None:
            self.finish(f"input: {what}", digest.hex())
        elif known != digest.hex():
            raise DataError(f"{self._name}: {what} are not those of before; give the same ones, or name another file")

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def arrays(self, key: str) -> Arrays | None:
        """The arrays that ``finish_arrays`` was given, with their types; ``None`` where that is still to be done.

        Raises:
            ConfigError: the entry's file is missing or damaged.
        """
        file = self.file(key)
        if file is None:
            return None
        from safetensors import SafetensorError
        from safetensors.numpy import load

        types = self._state.tensors[key].types
        try:
            found = load(file.read_bytes())
            return {name: _typed(array, types.get(name)) for name, array in found.items()}
        except (SafetensorError, TypeError, ValueError, KeyError) as error:
            raise self._useless(f"{str(file)!r} holds no tensors that can be read ({error})") from error

    def finish_arrays(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the arrays of one entry, in place of what it held before; on disk when this returns."""
        from safetensors.numpy import save_file

        plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        types = {name: array.dtype.name for name, array in plain.items() if array.dtype.kind == "V"}
        plain |= {name: plain[name].view(f"u{plain[name].itemsize}") for name in types}
        self.finish_file(key, lambda part: save_file(plain, part), types)

    def file(self, key: str) -> Path | None:
        """The safetensors file of an entry; ``None`` where that is still to be done.

        Raises:
            ConfigError: it is missing or damaged.
        """
        entry = None if self._path is None else self._state.tensors.get(key)
        if entry is None or self._path is None:
            return None
        file = own_file(self._folder(self._path), entry.file, self._useless)
        if not file.is_file():
            raise self._useless(f"{str(file)!r} is missing")
        if file.stat().st_size != entry.size or _crc32(file) != entry.crc32:
            raise self._useless(f"{str(file)!r} is damaged")
        return file

    def finish_file(
        self, key: str, write: Callable[[Path], None], types: Mapping[str, str] | None = None
    ) -> Path | None:
        """Keep the safetensors file that ``write`` makes under the path that it is given; where it is then.

        Args:
            key: of the entry, in place of what it held before.
            write: writes the file.
            types: of tensors that lie in it as unsigned numbers of their width, by NumPy's names.
        """
        if self._path is None:
            return None
        from safetensors import SafetensorError

        folder, number = self._folder(self._path), self._state.next
        folder.mkdir(exist_ok=True)
        file = own_file(folder, f"{number}{SUFFIX}", self._useless)
        with part_of(file, SafetensorError) as part:
            write(part)
        made = kept.Tensors(file=file.name, crc32=_crc32(file), size=file.stat().st_size, types=dict(types or {}))
        old = self._state.tensors.get(key)
        self._write(self._path, {"next": number + 1, "tensors": {**self._state.tensors, key: made}})
        self._remove_stale()
        self._stale = [] if old is None else [old.file]
        return file

    def forget(self, key: str) -> None:
        """Remove the tensors of an entry, where there are any; their file goes with the next that is kept."""
        if self._path is not None and (old := self._state.tensors.get(key)) is not None:
            left = {name: entry for name, entry in self._state.tensors.items() if name != key}
            self._write(self._path, {"tensors": left})
            self._remove_stale()
            self._stale = [old.file]

    # ---- the job -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the file there, before anything is finished."""
        if self._path is not None and not os.path.lexists(self._path):
            self._write(self._path, {})

    @property
    def is_empty(self) -> bool:
        """Whether nothing is finished."""
        return not self._values and (self._path is None or not self._state.tensors)

    def settle(self) -> None:
        """The job is over: what only the last write but one needs is removed."""
        if self._path is not None:
            self._previous(self._path).unlink(missing_ok=True)
            self._remove_stale()

    def remove(self) -> None:
        """The job is over, and nothing of it is kept. Killed meanwhile, it has done nothing yet."""
        if self._path is not None:
            if self._state.tensors:
                for _ in range(2):  # no generation names a file that is gone
                    self._write(self._path, {"values": {}, "tensors": {}})
            shutil.rmtree(self._folder(self._path), ignore_errors=True)
            self._previous(self._path).unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

    # ---- files -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _folder(path: Path) -> Path:
        """Where the tensors are."""
        return path.with_name(f"{path.stem}.tensors")

    @staticmethod
    def _previous(path: Path) -> Path:
        """The generation before the last."""
        return path.with_name(f".{path.name}.previous")

    def _open(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ConfigError(f"{self._name} {str(path)!r}: the folder {str(path.parent)!r} does not exist")
        if os.path.islink(self._folder(path)):  # what it leads to is somebody's, and files in it are removed
            raise self._useless(f"has its tensors in {str(self._folder(path))!r}, which is a link")
        if not os.path.lexists(path):
            self._check_folder(self._folder(path))
            return
        state = self._read(path)
        if state.version != VERSION:
            raise self._useless(f"it has the version {state.version}, and this release reads {VERSION}")
        if (other := difference(state.belongs, self._state.belongs)) is not None:
            raise self._useless(f"it belongs to {other}")
        self._state, self._text = state, state.model_dump_json(indent=1)
        self._values = {key: _read(value) for key, value in state.values.items()}

    def _read(self, path: Path) -> kept.State:
        """What was written last, or the time before."""
        earlier = self._generation(self._previous(path))
        if earlier is None or os.path.islink(path):  # a link to what is no journal is not written through
            return kept.read(path, self._strange)
        last = self._generation(path)
        if last is not None and self._is_whole(last):
            return last
        log.warning("%s %r: its last write is damaged; going on from the one before", self._name, str(path))
        return earlier

    def _generation(self, path: Path) -> kept.State | None:
        """A state that can be read."""
        try:
            return kept.read(path, self._strange) if os.path.lexists(path) else None
        except ConfigError:  # the caller has another generation, or says why this one cannot be used
            return None

    def _is_whole(self, state: kept.State) -> bool:
        """Whether the file that was written last has all its bytes."""
        last = f"{state.next - 1}{SUFFIX}"
        found = [entry for entry in state.tensors.values() if entry.file == last]
        try:
            return all((self._folder(self._path or Path()) / last).stat().st_size == entry.size for entry in found)
        except OSError:
            return False

    def _write(self, path: Path, update: Mapping[str, Any]) -> None:
        """Put the state in the place of the last one, which becomes the one before."""
        state = self._state.model_copy(update=dict(update))
        text, previous = state.model_dump_json(indent=1), self._previous(path)
        if os.path.islink(previous):  # not of ours: what it points to is left alone
            previous.unlink()
        replace_file(previous, self._text, self._name)
        replace_file(path, text, self._name)
        self._state, self._text = state, text

    def _remove_stale(self) -> None:
        for name in self._stale:
            own_file(self._folder(self._path or Path()), name, self._useless).unlink(missing_ok=True)

    def _check_folder(self, folder: Path) -> None:
        """Raise where the folder is somebody's: without the JSON file, only the first entry can be of ours."""
        there = sorted(os.listdir(folder)) if folder.is_dir() else []
        strange = [name for name in there if name not in FIRST]
        if strange:
            raise ConfigError(
                f"{self._name}: the folder {str(folder)!r} holds {strange[0]!r}, which is not of this job; "
                "name another file"
            )

    def _strange(self, why: str) -> ConfigError:
        return self._useless(f"is not a journal of a job, or {why}")

    def _useless(self, why: str) -> ConfigError:
        why = why.removeprefix("it ")
        return ConfigError(f"{self._name} {str(self._path)!r} cannot be used: it {why}. {self._remedy}")


def _crc32(path: Path) -> int:
    """Of a file's content."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def _typed(array: np.ndarray, name: str | None) -> np.ndarray:
    """An array of our own, in the type that safetensors could not name."""
    return array.copy() if name is None else array.copy().view(np.dtype(name))


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
