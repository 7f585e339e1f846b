"""Go on where an interrupted job stopped (the option ``SaveAndRestore``).

Every long stage asks ``done(stage, key)`` before it works on something and calls ``finish(stage, key, arrays)`` after:

    arrays = resume.done("adaround", layer)
    if arrays is None:
        arrays = {"weight": tune(layer)}
        resume.finish("adaround", layer, arrays)

What is finished lies in a JSON file (which entries there are, what they belong to) and, beside it, a folder
``<name>.tensors`` with one file of raw bytes per entry. An entry is written under a new name, then the JSON file is
replaced, then the entry that it supersedes is removed: whenever the process is killed, the JSON file names whole
entries only. A file that belongs to another model or configuration is refused with the first difference.

Not handled: two processes that work on one file at the same time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers the narrow types with NumPy, by whose names arrays are read back
import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.errors import ConfigError
from quark.files.whole import replace_file
from quark.onnx import fingerprint

VERSION = 1
Arrays = dict[str, np.ndarray]


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
        self._configuration = dict(configuration or {})
        self._head = {"version": VERSION, "model": model, "configuration": self._configuration}
        self._next = 0
        self._entries: dict[str, dict[str, Any]] = {}
        if self._path is not None:
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
        entry = self._entries.get(stage, {}).get(key)
        return None if entry is None else self._read(entry)

    def finish(self, stage: str, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Remember the arrays of one entry, in place of what it held before; on disk when this returns."""
        if self._path is None:
            return
        old = self._entries.get(stage, {}).get(key)
        self._entries.setdefault(stage, {})[key] = self._write(arrays)
        self._next += 1
        state = {**self._head, "next": self._next, "entries": self._entries}
        replace_file(self._path, json.dumps(state, indent=1), "SaveAndRestore")
        if old is not None:
            (self._folder / old["file"]).unlink(missing_ok=True)

    # ---- files -------------------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        if path.suffix != ".json":
            raise ConfigError(f"SaveAndRestore is {str(path)!r}; it must be the path of a .json file")
        if not path.parent.is_dir():
            raise ConfigError(f"SaveAndRestore: the folder {str(path.parent)!r} does not exist")
        if not path.exists():
            return
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            head = state["version"], state["model"], dict(state["configuration"])
            self._next, self._entries = int(state["next"]), dict(state["entries"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._useless(f"it is no file of SaveAndRestore, or is damaged ({error})") from error
        self._check_owner(*head)

    def _check_owner(self, version: int, model: str, before: Mapping[str, str]) -> None:
        if version != VERSION:
            raise self._useless(f"it has the version {version}, and this release reads {VERSION}")
        if model != self._head["model"]:
            raise self._useless("it belongs to another model")
        now = self._configuration
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            shown = (_changed(name, before.get(name), now.get(name)) for name in changed[:3])
            raise self._useless("it belongs to another configuration: " + ", ".join(shown))

    def _useless(self, why: str) -> ConfigError:
        what = f"SaveAndRestore: {str(self._path)!r} cannot be used"
        return ConfigError(f"{what}: {why}. Remove it, or name another file")

    def _write(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """A new file with the bytes of ``arrays``, and what the JSON file says of it."""
        self._folder.mkdir(exist_ok=True)
        parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        listed = [{"name": n, "dtype": a.dtype.name, "shape": list(np.shape(arrays[n]))} for n, a in parts.items()]
        content = b"".join(array.tobytes() for array in parts.values())
        name = f"{self._next}.bin"
        replace_file(self._folder / name, content, "SaveAndRestore")
        return {"file": name, "crc32": zlib.crc32(content), "arrays": listed}

    def _read(self, entry: Mapping[str, Any]) -> Arrays:
        file = self._folder / entry["file"]
        try:
            content = file.read_bytes()
        except OSError as error:
            raise self._useless(f"{str(file)!r} is missing") from error
        if zlib.crc32(content) != entry["crc32"]:
            raise self._useless(f"{str(file)!r} is damaged")
        found, start = {}, 0
        for one in entry["arrays"]:
            dtype, count = np.dtype(one["dtype"]), int(np.prod(one["shape"], dtype=np.int64))
            flat = np.frombuffer(content, dtype, count, start)
            found[one["name"]] = flat.reshape(one["shape"]).copy()
            start += flat.nbytes
        return found


def open_resume(model: ir.Model, job: Job) -> Resume:
    """The ``Resume`` of a job on a loaded model; its weights are read only where the option is set.

    Raises:
        ConfigError: as ``Resume``.
    """
    path = job.options.SaveAndRestore
    return Resume() if path is None else Resume(path, fingerprint.of_model(model), fingerprint.of_job(job))


def _changed(name: str, before: str | None, now: str | None) -> str:
    """How a value of the configuration changed, in words."""
    path = ""
    if before is not None and now is not None:
        try:
            path, before, now = fingerprint.difference(before, now)
        except (ValueError, TypeError):  # the file was edited by hand: the value is shown as it stands there
            before = str(before)
    return f"{name}{path} was {_short(before)}, is {_short(now)}"


def _short(text: str | None) -> str:
    text = "absent" if text is None else text
    return text if len(text) <= 60 else f"{text[:57]}..."
