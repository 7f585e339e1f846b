"""Reading a folder of safetensors files that somebody else may have broken.

Every file is checked before a tensor is taken from it: the header must describe the file, without gaps or overlaps, and
the index must name files of the folder. Tensors are read one at a time. Pickled weights are never opened. torch is
loaded with the first tensor: names and shapes need none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.files.atomic import check_name
from quark.reading import read_object, reason_of, regular_file
from quark.torch.export.declared import ENTRIES, declared, silent

if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"
LONGEST_NAME = 255
ADAPTER, ADAPTERS = "adapter_config.json", "adapter_model*.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a configuration and tensors.

    Attributes:
        folder: where it is.
        config: ``config.json``; how the model is quantized is in its ``quantization_config``, wherever it was said.
        files: files with tensors, and the names in each.
        dtype: that float tensors are read in; None: as they are stored.
    """

    folder: Path
    config: dict[str, object]
    files: dict[str, tuple[str, ...]]
    dtype: torch.dtype | None = None

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return {name for names in self.files.values() for name in names}

    def read(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            ModelError: there is none of this name, or it cannot be read.
        """
        for file, names in self.files.items():
            if name in names:
                with opened(self.folder / file) as source:
                    return tensor_of(source, self.folder / file, name)
        raise ModelError(f"{str(self.folder)!r} lacks the tensor {name!r}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every tensor, file after file.

        Raises:
            ModelError: a tensor that cannot be read.
        """
        for file, names in self.files.items():
            with opened(self.folder / file) as source:
                for name in names:
                    yield name, tensor_of(source, self.folder / file, name)


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint in ``folder``, checked.

    Raises:
        ModelError: no folder, no configuration, a missing, truncated or corrupt file, an index that does not fit, an
            adapter, or codes that nothing describes.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(f"{str(path)!r} is not a folder")
    check_no_adapter(path)
    config, files = read_object(path / "config.json"), weight_files(path)
    said = declared(path, config, (name for names in files.values() for name in names))
    return Checkpoint(path, silent(config) if said is None else {**silent(config), ENTRIES[0]: said}, files)


def method_of(folder: Path) -> str | None:
    """How a folder is quantized; None: it is float.

    Raises:
        ModelError: files that are broken, or codes that nothing describes.
    """
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    names = (
        [name for names in weight_files(folder).values() for name in names] if any(folder.glob(f"*{SUFFIX}")) else []
    )
    found = declared(folder, config, names)
    return None if found is None else str(found.get("quant_method"))


def check_no_adapter(folder: Path) -> None:
    """Refuse a folder whose model an adapter changes: without it the model is another one, and nothing here holds it.

    Raises:
        ModelError: it has one, or the weights of one.
    """
    if alone := sorted(path.name for path in folder.glob(ADAPTERS) if not (folder / ADAPTER).exists()):
        raise ModelError(
            f"{str(folder)!r} holds {alone[0]!r}, the weights of an adapter without {ADAPTER!r}: merge it with peft "
            f"into its model (merge_and_unload, then save_pretrained), or delete it if the model alone is meant"
        )
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{str(folder / ADAPTER)!r}: the model has an adapter, which would be lost; merge it with peft "
            f"(merge_and_unload, then save_pretrained), or delete the file if the model alone is meant"
        )


def check_pickled(folder: Path) -> None:
    """Refuse a folder of pickled weights alone, which are never loaded.

    Raises:
        ModelError: it is one.
    """
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles and not any(folder.glob(f"*{SUFFIX}")):
        raise ModelError(
            f"{str(folder / pickles[0])!r}: pickled weights are never loaded; load it with transformers where you "
            f"trust it, and write it with save_pretrained"
        )


def weight_files(folder: Path) -> dict[str, tuple[str, ...]]:
    """Files with tensors, and the names in each."""
    indexes = list(folder.glob(f"*{SUFFIX}.index.json"))
    if len(indexes) > 1:
        names = ", ".join(sorted(path.name for path in indexes))
        raise ModelError(f"{str(folder)!r} has {len(indexes)} indexes ({names})")
    if indexes:
        found, whole = indexed_files(folder, indexes[0]), indexes[0].name.removesuffix(".index.json")
        if whole not in found and (folder / whole).exists():  # transformers reads it, vLLM what the index names
            raise ModelError(
                f"{str(folder)!r} holds two models: {whole!r}, and what {indexes[0].name!r} names; delete one of them"
            )
        return found
    files = list(folder.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        check_no_adapter(folder)  # whose weights are the second file
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        hint = f"; {', '.join(pickles)} may hold pickled weights, which are never loaded" if pickles else ""
        if not pickles and any(folder.glob("*.gguf")):
            hint = "; of a GGUF file take the model that it was made of"
        there = f"{len(files)} safetensors files and no index" if files else "no safetensors file"
        raise ModelError(f"{str(folder)!r} has {there}{hint}")
    return {files[0].name: tuple(names_in(files[0]))}


def indexed_files(folder: Path, index: Path) -> dict[str, tuple[str, ...]]:
    """The files of an index."""
    entries = read_object(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ModelError(f"{str(index)!r} has no weight_map")
    files: dict[str, list[str]] = {}
    for name, file in entries.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise ModelError(
                f"{str(index)!r}: tensor {name!r:.99} is said to be in {file!r:.99}, which is not a file of the folder"
            )
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        there = names_in(folder / file)
        if missing := sorted(set(names) - set(there)):
            lost = f"{missing[0]!r:.99}"
            raise ModelError(f"{str(folder / file)!r} has no tensor {lost}, which {index.name!r} says it has")
        if more := sorted(set(there) - set(names)):
            own = entries.get(more[0])
            where = "does not name" if own is None else f"says is in {own!r}: delete one of the two"
            raise ModelError(f"{str(folder / file)!r} has a tensor {more[0]!r:.99}, which {index.name!r} {where}")
    return {file: tuple(names) for file, names in files.items()}


def _is_plain(file: str) -> bool:
    """The name of a file in a folder, on every system."""
    plain = Path(file).name == file and not any(sign in file for sign in "\\:\0")
    return plain and file.endswith(SUFFIX) and len(file.encode(errors="replace")) <= LONGEST_NAME


def opened(path: Path, framework: str = "pt") -> Any:
    """A safetensors file, its header checked; what is read are tensors of a library, "pt" or "numpy"."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ModelError(f"{str(path)!r} is missing")
    regular_file(path, ModelError)
    check_name(path, "the name of the file", ModelError)
    try:
        return safe_open(str(path), framework=framework)
    except (SafetensorError, OSError, struct.error) as error:
        raise ModelError(f"{str(path)!r} is not a whole safetensors file: {reason_of(error)}") from error


def names_in(path: Path) -> list[str]:
    """Names of the tensors of a file."""
    with opened(path, "numpy") as source:
        return list(source.keys())


def tensor_of(source: Any, path: Path, name: str) -> torch.Tensor:
    """One tensor of an open file."""
    from safetensors import SafetensorError

    try:
        return source.get_tensor(name)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ModelError(f"{str(path)!r}: tensor {name!r:.99} cannot be read: {reason_of(error)}") from error


def row_of(source: Any, path: Path, name: str, number: int) -> torch.Tensor:
    """What the first index ``number`` gives of one tensor of an open file; the rest is not read."""
    from safetensors import SafetensorError

    try:
        row: torch.Tensor = source.get_slice(name)[number]
    except (SafetensorError, RuntimeError, ValueError, IndexError) as error:
        why = reason_of(error)
        raise ModelError(f"{str(path)!r}: row {number} of tensor {name!r:.99} cannot be read: {why}") from error
    return row
