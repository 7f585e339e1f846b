"""Go on where an interrupted job stopped (the option ``SaveAndRestore``).

Every long stage asks ``done(stage, key)`` before it works on something and calls ``finish(stage, key, arrays)`` after:

    arrays = resume.done("adaround", layer)
    if arrays is None:
        arrays = {"weight": tune(layer)}
        resume.finish("adaround", layer, arrays)

What is finished lies in a JSON file (which entries there are, what they belong to) and, beside it, a folder
``<name>.tensors`` with one file of raw bytes per entry. An entry is written under a new name, then the JSON file is
replaced, and an entry that nothing names any more is removed: whenever the process is killed, the JSON file names whole
entries only (``quark.files.kept``: and so does the one before it). A file that belongs to another model or
configuration is refused with the first difference; so is one that names files elsewhere. One process works on a file.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import ml_dtypes  # noqa: F401 - registers the narrow types with NumPy, by whose names arrays are read back
import numpy as np
import onnx_ir as ir
from pydantic import Field

from quark.config.job import Job
from quark.errors import ConfigError, DataError
from quark.files.identity import digest_of_file
from quark.files.kept import KeptFile
from quark.files.untrusted import FileName, Schema, own_file
from quark.files.whole import replace_file
from quark.onnx import fingerprint
from quark.reading import DAMAGED_TEXT

VERSION = 1
Arrays = dict[str, np.ndarray]
PREVIOUS = "previous.json"
FIRST = ("0.bin", PREVIOUS, ".0.bin.part", f".{PREVIOUS}.part")
"""What the folder of tensors may hold before the JSON file is there for the first time."""
INPUTS = "inputs"
ENTRY = r"^\d{1,12}\.bin$"


class Stored(Schema):
    """One array of an entry."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0, le=1 << 48)], ...] = Field(strict=False)


class Entry(Schema):
    """The arrays of one entry, one behind the other in a file of the folder."""

    file: FileName = Field(pattern=ENTRY)
    crc32: int
    size: int = Field(ge=0)
    arrays: tuple[Stored, ...] = Field(strict=False)


class State(Schema):
    """What the JSON file may hold."""

    version: int
    model: str
    configuration: dict[str, str]
    next: int = Field(ge=0, le=10**9)
    entries: dict[str, dict[str, Entry]]


class Resume:
    """What is finished of one job; without a path it remembers nothing, and every stage starts from the beginning.

    Args:
        path: the JSON file, or ``None``.
        model: digest of the model, of ``quark.onnx.fingerprint``.
        configuration: of ``quark.onnx.fingerprint``.

    Raises:
        ConfigError: the file belongs to another job, is damaged, or its folder does not exist.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        model: str = "",
        configuration: Mapping[str, str] | None = None,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._state = State(version=VERSION, model=model, configuration=dict(configuration or {}), next=0, entries={})
        self._stale: list[str] = []
        if self._path is not None:
            self._kept = KeptFile(self._path, self._folder / PREVIOUS, "SaveAndRestore", self._strange, self._state)
            self._open(self._path)

    def __bool__(self) -> bool:
        """Whether anything is remembered at all."""
        return self._path is not None

    @property
    def _folder(self) -> Path:
        """Where the tensors are."""
        path = self._path or Path()
        return path.with_name(path.stem + ".tensors")

    def done(self, stage: str, key: str) -> Arrays | None:
        """The arrays that ``finish`` was given, with their types; ``None`` where that is still to be done.

        Raises:
            ConfigError: the entry's file is missing or damaged.
        """
        entry = self._state.entries.get(stage, {}).get(key)
        return None if entry is None else self._read(entry)

    def finish(self, stage: str, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Remember the arrays of one entry, in place of what it held before; on disk when this returns."""
        if self._path is None:
            return
        before, entry = self._state, self._write(arrays)
        entries = {**before.entries, stage: {**before.entries.get(stage, {}), key: entry}}
        self._state = before.model_copy(update={"next": before.next + 1, "entries": entries})
        self._kept.write(self._state)
        self._remove_stale()
        old = before.entries.get(stage, {}).get(key)
        self._stale = [] if old is None else [old.file]

    def same(self, what: str, digest: bytes) -> None:
        """Remember an input that comes while the job runs, or compare it with the one that came before.

        Raises:
            DataError: another one came before.
        """
        known = self.done(INPUTS, what)
        if known is None:
            self.finish(INPUTS, what, {"digest": np.frombuffer(digest, np.uint8)})
        elif known["digest"].tobytes() != digest:
            raise DataError(f"SaveAndRestore: {what} are not those of before; give the same ones, or name another file")

    def settle(self) -> None:
        """The job is over: what only the last write but one needs is removed."""
        if self._path is not None:
            self._kept.settle()
            self._remove_stale()

    # ---- files -------------------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        if path.suffix != ".json":
            raise ConfigError(f"SaveAndRestore is {str(path)!r}; it must be the path of a .json file")
        if not path.parent.is_dir():
            raise ConfigError(f"SaveAndRestore: the folder {str(path.parent)!r} does not exist")
        state = self._kept.read(self._is_whole)
        if state is None:
            self._check_folder()
            return
        if state.version != VERSION:
            raise self._useless(f"it has the version {state.version}, and this release reads {VERSION}")
        if state.model != self._state.model:
            raise self._useless("it belongs to another model")
        before, now = state.configuration, self._state.configuration
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            shown = (_changed(name, before.get(name), now.get(name)) for name in changed[:3])
            raise self._useless("it belongs to another configuration: " + ", ".join(shown))
        self._state = state

    def _check_folder(self) -> None:
        """Raise where the folder is somebody's: without the JSON file, only the first entry can be of ours."""
        there = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        strange = [name for name in there if name not in FIRST]
        if strange:
            raise ConfigError(
                f"SaveAndRestore: the folder {str(self._folder)!r} holds {strange[0]!r}, which is not of this job; "
                "name another file"
            )

    def _is_whole(self, state: State) -> bool:
        """Whether the entry that was written last has all its bytes."""
        last = f"{state.next - 1}.bin"
        found = [entry for stage in state.entries.values() for entry in stage.values() if entry.file == last]
        try:
            return all((self._folder / last).stat().st_size == entry.size for entry in found)
        except OSError:
            return False

    def _useless(self, why: str) -> ConfigError:
        what = f"SaveAndRestore: {str(self._path)!r} cannot be used"
        return ConfigError(f"{what}: it {why.removeprefix('it ')}. Remove it, or name another file")

    def _strange(self, why: str) -> ConfigError:
        return self._useless(f"is no file of SaveAndRestore, or {why}")

    def _remove_stale(self) -> None:
        for name in self._stale:
            own_file(self._folder, name, self._useless).unlink(missing_ok=True)

    def _write(self, arrays: Mapping[str, np.ndarray]) -> Entry:
        """A new file with the bytes of ``arrays``, and what the JSON file says of it."""
        self._folder.mkdir(exist_ok=True)
        parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        listed = [Stored(name=n, dtype=a.dtype.name, shape=np.shape(arrays[n])) for n, a in parts.items()]
        content = b"".join(array.tobytes() for array in parts.values())
        path = own_file(self._folder, f"{self._state.next}.bin", self._useless)
        replace_file(path, content, "SaveAndRestore")
        return Entry(file=path.name, crc32=zlib.crc32(content), size=len(content), arrays=tuple(listed))

    def _read(self, entry: Entry) -> Arrays:
        file = own_file(self._folder, entry.file, self._useless)
        if not file.is_file():
            raise self._useless(f"{str(file)!r} is missing")
        content = file.read_bytes() if file.stat().st_size == entry.size else b""
        if zlib.crc32(content) != entry.crc32 or len(content) != entry.size:
            raise self._useless(f"{str(file)!r} is damaged")
        found, start = {}, 0
        for one in entry.arrays:
            try:
                dtype, count = np.dtype(one.dtype), math.prod(one.shape)
                flat = np.frombuffer(content, dtype, count, start)
            except (TypeError, ValueError) as error:
                raise self._useless(f"names {one.name!r:.80} wrongly ({error})") from error
            found[one.name] = flat.reshape(one.shape).copy()
            start += flat.nbytes
        return found


def open_resume(model: ir.Model, job: Job, files: Iterable[tuple[str, Path]] = ()) -> Resume:
    """The ``Resume`` of a job on a loaded model; its weights are read only where the option is set.

    Args:
        model: the float model.
        job: how it is quantized.
        files: what the configuration reads, by name; their contents count.

    Raises:
        ConfigError: as ``Resume``.
    """
    path = job.options.SaveAndRestore
    if path is None:
        return Resume()
    contents = {f"content of {name}": digest_of_file(file) for name, file in files}
    return Resume(path, fingerprint.of_model(model), {**fingerprint.of_job(job), **contents})


def _changed(name: str, before: str | None, now: str | None) -> str:
    """How a value of the configuration changed, in words."""
    path = ""
    if before is not None and now is not None:
        try:
            path, before, now = fingerprint.difference(before, now)
        except (*DAMAGED_TEXT, TypeError):  # the file was edited by hand: the value is shown as it stands there
            before = str(before)
    return f"{name}{path} was {_short(before)}, is {_short(now)}"


def _short(text: str | None) -> str:
    text = "absent" if text is None else text
    return text if len(text) <= 60 else f"{text[:57]}..."
