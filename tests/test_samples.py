"""What ``--data`` may name, and what is said when it does not fit."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from quark.cli.sources import FileSamples, find_samples
from quark.errors import DataError
from quark.onnx.data import ModelInput
from quark.onnx.preprocessing import Preprocessing

IMAGE = ModelInput("image", (None, 3, 4, 5), np.dtype(np.float32))
IDS = ModelInput("ids", (2, 7), np.dtype(np.int64))
RATE = ModelInput("rate", (), np.dtype(np.int64))


def shapes(samples: FileSamples) -> list[dict[str, tuple[int, ...]]]:
    return [{name: array.shape for name, array in feed.items()} for feed in samples]


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (6, 1, 3, 4, 5)])
def test_npz_counts_samples_along_axis_0(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.savez(tmp_path / "d.npz", image=values, labels=np.zeros(6))
    samples = find_samples(tmp_path / "d.npz", [IMAGE])
    assert len(samples) == 6
    assert shapes(samples) == [{"image": (1, 3, 4, 5)}] * 6
    np.testing.assert_array_equal(list(samples)[4]["image"].ravel(), values[4].ravel())


def test_fixed_batch_takes_that_many_rows_a_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", ids=np.arange(42).reshape(6, 7), rate=np.full(3, 16000))
    samples = find_samples(tmp_path / "d.npz", [IDS, RATE])
    assert shapes(samples) == [{"ids": (2, 7), "rate": ()}] * 3
    assert list(samples)[1]["ids"][0, 0] == 14


def test_single_npy_and_samples_can_be_iterated_again(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.zeros((2, 3, 4, 5)))
    samples = find_samples(tmp_path / "d.npy", [IMAGE])
    assert shapes(samples) == shapes(samples) == [{"image": (1, 3, 4, 5)}] * 2
    assert next(iter(samples))["image"].dtype == np.float32
    assert len(samples.first(1)) == 1 and len(samples.first(None)) == 2


def test_folder_of_npy_in_order_of_names(tmp_path: Path) -> None:
    for number in (1, 0):
        np.save(tmp_path / f"{number}.npy", np.full((3, 4, 5), number, np.float32))
    values = [feed["image"][0, 0, 0, 0] for feed in find_samples(tmp_path, [IMAGE])]
    assert values == [0, 1]


def test_folder_of_npz_one_feed_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", ids=np.zeros((2, 7), np.int32), rate=np.int64(16000))
    (feed,) = find_samples(tmp_path, [IDS, RATE])
    assert feed["ids"].dtype == np.int64 and feed["ids"].shape == (2, 7)
    assert feed["rate"] == 16000


def test_folder_per_input(tmp_path: Path) -> None:
    for name, array in (("ids", np.zeros((2, 7), np.int64)), ("rate", np.int64(3))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", array)
    assert shapes(find_samples(tmp_path, [IDS, RATE])) == [{"ids": (2, 7), "rate": ()}]
    np.save(tmp_path / "ids" / "b.npy", np.zeros((2, 7)))
    with pytest.raises(DataError, match=r"rate' lacks 'b\.npy'"):
        find_samples(tmp_path, [IDS, RATE])


def test_images_are_resized_and_scaled(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((8, 9, 3), (51, 102, 255), np.uint8)).save(tmp_path / "a.png")
    scaling = Preprocessing((0.2, 0.2, 0.0), (0.5, 0.5, 0.5))
    (feed,) = find_samples(tmp_path, [IMAGE], scaling)
    assert feed["image"].shape == (1, 3, 4, 5) and feed["image"].dtype == np.float32
    np.testing.assert_allclose(feed["image"][0, :, 0, 0], [0.0, 0.4, 2.0], atol=1e-6)


def test_images_for_channels_last_bytes_and_grey(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((8, 9), 77, np.uint8)).save(tmp_path / "a.jpg")
    (feed,) = find_samples(tmp_path, [ModelInput("x", (1, 6, 7, 1), np.dtype(np.uint8))])
    assert feed["x"].shape == (1, 6, 7, 1) and set(np.unique(feed["x"])) == {77}
    (feed,) = find_samples(tmp_path, [ModelInput("x", (None, 1, None, None), np.dtype(np.float32))])
    assert feed["x"].shape == (1, 1, 8, 9)


def write(path: Path, content: bytes | None) -> Path:
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", b"", "does not exist"),
        ("a.dat", b"x", "must be a folder, a .npz or .npy file, or a .txt file that lists files"),
        ("a.npz", b"x", "cannot be read"),
        ("empty", None, "holds no .npy, .npz, .png, .jpg or .wav file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name if name == "nowhere" else write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as error:
        find_samples(path, [IMAGE])
    assert name in str(error.value)


def test_missing_array_names_those_that_are_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", pixels=np.zeros((2, 3)), other=np.zeros(2))
    with pytest.raises(DataError, match=r"no array 'image'.*'pixels', 'other'"):
        find_samples(tmp_path / "d.npz", [IMAGE])


def test_unlike_numbers_of_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", ids=np.zeros((4, 7)), rate=np.zeros(3))
    with pytest.raises(DataError, match=r"different numbers of samples: \{'ids': 2, 'rate': 3\}"):
        find_samples(tmp_path / "d.npz", [IDS, RATE])


def test_one_array_for_many_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 7)))
    with pytest.raises(DataError, match=r"feeds one input; the model has 2 \(ids, rate\)"):
        find_samples(tmp_path, [IDS, RATE])


def test_images_for_a_model_of_token_ids(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"images fit an input \[N, 3, H, W\]"):
        find_samples(tmp_path, [IDS])


def test_broken_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"a\.png' is not a readable image"):
        list(find_samples(tmp_path, [IMAGE]))


@pytest.mark.parametrize("length", [None, 4])
def test_a_broken_sound_is_skipped_or_stops(length: int | None, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF no sound")
    with wave.open(str(tmp_path / "b.wav"), "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(bytes(16))
    sound = ModelInput("sound", (1, length), np.dtype(np.float32))
    assert shapes(find_samples(tmp_path, [sound], strict=False)) == [{"sound": (1, length or 8)}] * (2 if length else 1)
    with pytest.raises(DataError, match=r"a\.wav' is not a readable"):
        list(find_samples(tmp_path, [sound]))
