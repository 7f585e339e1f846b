"""Arrays come out of .npy and .npz files as NumPy put them in; what is no number never does."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from quark.errors import DataError
from quark.numerics import array_files
from quark.numerics.array_files import ArrayArchive, load_array

TYPES = ("float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64", ">f4", "bool")
SHAPES = ((), (0,), (3,), (2, 3), (4, 0, 2), (1, 2, 3, 4))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_numpy_wrote(dtype: str, shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).random(shape) * 9).astype(dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", x=array, y=array + array)
    np.savez_compressed(tmp_path / "b.npz", y=array)
    archives = ArrayArchive(tmp_path / "a.npz")["x"], ArrayArchive(tmp_path / "b.npz")["y"]
    for one in (load_array(tmp_path / "a.npy"), *archives):
        assert one.dtype == array.dtype and one.shape == array.shape
        np.testing.assert_array_equal(one, array)
    assert list(ArrayArchive(tmp_path / "a.npz")) == ["x", "y"]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format(version: tuple[int, int], tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, array, version=version)
    np.testing.assert_array_equal(load_array(tmp_path / "a.npy"), array)


@pytest.mark.parametrize("kind", ["complex64", "U3", "S3", "datetime64[s]", "object", "longdouble"])
def test_what_is_no_number_is_refused(kind: str, tmp_path: Path) -> None:
    array = np.zeros(3).astype(kind)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=array)
    text = kind in ("U3", "S3", "object")
    said = "holds text or objects .type .*Python" if text else "does not say what type and shape of numbers"
    with pytest.raises(DataError, match=said):
        load_array(tmp_path / "a.npy")
    with pytest.raises(DataError, match=f"array 'x'.*{said}"):
        ArrayArchive(tmp_path / "a.npz")["x"]


def test_archives_that_promise_what_they_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the header of one member: as many bytes as the archive has are right, one value more or less is not."""
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.float32))
    whole = (tmp_path / "a.npy").read_bytes()
    assert whole.count(b"(6,)") == 1 and whole[:8] == b"\x93NUMPY\x01\x00"

    def read(*members: bytes) -> np.ndarray:
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a name that is there twice
            for member in members:
                archive.writestr("x.npy", member)
        return ArrayArchive(tmp_path / "a.npz")["x"]

    np.testing.assert_array_equal(read(whole), np.arange(6, dtype=np.float32))
    for claimed, told in (
        (b"(5,)", "20 bytes of values, and the archive has another"),
        (b"(7,)", "28 bytes of values, and the archive has another"),
    ):
        with pytest.raises(DataError, match=told):
            read(whole.replace(b"(6,)", claimed))
    with pytest.raises(DataError, match="396 bytes of values, and the archive has another"):
        read(whole.replace(b"(6,), ", b"(99,),"))
    for shape, told in (
        ((10**18 - 1,), "takes 3999999999999999996 bytes"),
        ((10**18,), "is not valid"),
        ((2**31, 2**30 - 1), "takes 9223372028264841216 bytes"),
        ((2**31, 2**30), "is not valid"),
        ((1,) * 32, "4 bytes of values, and the archive has another"),
        ((1,) * 33, "is not valid"),
    ):
        header = whole[10:].split(b"\n")[0].replace(b"(6,)", str(shape).encode())
        with pytest.raises(DataError, match=told):
            read(whole[:8] + len(header).to_bytes(2, "little") + header + bytes(24))
    for start in (b"\x93NUMPX\x01\x00", b"\x93NUMPY\x04\x00", b"\x93NUMPY\x00\x00"):
        with pytest.raises(DataError, match="does not begin like"):
            read(start + whole[8:])
    with pytest.raises(DataError, match="does not begin like"):
        read(whole[:7])
    with pytest.raises(DataError, match="does not begin like"):
        read(b"\x93NUMPX" + whole[6:8])
    assert "x" in ArrayArchive(tmp_path / "a.npz") and "z" not in ArrayArchive(tmp_path / "a.npz")
    with pytest.raises(DataError, match="two of its arrays have one name"):
        read(whole, whole)
    monkeypatch.setattr(array_files, "WHOLE", 24)
    np.testing.assert_array_equal(read(whole), np.arange(6, dtype=np.float32))
    monkeypatch.setattr(array_files, "WHOLE", 23)
    with pytest.raises(DataError, match="it takes 24 bytes, and at most 23 are unpacked"):
        read(whole)
