"""Readers give their samples lazily and again; every way in which a sample does not fit is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.cli.source_options import SampleSource
from quark.cli.sources import feeds
from quark.errors import ConfigError, DataError
from quark.onnx.data import (
    CachedDataReader,
    CalibrationDataReader,
    ModelInput,
    checked,
    inputs_of,
    samples_of,
)
from quark.onnx.data_files import PathDataReader
from quark.onnx.graph.model import load
from quark.onnx.random_data import RandomDataReader

IMAGE = ModelInput("image", (None, 3, 4, 4), np.dtype(np.float32))
IDS = ModelInput("ids", (1, None), np.dtype(np.int64))


def image(batch: int = 1, value: float = 0.5) -> np.ndarray:
    return np.full((batch, 3, 4, 4), value, np.float32)


class Counting(CalibrationDataReader):
    """Gives ``count`` samples, once, and remembers how many were taken."""

    def __init__(self, count: int) -> None:
        self.left, self.taken = count, 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        if not self.left:
            return None
        self.left, self.taken = self.left - 1, self.taken + 1
        return {"image": image(value=float(self.taken))}


class Rewinding(Counting):
    """The same, with ONNX Runtime's habit of a method to start again."""

    def rewind(self) -> None:
        self.left, self.taken = 3, 0


class OnlyGetNext:
    """What an ONNX Runtime reader looks like: no base class of ours, no length."""

    def __init__(self, samples: list[Any]) -> None:
        self._rest = iter(samples)

    def get_next(self) -> Any:
        return next(self._rest, None)


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_a_limit_is_how_many_are_read() -> None:
    reader = Counting(10)
    assert len(list(samples_of(reader, 3))) == 3
    assert reader.taken == 3


def test_samples_are_read_one_at_a_time() -> None:
    reader = Counting(10)
    stream = iter(samples_of(reader))
    next(stream)
    assert reader.taken == 1


@pytest.mark.parametrize(
    "reader",
    [
        OnlyGetNext([{"image": image()}, {"image": image()}]),
        [{"image": image()}, {"image": image()}],
        ({"image": image()} for _ in range(2)),
        CachedDataReader([{"image": image()}, {"image": image()}]),
        OnlyGetNext([image(), image()]),
        np.stack([image(), image()]),
    ],
    ids=["get_next", "list", "generator", "cached", "get_next of arrays", "stacked array"],
)
def test_every_kind_of_reader_is_accepted(reader: Any) -> None:
    feeds = list(checked(samples_of(reader), [IMAGE]))
    assert len(feeds) == 2 and all(np.array_equal(feed["image"], image()) for feed in feeds)


def test_one_dictionary_is_one_sample() -> None:
    assert len(list(checked(samples_of({"image": image(5)}), [IMAGE]))) == 1


def test_a_reader_that_can_be_rewound_is_read_again_and_another_is_not() -> None:
    again, once = samples_of(Rewinding(3)), samples_of(Counting(3))
    assert [len(list(again)), len(list(again))] == [3, 3]
    assert [len(list(once)), len(list(once))] == [3, 0]


def test_the_number_of_samples_is_told_where_it_is_known() -> None:
    assert samples_of([1, 2, 3]).total == 3
    assert samples_of([1, 2, 3], 2).total == 2
    assert samples_of(Counting(3)).total is None


@pytest.mark.parametrize("reader", [7, "folder/with/images", None])
def test_what_is_no_reader_is_refused_with_the_remedy(reader: Any) -> None:
    with pytest.raises(DataError, match=r"get_next\(\).*PathDataReader"):
        samples_of(reader)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="CalibDataSize is 0"):
        samples_of([], 0)


def test_the_cache_reads_once_and_gives_again() -> None:
    source = Counting(5)
    cached = CachedDataReader(source, 4)
    assert (source.taken, len(cached)) == (4, 4)
    first = [sample["image"][0, 0, 0, 0] for sample in cached]
    assert cached.get_next() is None
    cached.reset_iter()
    assert [sample["image"][0, 0, 0, 0] for sample in cached] == first == [1, 2, 3, 4]


# ---- checking --------------------------------------------------------------------------------------------------------


def fits(*samples: Any, inputs: tuple[ModelInput, ...] = (IMAGE,)) -> list[dict[str, np.ndarray]]:
    return list(checked(samples, list(inputs)))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"imag": image()}, r"sample 1 has 'imag', which is not an input of the model\. Did you mean 'image'\?"),
        ({}, r"sample 1 lacks the input 'image'; it has nothing"),
        ({"image": image().transpose(0, 2, 3, 1)}, r"at the other end: array.transpose\(0, 3, 1, 2\)\)"),
        ({"image": image()[0]}, r"sample 1: .*\[3, 4, 4\] does not fit the input 'image' .*\(add the batch axis"),
        ({"image": np.zeros((1, 1, 4, 4), np.float32)}, r"sample 1: .*\[1, 1, 4, 4\] .*\[any, 3, 4, 4\]"),
        ({"image": image() / 3.0 + np.float64(1e-12)}, r"sample 1: values of type float64 .*float32.* without loss"),
        ({"image": np.array([["a"]])}, r"sample 1: .*does not fit"),
        ({"image": np.full((1, 3, 4, 4), "a")}, r"sample 1: values of type <U1 do not fit the input 'image'"),
        ({"image": image(value=np.nan)}, r"sample 1, input 'image': 48 NaN and 0 infinite values among 48"),
        ({"image": image(value=np.inf)}, r"sample 1, input 'image': 0 NaN and 48 infinite values among 48"),
        (["image"], r"sample 1 is list; it must be a dictionary"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(sample: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fits({"image": image()}, sample)


def test_a_missing_input_of_several() -> None:
    with pytest.raises(DataError, match="sample 0 lacks the input 'ids'; it has 'image'"):
        fits({"image": image()}, inputs=(IMAGE, IDS))
    with pytest.raises(DataError, match="sample 0 is ndarray; it must be a dictionary"):
        fits(image(), inputs=(IMAGE, IDS))


def test_no_sample_at_all_is_an_error_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"gave no sample.*used up.*rewind\(\)"):
        fits()


def test_samples_without_a_value_are_no_data() -> None:
    """One of several inputs may be empty (a cache at its start), or a sample among others."""
    with pytest.raises(DataError, match="none of the 2 samples holds a value: all arrays of 'image' are empty"):
        fits(image(0), image(0))
    assert fits(image(0), image())[1]["image"].size
    assert fits({"image": image(), "ids": np.zeros((1, 0), np.int64)}, inputs=(IMAGE, IDS))


def test_a_function_that_reads_objects_is_told_so(tmp_path: Path) -> None:
    """They are no numbers, whatever is in them."""
    (tmp_path / "read.py").write_text(
        "import numpy as np\n\ndef read(path):\n    return np.ones((3, 16, 16), object)\n"
    )
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.raw").touch()
    onnx.save(models.cnn(), tmp_path / "cnn.onnx")
    source = SampleSource(data=tmp_path / "raw", preprocess=f"{tmp_path / 'read.py'}:read")
    with pytest.raises(DataError, match="sample 0: values of type object do not fit the input 'x'"):
        list(checked(samples_of(feeds(tmp_path / "cnn.onnx", source)), inputs_of(load(tmp_path / "cnn.onnx"))))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(np.float16, np.float32), (np.uint8, np.float32), (np.int32, np.int64), (np.int64, np.int32), (bool, np.int64)],
)
def test_types_are_converted_where_no_value_changes(given: Any, wanted: Any) -> None:
    array = np.array([[0, 1, 1]]).astype(given)
    feed = fits({"x": array}, inputs=(ModelInput("x", (1, 3), np.dtype(wanted)),))[0]
    assert feed["x"].dtype == wanted and np.array_equal(feed["x"], [[0, 1, 1]])


def test_float64_that_is_float32_at_heart_is_taken() -> None:
    assert fits({"image": image().astype(np.float64)})[0]["image"].dtype == np.float32


@pytest.mark.parametrize(("value", "wanted"), [(2**40, np.int32), (-1, np.uint8), (1.5, np.int64)])
def test_a_conversion_that_would_change_a_value_is_refused(value: float, wanted: Any) -> None:
    with pytest.raises(DataError, match="without loss"):
        fits({"x": np.array([value])}, inputs=(ModelInput("x", (1,), np.dtype(wanted)),))


def test_inputs_are_those_that_a_caller_gives() -> None:
    proto = models.model(
        "g (float[N, 3, 4] x, int64[2] y, float[3] w) => (float[N, 3, 4] z) { z = Identity (x) }",
        {"w": np.zeros(3, np.float32)},
    )
    assert inputs_of(ir.from_proto(proto)) == [
        ModelInput("x", (None, 3, 4), np.dtype(np.float32)),
        ModelInput("y", (2,), np.dtype(np.int64)),
    ]


# ---- random data -----------------------------------------------------------------------------------------------------


def embedding() -> onnx.ModelProto:
    """A table of 11 rows indexed by ``ids``, scaled by ``x``, masked by integers."""
    return models.model(
        """g (int64[N, S] ids, float[N, 1, H, W] x, int32[N, 4] mask, bool[2] flags) => (float[N, S, 5] y) {
        flat = Unsqueeze (ids, axes)
        rows = Gather (table, flat)
        y = Squeeze (rows, axes)
        }""",
        {"table": models.normal(11, 5), "axes": np.array([2])},
    )


def taken(reader: CalibrationDataReader) -> Iterator[Any]:
    return iter(reader.get_next, None)


RANGES: dict[str, list[int]] = {"ids": [0, 10], "x": [0, 1], "mask": [0, 1], "flags": [0, 1]}


def test_a_sound_of_free_length_is_longer_than_a_row_of_indices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows of a spectrum do not fit into 16 values (silero VAD). What is free and made up is said."""
    text = "g (float[N, S] x, int64[N, T] ids, float[N, 3] z, int64 rate) => (float[N, S] y) { y = Relu (x) }"
    onnx.save(models.model(text), tmp_path / "m.onnx")
    found = feeds(tmp_path / "m.onnx", SampleSource(random=True))[0]
    assert [array.shape for array in found.values()] == [(1, 512), (1, 16), (1, 3), ()]
    assert "data: {'x': [1, 512], 'ids': [1, 16]} (" in capsys.readouterr().err


def test_random_data_has_the_shapes_types_and_bounds_of_the_inputs() -> None:
    reader = RandomDataReader(embedding(), {"x": [2, 1, 6, 7]}, data_size=20)
    feeds = list(taken(reader))
    assert len(feeds) == len(reader) == 20
    assert [feeds[0][name].shape for name in ("ids", "x", "mask", "flags")] == [(2, 16), (2, 1, 6, 7), (2, 4), (2,)]
    ids = np.concatenate([feed["ids"] for feed in feeds])
    assert (ids.min(), ids.max()) == (0, 10), "indices must stay inside the table of 11 rows and use all of it"
    assert set(np.unique([feed["mask"] for feed in feeds])) == {0, 1}
    ranged = RandomDataReader(embedding(), {"x": [2, 1, 6, 7]}, {**RANGES, "x": [-3, 5]}, data_size=20)
    x = np.concatenate([feed["x"] for feed in taken(ranged)])
    assert x.dtype == np.float32 and -3 <= x.min() < -2.5 and 4.5 < x.max() <= 5


def test_integer_bounds_take_both_ends() -> None:
    reader = RandomDataReader(embedding(), input_data_range={**RANGES, "ids": [3, 5]}, data_size=5)
    assert set(np.unique([feed["ids"] for feed in taken(reader)])) == {3, 4, 5}


def test_random_samples_differ_and_come_back_the_same() -> None:
    reader = RandomDataReader(embedding(), data_size=3)
    first = [feed["x"] for feed in taken(reader)]
    reader.rewind()
    assert all(np.array_equal(a, feed["x"]) for a, feed in zip(first, taken(reader), strict=True))
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize(
    ("shapes", "ranges", "message"),
    [
        ({"idz": [1, 2]}, None, r"unknown input in RandomDataReaderInputShape 'idz'\. Did you mean 'ids'"),
        (None, {"y": [0, 1]}, r"unknown input in RandomDataReaderInputDataRange 'y'"),
        ({"x": [1, 2, 3, 4]}, None, r"gives \[1, 2, 3, 4\], which does not fit the input 'x'"),
        ({"x": [1, 1, 0, 4]}, None, r"gives \[1, 1, 0, 4\]"),
        ({"x": [1, 1, 2**29 + 1, 1]}, None, "input 'x' of shape .* are 536870913 numbers; at most 536870912 are made"),
        ({"ids": [2**40, 2**40]}, None, f"input 'ids' of shape .* are {2**80} numbers; at most"),
        (None, {**RANGES, "x": [2, 1]}, r"gives \[2, 1\] for the input 'x'; it must be \[lowest, highest\]"),
        (None, {**RANGES, "x": [2]}, r"gives \[2\] for the input 'x'"),
    ],
)
def test_random_options_that_do_not_fit_are_named(shapes: Any, ranges: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        RandomDataReader(embedding(), shapes, ranges)


# ---- files -----------------------------------------------------------------------------------------------------------


def convolution() -> onnx.ModelProto:
    return models.model("g (float[N, 3, 4, 4] image) => (float[N, 3, 4, 4] y) { y = Relu (image) }")


def two_inputs() -> onnx.ModelProto:
    return models.model("g (float[1, 2] a, float[1, 2] b) => (float[1, 2] y) { y = Add (a, b) }")


def firsts(reader: PathDataReader, name: str) -> list[float]:
    return [float(feed[name].ravel()[0]) for feed in taken(reader)]


def test_npy_files_come_in_the_order_of_their_names_with_a_batch_axis(tmp_path: Path) -> None:
    for name, value in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        np.save(tmp_path / f"{name}.npy", image(value=value)[0])
    reader = PathDataReader(convolution(), tmp_path)
    assert len(reader) == 3 and firsts(reader, "image") == [1, 2, 3]
    reader.rewind()
    assert reader.get_next()["image"].shape == (1, 3, 4, 4)


def test_files_are_read_when_their_turn_comes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", image())
    (tmp_path / "b.npy").write_bytes(b"not an array")
    reader = PathDataReader(convolution(), tmp_path)
    assert reader.get_next() is not None
    with pytest.raises(DataError, match=r"b\.npy' cannot be read as \.npy data"):
        reader.get_next()


def test_one_folder_per_input(tmp_path: Path) -> None:
    for folder, base in (("a", 0.0), ("b", 10.0)):
        (tmp_path / folder).mkdir()
        for k in range(3):
            np.save(tmp_path / folder / f"{k}.npy", np.full(2, base + k, np.float32))
    reader = PathDataReader(two_inputs(), tmp_path)
    assert [(f["a"][0, 0], f["b"][0, 0]) for f in taken(reader)] == [(0, 10), (1, 11), (2, 12)]
    (tmp_path / "b" / "1.npy").unlink()
    with pytest.raises(DataError, match=r"b' lacks '1\.npy'"):
        PathDataReader(two_inputs(), tmp_path)


@pytest.mark.parametrize("batched", [True, False])
def test_one_npz_file_of_all_samples(tmp_path: Path, batched: bool) -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    stack = rows if batched else rows[:, None]
    np.savez(tmp_path / "all.npz", a=stack, b=stack + 100)
    feeds = list(taken(PathDataReader(two_inputs(), tmp_path / "all.npz")))
    assert [feed["b"].shape for feed in feeds] == [(1, 2)] * 5 if batched else True
    assert [float(feed["b"].ravel()[0]) for feed in feeds] == [100, 102, 104, 106, 108]


@pytest.mark.parametrize("axes", [0, 1, 2])
@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float32, np.float16])
def test_every_input_of_a_sample_is_an_array_that_the_runtime_takes(tmp_path: Path, kind: Any, axes: int) -> None:
    """One of a row of numbers is no array, and ONNX Runtime refuses it."""
    sizes = (3, 2)[:axes]
    np.savez(tmp_path / "all.npz", a=np.ones((4, *sizes), kind))
    words = {np.bool_: "bool", np.int64: "int64", np.float32: "float", np.float16: "float16"}
    shape = f"[{', '.join(map(str, sizes))}]" if sizes else ""
    proto = models.model(f"g ({words[kind]}{shape} a) => ({words[kind]}{shape} y) {{ y = Identity (a) }}", {}, 17)
    for feed in taken(PathDataReader(load(proto), tmp_path / "all.npz")):
        assert isinstance(feed["a"], np.ndarray) and feed["a"].shape == sizes
        assert np.asarray(models.run(proto, feed)[0]).shape == sizes


def test_a_folder_of_npz_files(tmp_path: Path) -> None:
    for k in range(2):
        np.savez(tmp_path / f"{k}.npz", a=np.full((1, 2), k, np.float32), b=np.zeros((1, 2), np.float32))
    assert firsts(PathDataReader(two_inputs(), tmp_path), "a") == [0, 1]


def test_images_are_resized_scaled_and_put_in_the_layout_of_the_input(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (9, 7), (255, 0, 51)).save(tmp_path / "a.png")
    pillow.new("L", (4, 4), 255).save(tmp_path / "b.jpg")
    reader = PathDataReader(convolution(), tmp_path, mean=(0.5, 0.0, 0.2), std=(0.5, 1.0, 1.0))
    first, second = taken(reader)
    assert first["image"].shape == (1, 3, 4, 4) and first["image"].dtype == np.float32
    np.testing.assert_allclose(first["image"][0, :, 2, 2], [1.0, 0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(second["image"][0, :, 1, 1], [1.0, 1.0, 0.8], atol=1e-6)
    nhwc = models.model("g (uint8[N, H, W, 3] image) => (uint8[N, H, W, 3] y) { y = Identity (image) }")
    feed = PathDataReader(nhwc, tmp_path, {"image": [1, 2, 5, 3]}).get_next()
    assert feed["image"].shape == (1, 2, 5, 3) and feed["image"][0, 0, 0].tolist() == [255, 0, 51]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"holds no \.npy, \.npz, \.png, \.jpg or \.wav file, nor one folder per input \(a, b\)"),
        (["x.npy"], r"a folder of \.npy files feeds one input; the model has 2 \(a, b\): use \.npz"),
        (["x.png"], r"a folder of image files feeds one input"),
    ],
)
def test_folders_that_do_not_fit_are_explained(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        PathDataReader(two_inputs(), tmp_path)


def test_paths_and_contents_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere' does not exist"):
        PathDataReader(two_inputs(), tmp_path / "nowhere")
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"notes\.md' must be a folder, a \.npz or \.npy file"):
        PathDataReader(two_inputs(), tmp_path / "notes.md")
    np.savez(tmp_path / "x.npz", a=np.zeros((1, 2)), c=np.zeros((1, 2)))
    with pytest.raises(DataError, match=r"holds no array 'b', which the model needs; it holds 'a', 'c'"):
        PathDataReader(two_inputs(), tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", a=np.zeros((3, 2)), b=np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"different numbers of samples: \{'a': 3, 'b': 2\}"):
        PathDataReader(two_inputs(), tmp_path / "y.npz")
    with pytest.raises(DataError, match=r"input_shape gives \[1, 2, 3\]"):
        PathDataReader(two_inputs(), tmp_path / "y.npz", {"a": [1, 2, 3]})
    with pytest.raises(DataError, match=r"unknown input in input_shape 'z'"):
        PathDataReader(two_inputs(), tmp_path / "x.npz", {"z": [1]})


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"a\.png' is not a readable image"):
        PathDataReader(convolution(), tmp_path).get_next()


def test_a_size_of_0_is_a_size() -> None:
    """A cache that is empty: generated data had entries in it, and did not fit."""
    proto = models.model(
        "g (float[1, 2, 0, 4] past, float[1, 2, N, 4] x) => (float y) { y = Concat<axis = 2>(past, x) }"
    )
    feed = RandomDataReader(proto, data_size=1).get_next()
    assert feed is not None and feed["past"].shape == (1, 2, 0, 4) and feed["x"].shape == (1, 2, 32, 4)
    with pytest.raises(DataError, match=r"does not fit the input 'past' \(float32, \[1, 2, 0, 4\]\)"):
        list(checked([{**feed, "past": feed["x"]}], inputs_of(load(proto))))


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        ("float[N,1,T] x", [(1, 1, 4096)]),  # sounds: length 1 fitted no layer
        ("float[T] x, float[2,1,8] state", [(4096,), (2, 1, 8)]),
        ("float[N,3,H,W] x, float[N] t", [(1, 3, 32, 32), (1,)]),  # a time of each sample
        ("float[N,80,T] x, int64[N] length", [(1, 80, 64), (1,)]),
        ("float[N,T,16] x, float[2,N,8] h", [(1, 64, 16), (2, 1, 8)]),
        ("float[T,N,16] x, float[2,M,8] h", [(1, 64, 16), (2, 1, 8)]),  # the batch of a state
        ("float[N,T] mask, int64[N,T] ids", [(1, 16), (1, 16)]),  # one name is one size
        ("float[N,3,T,H,W] x", [(1, 3, 8, 32, 32)]),
    ],
)
def test_free_sizes_are_those_that_models_run_on(inputs: str, shapes: list[tuple[int, ...]]) -> None:
    proto = models.model(f"g ({inputs}) => (float y) {{ y = Constant<value = float {{1}}>() }}")
    feed = RandomDataReader(proto).get_next()
    assert feed is not None and [array.shape for array in feed.values()] == shapes


def test_sizes_that_are_given_hold_for_their_names() -> None:
    proto = models.model("g (float[N,T,4] x, float[N,T] mask) => (float y) { y = ReduceSum(x) }")
    feed = RandomDataReader(proto, {"x": [2, 7, 4]}).get_next()
    assert feed is not None and feed["mask"].shape == (2, 7)
