"""Folders of classes, lists, sounds, pictures of any ratio, loaders and datasets; and what looks wrong is told."""

from __future__ import annotations

import re
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.cli import main, quantization
from quark.cli.source_options import SampleSource, source_words
from quark.cli.sources import as_made, feeds
from quark.config.plan_diff import read_plan
from quark.errors import DataError, OutputError
from quark.files import outputs
from quark.files.lock import working_on
from quark.onnx import DatasetReader, ModelQuantizer, PathDataReader, Preprocessing, QConfig, image_files
from quark.onnx.data_layout import looked_at
from quark.onnx.graph.model import load
from quark.onnx.image_files import read_mask
from quark.onnx.preprocess_file import FILE, read_beside, text_of
from quark.onnx.preprocessing import doubts
from quark.onnx.random_data import RandomDataReader
from quark.onnx.sensitivity import sensitivity

PICTURES = "g (float[N, 3, H, W] image) => (float[N, 3, H, W] y) { y = Relu (image) }"
SOUND = "g (float[1, T] sound) => (float[1, T] y) { y = Relu (sound) }"


def picture(path: Path, color: tuple[int, int, int] = (255, 0, 51), size: tuple[int, int] = (8, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("PIL.Image").new("RGB", size, color).save(path)
    return path


def first(reader: PathDataReader) -> np.ndarray:
    feed = reader.get_next()
    assert feed is not None
    return next(iter(feed.values()))


def count(reader: PathDataReader) -> int:
    return sum(1 for _ in iter(reader.get_next, None))


def test_folders_of_classes_take_turns(tmp_path: Path) -> None:
    for label, red in (("cat", 10), ("dog", 20), ("deep/er", 30)):
        for number in range(3):
            picture(tmp_path / label / f"{number}.png", (red, 0, 0))
    (tmp_path / "README.md").write_text("not a sample")
    reader = PathDataReader(models.model(PICTURES), tmp_path)
    reds = [round(float(feed["image"][0, 0, 0, 0] * 255)) for feed in iter(reader.get_next, None)]
    assert len(reds) == 9 and sorted(reds[:3]) == [10, 20, 30]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["a/1.png", "b/2.png"], ""),
        (["a/1.jpg", "b/2.jpeg", "c/words.txt"], ""),
        (["1.png", "a/2.png", "b/words.txt"], "holds samples itself: those in its folders (a) are not read"),
        (["images/1.jpg", "masks/1.png"], "unlike files (images: .jpg, masks: .png): give the one"),
    ],
    ids=str,
)
def test_folders_that_are_left_out_or_mixed_are_told(
    files: list[str], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    for name in files:
        picture(data / name) if not name.endswith("txt") else (data / name).parent.mkdir(parents=True)
    proto = models.model(PICTURES, {})
    PathDataReader(proto, data)
    assert told in caplog.text and bool(told) is bool(caplog.text)
    onnx.save(proto, tmp_path / "m.onnx")
    feeds(tmp_path / "m.onnx", SampleSource(data=data))
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_list_of_files_is_relative_to_itself(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "x.png", (255, 0, 0))
    picture(tmp_path / "a" / "y.png", (0, 0, 0))
    listed = tmp_path / "files.txt"
    listed.write_text("# chosen by hand\na/y.png\n\na/x.png\n")
    reader = PathDataReader(models.model(PICTURES), listed)
    assert [float(feed["image"][0, 0, 0, 0]) for feed in iter(reader.get_next, None)] == [0.0, 1.0]
    listed.write_text("a/x.png 3\n")
    with pytest.raises(DataError, match=r"x\.png 3', which does not exist \(a line is one path\)"):
        PathDataReader(models.model(PICTURES), listed)


def test_one_size_for_all_where_the_input_is_free(tmp_path: Path) -> None:
    for name, size in (("a", (8, 4)), ("b", (10, 10))):
        picture(tmp_path / f"{name}.png", size=size)
    reader = PathDataReader(models.model(PICTURES), tmp_path)
    assert {feed["image"].shape for feed in iter(reader.get_next, None)} == {(1, 3, 4, 8)}
    wanted = Preprocessing(size=(6, 5))
    assert first(PathDataReader(models.model(PICTURES), tmp_path, preprocessing=wanted)).shape == (1, 3, 6, 5)
    fixed = models.model("g (float[1, 3, 4, 4] image) => (float[1, 3, 4, 4] y) { y = Relu (image) }")
    with pytest.raises(DataError, match=r"size \[6, 5\] does not fit"):
        PathDataReader(fixed, tmp_path, preprocessing=wanted)


@pytest.mark.parametrize(
    ("resize", "left", "middle"), [("stretch", 255, 255), ("letterbox", 114, 255), ("crop", 255, 255)]
)
def test_the_ratio_is_kept_where_it_is_asked_for(tmp_path: Path, resize: str, left: int, middle: int) -> None:
    """A tall white picture into a wide input: letterbox has grey on both sides, crop and stretch fill it."""
    picture(tmp_path / "a.png", (255, 255, 255), size=(4, 8))
    settings = Preprocessing(size=(8, 16), resize=resize)
    pixels = first(PathDataReader(models.model(PICTURES), tmp_path, preprocessing=settings))[0] * 255
    assert pixels.shape == (3, 8, 16)
    np.testing.assert_allclose(pixels[:, 4, 0], left, atol=0.5)
    np.testing.assert_allclose(pixels[:, 4, 8], middle, atol=0.5)


@pytest.mark.parametrize("kind", ["picture", "mask"])
def test_a_picture_of_too_many_pixels_is_refused_before_they_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of some kilobytes unpacks to gigabytes; this one has no pixels at all behind its size."""
    path = tmp_path / "p.png"
    pytest.importorskip("PIL.Image").new("L", (9, 8), 7).save(path)
    read = partial(image_files.read_image, path) if kind == "picture" else partial(read_mask, path, (8, 9), "crop", 0)
    monkeypatch.setattr(image_files, "PIXELS", 72)
    assert (read() == 7).all()
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"IDAT") + 4])
    monkeypatch.setattr(image_files, "PIXELS", 71)
    with pytest.raises(image_files.UnreadableImage, match="it has 9 x 8 pixels; at most 71 are taken"):
        read()


def test_channels_and_units_are_those_that_are_told(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", (255, 0, 51))
    settings = Preprocessing(mean=(104, 117, 123), std=(1.0,), scale=1, bgr=True)
    values = first(PathDataReader(models.model(PICTURES), tmp_path, preprocessing=settings))
    np.testing.assert_allclose(values[0, :, 0, 0], [51 - 104, 0 - 117, 255 - 123])
    assert Preprocessing.from_dict(settings.to_dict()) == settings
    with pytest.raises(DataError, match="Did you mean 'resize'"):
        Preprocessing.from_dict({"resise": "crop"})


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_sounds_of_every_width_are_in_minus_one_to_one(tmp_path: Path, width: int, channels: int) -> None:
    wanted = np.array([0.0, 0.5, -0.5, 0.25])
    whole = np.round(wanted * 2 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    raw = b"".join(int(v).to_bytes(width, "little", signed=width > 1) * channels for v in whole)
    with wave.open(str(tmp_path / "a.wav"), "wb") as out:
        out.setparams((channels, width, 16000, 0, "NONE", ""))
        out.writeframes(raw)
    values = first(PathDataReader(models.model(SOUND), tmp_path))
    np.testing.assert_allclose(values, wanted[None], atol=1e-6)
    windows = models.model("g (float[1, 1, 2] sound) => (float[1, 1, 2] y) { y = Relu (sound) }")
    assert count(PathDataReader(windows, tmp_path)) == 2
    (tmp_path / "a.wav").write_bytes(b"RIFF no sound")
    with pytest.raises(DataError, match=r"a\.wav' is not a readable"):
        PathDataReader(models.model(SOUND), tmp_path).get_next()


def test_sounds_of_several_rates_and_models_of_one_axis_or_of_codes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of [frames] was refused; one of int16 got zeros; a file of another rate came along without a word."""
    codes = np.array([0, 16384, -32768, 32767], "<i2")
    for name, rate in (("a", 16000), ("b", 16000), ("c", 44100)):
        with wave.open(str(tmp_path / f"{name}.wav"), "wb") as out:
            out.setparams((1, 2, rate, 0, "NONE", ""))
            out.writeframes(codes.tobytes())
    for kind in ("float", "int16"):
        values = first(PathDataReader(models.model(f"g ({kind}[T] x) => ({kind}[T] y) {{ y = Abs (x) }}"), tmp_path))
        assert values.dtype == (np.int16 if kind == "int16" else np.float32)
        np.testing.assert_array_equal(values, codes if kind == "int16" else codes / np.float32(32768))
    assert "several rates (2 of 16000, 1 of 44100)" in caplog.text


def test_a_function_of_the_user_reads_files_of_any_kind(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.ones(48, np.float32).tobytes())
    settings = Preprocessing(function=lambda path: np.fromfile(path, np.float32).reshape(3, 4, 4))
    assert first(PathDataReader(models.model(PICTURES), tmp_path, preprocessing=settings)).shape == (1, 3, 4, 4)
    wrong = Preprocessing(function=lambda path: "text")
    with pytest.raises(DataError, match="--preprocess gave str"):
        PathDataReader(models.model(PICTURES), tmp_path, preprocessing=wrong).get_next()


# ---- loaders and datasets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "array"])
def test_loaders_of_every_kind_give_the_same_samples(kind: str) -> None:
    torch = pytest.importorskip("torch")
    images, labels = torch.arange(5 * 48.0).reshape(5, 3, 4, 4), torch.arange(5)
    items = {
        "tensor": images,
        "tuple": torch.utils.data.TensorDataset(images, labels),
        "dict": [{"image": image, "labels": label} for image, label in zip(images, labels, strict=True)],
        "array": images.numpy(),
    }[kind]
    data = items if kind == "array" else torch.utils.data.DataLoader(items, batch_size=2)
    fixed = models.model("g (float[1, 3, 4, 4] image) => (float[1, 3, 4, 4] y) { y = Relu (image) }")
    reader = DatasetReader(fixed, data)
    for _ in range(2):
        found = np.concatenate([feed["image"] for feed in iter(reader.get_next, None)])
        np.testing.assert_array_equal(found, images.numpy())
        reader.rewind()


def test_a_transform_makes_samples_of_items_and_what_cannot_be_taken_is_named() -> None:
    rows = [{"picture": np.full((4, 4, 3), 255, np.uint8), "label": 1}]
    reader = DatasetReader(
        models.model(PICTURES), rows, lambda row: row["picture"].transpose(2, 0, 1).astype(np.float32) / 255
    )
    assert (
        first(reader).shape == (1, 3, 4, 4) and first(DatasetReader(models.model(PICTURES), [np.ones((3, 2, 2))])).any()
    )
    with pytest.raises(DataError, match="item 0 lacks the input 'image'; it has 'picture', 'label'"):
        DatasetReader(models.model(PICTURES), rows).get_next()
    with pytest.raises(DataError, match=r"DatasetReader\(model, data, transform="):
        DatasetReader(models.model(PICTURES), ["a.png"]).get_next()


IMAGE = np.ones((1, 3, 4, 4), np.float32)


class Pictures:
    """A dataset as torch's are: no ``__iter__``."""

    def __getitem__(self, k: int) -> tuple[np.ndarray, int]:
        return [(IMAGE[0] * k, k) for k in range(5)][k]


def _loader(items: Any, **words: Any) -> Any:
    return pytest.importorskip("torch").utils.data.DataLoader(items, **words)


WAYS: dict[str, Callable[[], Any]] = {
    "(image, label)": lambda: _loader(list(Pictures()), batch_size=2),
    "(image, label) of a fixed batch": lambda: _loader(list(Pictures()), batch_size=4),
    "dictionaries": lambda: _loader([{"image": x, "label": y} for x, y in list(Pictures())], batch_size=2),
    "a dataset": Pictures,
    "a list of pairs": lambda: list(Pictures()),
    "an array": lambda: np.stack([x for x, _ in list(Pictures())]),
    "bfloat16": lambda: [(row.bfloat16(), 1) for row, _ in _loader(list(Pictures()))],
}


@pytest.mark.parametrize("way", WAYS)
def test_loaders_and_datasets_are_given_as_they_are(way: str) -> None:
    """To every verb that takes samples: the same as dictionaries of the same arrays."""
    size = "1" if "fixed" in way or way == "an array" else "N"
    weight = "<float[2, 3, 1, 1] w = {1, 2, 3, -4, 5, -6}>"
    text = f"g (float[{size}, 3, 4, 4] image) => (float[{size}, 2, 4, 4] y) {weight} {{ y = Conv (image, w) }}"
    model, feeds = models.model(text), [{"image": IMAGE * k} for k in range(5)]
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(EvalMetrics=True, PrintSummary=False)
    results = [ModelQuantizer(config).run(model, None, data) for data in (WAYS[way](), feeds)]
    assert results[0].proto == results[1].proto
    assert results[0].metrics.outputs["y"].count == results[1].metrics.outputs["y"].count == 5 * 2 * 16
    config.global_quant_config.extra_options.update(EvalDataReader=WAYS[way]())
    assert ModelQuantizer(config).run(model, None, feeds).metrics.outputs == results[1].metrics.outputs
    found = [sensitivity(model, "A8W8", data).trials for data in (WAYS[way](), feeds)]
    assert [one.metrics for one in found[0]] == [one.metrics for one in found[1]]


@pytest.mark.parametrize("item", ["a.png"], ids=["path"])
def test_who_gives_a_loader_in_the_place_of_samples_is_told_the_reader(item: object) -> None:
    with pytest.raises(DataError, match=r"quark\.onnx\.DatasetReader"):
        ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(models.model(PICTURES), None, [item])


# ---- what looks wrong ------------------------------------------------------------------------------------------------

FRAME = (
    "g (float[N, 3, H, W] image) => (float[N, 3, H, W] y) "
    "{{ c = Constant <value = float {{{}}}> ()\n y = {} (image, c) }}"
)
DIVIDES, SUBTRACTS = FRAME.format(255.0, "Div"), FRAME.format(0.45, "Sub")
ONES, BYTES = np.ones((1, 3, 4, 4), np.float32), np.full((1, 3, 4, 4), 200, np.float32)


@pytest.mark.parametrize(
    ("text", "array", "settings", "words"),
    [
        (PICTURES, ONES, Preprocessing(mean=(123.7, 116.3, 103.5)), "use --scale 1"),
        (PICTURES, BYTES, Preprocessing(mean=(0.485,), std=(0.229,), scale=1), "use --scale 255"),
        (DIVIDES, ONES, Preprocessing(), "use --scale 1"),
        (DIVIDES, ONES, None, "multiply the arrays by 255"),
        (SUBTRACTS, BYTES, Preprocessing(scale=1), "use --scale 255"),
        (SUBTRACTS, BYTES, None, "divide the arrays by 255"),
        (PICTURES, BYTES.astype(np.uint8), None, "bytes up to 200"),
        (PICTURES, ONES, Preprocessing(mean=(0.485,), std=(0.229,)), ""),
        (PICTURES, BYTES, Preprocessing(mean=(104.0, 117.0, 123.0), scale=1), ""),
        (DIVIDES, BYTES, Preprocessing(scale=1), ""),
        (SUBTRACTS, ONES, Preprocessing(), ""),
        (PICTURES, BYTES, None, ""),
        (PICTURES, ONES, None, ""),
    ],
)
def test_a_range_that_cannot_be_meant_is_told(
    text: str, array: np.ndarray, settings: Preprocessing, words: str
) -> None:
    found = doubts(load(models.model(text)), {"image": array}, settings)
    assert len(found) == bool(words) and all(words in sentence for sentence in found)


NOISE = np.random.default_rng(5).integers(0, 256, (1, 3, 16, 16)).astype(np.float32)
NORMED = """g (float[N, 3, H, W] image) => (float[N, 8, K, L] y) {
  d = Identity (image)
  c = Conv (d, w)
  y = BatchNormalization (c, one, zero, zero, variance)
}"""
BIASED = "g (float[N, 3, H, W] image) => (float[N, 8, K, L] y) { y = Conv (image, w, b) }"
BELOW = {"w": models.normal(8, 3, 3, 3), "one": np.ones(8, np.float32), "zero": np.zeros(8, np.float32)}


@pytest.mark.parametrize(
    ("text", "trained_on", "times", "settings", "words"),
    [
        (NORMED, 1.0, 1.0, None, ""),
        (NORMED, 1.0, 1 / 255, None, "too small for the model's first layer as it was trained: multiply the arrays"),
        (NORMED, 1.0, 255.0, None, "too large for the model's first layer as it was trained: divide the arrays"),
        (NORMED, 1.0, 255.0, Preprocessing(scale=1), "too large .*: use --scale 255"),
        (NORMED, 1.0, 1 / 255, Preprocessing(), "too small .*: use --scale 1$"),
        (NORMED, 1.0, 1 / 255, Preprocessing(scale=1, std=(255.0,)), "look at mean and std"),
        (NORMED, 0.0, 255.0, None, ""),  # an untrained one
        (BIASED, 1.0, 1.0, None, ""),
        (BIASED, 1.0, 1 / 255, None, "too small"),
        (BIASED, 1.0, 255.0, None, ""),  # a network without a normalization may have such biases
        (BIASED, 0.0, 1 / 255, None, ""),
    ],
)
def test_the_first_layer_tells_what_it_was_trained_on(
    text: str, trained_on: float, times: float, settings: Preprocessing | None, words: str
) -> None:
    picture = NOISE / 255
    spread = np.arange(1, 9, dtype=np.float32) / 8 if trained_on else np.ones(8, np.float32)
    model = load(models.model(text, {**BELOW, "variance": spread, "b": spread}))
    found = doubts(model, {"image": picture * np.float32(times)}, settings)
    assert len(found) == bool(words) and all(re.search(words, sentence) for sentence in found), found
    assert doubts(model, {"image": np.full_like(picture, 1e-4)}, settings) == [], "a flat picture shows nothing"


def test_the_nominal_range_of_the_metadata_counts() -> None:
    model = models.model(PICTURES)
    onnx.helper.set_model_props(model, {"Image.NominalPixelRange": "NominalRange_0_255"})
    assert "0..255 itself" in doubts(load(model), {"image": ONES}, Preprocessing())[0]


#: The pictures of the shared models, as their manifest says it in words.
PICTURED = {
    "squeezenet11_flowers5": [Preprocessing(mean=(104, 117, 123), scale=1, bgr=True, resize="crop")],
    "yolox_nano": [Preprocessing(scale=1, bgr=True, resize="letterbox")],
    "ultraface_rfb320": [Preprocessing(mean=(127,), std=(128,), scale=1), Preprocessing(mean=(0.498,), std=(0.502,))],
    "fastestdet": [Preprocessing(bgr=True)],
}


#: What their first layers tell of values 255 times too large or too small.
FAR = {(name, "small") for name in ("yolox_nano", "ultraface_rfb320", "fastestdet")} | {("ultraface_rfb320", "large")}


def test_no_real_model_is_doubted_under_its_own_preprocessing(examples: ModuleType) -> None:
    feeds = {
        "squeezenet11_flowers5": examples.calib_flowers5,
        "yolox_nano": examples.calib_yolox_nano,
        "ultraface_rfb320": examples.calib_ultraface,
        "fastestdet": examples.calib_fastestdet,
        "gtcrn_simple": examples.calib_gtcrn,
        "silero_vad_16k_op15": examples.calib_silero,
        "stories260K": examples.calib_stories,
        "dtln_1": partial(examples.calib_dtln, 0),
        "dtln_2": partial(examples.calib_dtln, 1),
    }
    assert set(feeds) == {path.stem for path in examples.MODELS.glob("*.onnx")}
    for name, calibration in feeds.items():
        model = load(examples.MODELS / f"{name}.onnx")
        sample = next(iter(calibration(n=1)))
        assert doubts(model, sample, None) == [], name
        for factor, size in ((np.float32(255), "large"), (np.float32(1 / 255), "small")):
            found = doubts(model, {key: array * factor for key, array in sample.items()}, None)
            assert [size in sentence for sentence in found] == [True] * ((name, size) in FAR), (name, size)
        for settings in PICTURED.get(name, ()):
            array = settings.values(np.full((4, 4, 3), 255, np.uint8)).transpose(2, 0, 1)[None]
            assert doubts(model, dict.fromkeys(sample, array), settings) == [], (name, settings)


def test_how_pictures_were_read_lies_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What calibrated is what is compared: the next command reads the file, and the next run replaces it."""
    network = models.model(
        "g (float[N, 3, 4, 4] image) => (float[N, 2, 4, 4] y) { y = Conv (image, w) }", {"w": models.normal(2, 3, 1, 1)}
    )
    onnx.save(network, tmp_path / "m.onnx")
    for number in range(3):
        picture(tmp_path / "data" / f"{number}.png", (40 * number, 200, 90), (4, 4))
    made = str(tmp_path / "q.onnx")
    words = ["onnx", "quantize", str(tmp_path / "m.onnx"), "-o", made, "--data", str(tmp_path / "data"), "--no-check"]
    told = str(tmp_path / "plan.json")
    assert main([*words, "--mean", "10,20,30", "--scale", "1", "--bgr", "--plan", told]) == 0
    kept = read_plan(Path(told)).preprocessing
    assert kept is not None and Preprocessing.from_dict(kept) == Preprocessing((10.0, 20.0, 30.0), scale=1.0, bgr=True)
    beside = tmp_path / FILE
    assert read_beside(Path(made)) == Preprocessing(mean=(10.0, 20.0, 30.0), scale=1.0, bgr=True)
    expected = np.array([90 - 10, 200 - 20, 0 - 30], np.float32)
    np.testing.assert_array_equal(first(PathDataReader(made, tmp_path / "data"))[0, :, 0, 0], expected)
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options["PrintSummary"] = False
    run = ModelQuantizer(config).run(network, None, PathDataReader(made, tmp_path / "data"))
    assert run.plan.preprocessing == kept
    given = PathDataReader(made, tmp_path / "data", preprocessing=Preprocessing())
    np.testing.assert_allclose(first(given)[0, :, 0, 0], np.array([0, 200, 90], np.float32) / 255)
    capsys.readouterr()
    assert main(["onnx", "compare", str(tmp_path / "m.onnx"), made, "--data", str(tmp_path / "data")]) == 0
    assert f"{FILE}' has it (mean [10.0, 20.0, 30.0], scale 1.0, bgr True)" in " ".join(capsys.readouterr().err.split())
    source = as_made(SampleSource(tmp_path / "data"), Path(made))
    typed = ["--data", str(tmp_path / "data"), "--bgr", "--scale", "1", "--mean", "10,20,30"]
    assert source_words(source) == typed, "so that a command that is advised reads them the same way"
    assert main(words) == 0, "a file of ours is replaced"
    assert "scale: 255.0" in beside.read_text() and "resize: stretch" in beside.read_text()
    assert read_beside(Path(made)) == Preprocessing()
    assert read_beside(Path(made)) == Preprocessing()
    for text, sentence in (
        ("mean: [a]", r"\['mean'\]"),
        ("means: 3", r"\['means'\]"),
        ("std: [0]", "above zero"),
        ("function: f", "--preprocess again"),
        ("size: [3]", "size is"),
    ):
        beside.write_text(text)
        with pytest.raises(DataError, match=rf"preprocess\.yaml.*{sentence}"):
            read_beside(Path(made))
    assert main([*words]) != 0, "a file that is not ours stays"
    assert beside.read_text() == "size: [3]"


def test_two_commands_add_to_what_lies_beside_their_models_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held from reading to replacing: the section of the one that was published between was lost."""
    network = models.model(
        "g (float[N, 3, 4, 4] image) => (float[N, 2, 4, 4] y) { y = Conv (image, w) }", {"w": models.normal(2, 3, 1, 1)}
    )
    onnx.save(network, tmp_path / "m.onnx")
    picture(tmp_path / "data" / "0.png", (40, 200, 90), (4, 4))
    held = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if function is text_of or any(place == tmp_path / FILE for _, place, _ in given[0]):
                with pytest.raises(OutputError, match="another process works"), working_on(tmp_path / FILE, "it"):
                    pass
                held.append(function)
            return function(*given)

        return call

    for module, name in ((quantization, "text_of"), (outputs, "_publish")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    words = ["onnx", "quantize", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "data"), "--no-check", "-o"]
    assert main([*words, str(tmp_path / "q.onnx")]) == 0
    assert len(held) == 2
    with working_on(tmp_path / FILE, "it"):
        pass  # let go


def test_models_of_one_folder_keep_their_own_preprocessing(tmp_path: Path) -> None:
    """The second one's settings were in the place of the first one's, and of every other model's."""
    pictured = Preprocessing(scale=1.0, bgr=True), Preprocessing(mean=(0.5,), std=(0.25,))
    names = [tmp_path / "q1.onnx", tmp_path / "q2.onnx", tmp_path / "f1.onnx", tmp_path / "f2.onnx"]
    for path in names:
        path.touch()
    for made, source, settings in zip(names[:2], names[2:], pictured, strict=True):
        (tmp_path / FILE).write_text(text_of(settings, made, source))
    assert [read_beside(path) for path in names] == [*pictured, *pictured]
    assert read_beside(tmp_path / "stranger.onnx") is None
    (tmp_path / FILE).write_text(text_of(pictured[1], names[0], names[2]))
    assert [read_beside(path) for path in names[:2]] == [pictured[1], pictured[1]], "a model is quantized again"
    (tmp_path / FILE).write_text(text_of(pictured[0], names[0], names[2]))
    names[1].unlink()
    (tmp_path / FILE).write_text(text_of(pictured[0], names[0], names[2]))
    assert read_beside(names[3]) is None, "sections of models that are gone go"
    names[0].rename(tmp_path / "renamed.onnx")
    assert read_beside(tmp_path / "renamed.onnx") == pictured[0]
    (tmp_path / FILE).write_text("scale: 1")
    assert read_beside(names[3]) == Preprocessing(scale=1.0), "without a name it is of all models"
    (tmp_path / FILE).write_text(text_of(pictured[1], names[0], names[2]))
    assert read_beside(names[3]) == Preprocessing(scale=1.0), "and stays so when one of them is quantized"
    assert [read_beside(path) for path in (names[0], names[2])] == [pictured[1], pictured[1]]
    (tmp_path / FILE).write_text(text_of(pictured[0], names[0], tmp_path / "other" / names[3].name))
    assert read_beside(names[3]) == Preprocessing(scale=1.0), "the float model is another one of the same name"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: [{"image": np.full((1, 3, 4, 4), 200, np.uint8)}], "bytes up to 200"),
        (lambda: iter([np.full((1, 3, 4, 4), 200, np.uint8)]), "bytes up to 200"),
        (lambda: np.full((2, 3, 4, 4), 200, np.uint8), "bytes up to 200"),
        (lambda: "folder", r"use Preprocessing\(scale=1\)"),
        (lambda: [{"image": np.full((1, 3, 4, 4), 200, np.float32)}], ""),
        (lambda: RandomDataReader(models.model(PICTURES), {"image": [1, 3, 4, 4]}), ""),
        (lambda: looked_at([{"image": np.full((1, 3, 4, 4), 200, np.uint8)}]), ""),
    ],
)
def test_what_looks_wrong_is_told_in_python_too(
    given: Any, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes of pictures in a loader calibrated in silence; once a quantization, and not in each of many trials."""
    weights = {"w": models.normal(2, 3, 1, 1)}
    network = models.model("g (float[N, 3, 4, 4] image) => (float[N, 2, 4, 4] y) { y = Conv (image, w) }", weights)
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options["PrintSummary"] = False
    data = given()
    if isinstance(data, str):
        picture(tmp_path / "a.png")
        data = PathDataReader(network, tmp_path, preprocessing=Preprocessing(mean=(123.0,)))
    ModelQuantizer(config).run(network, None, data)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(words) and all(re.search(words, sentence) for sentence in told), told


@pytest.mark.parametrize("words", ["--size 8x8", "--resize crop", "--bgr", "--scale 1", "--mean 3", "--std 2"])
@pytest.mark.parametrize("kind", ["npz", "npy", "folder", "list", "random"])
def test_an_option_that_these_samples_do_not_heed_is_refused(
    words: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrays would be calibrated as they are, and the user would believe that they were normalized."""
    onnx.save(models.model("g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }", {}), tmp_path / "m.onnx")
    data, values = tmp_path / f"d.{kind}", np.ones((2, 4), np.float32)
    if kind == "npz":
        np.savez(data, x=values)
    elif kind == "npy":
        np.save(data, values)
    else:
        data.mkdir()
        np.save(data / "a.npy", values)
        (tmp_path / "d.txt").write_text("d.list/a.npy\n")
    given = ["--random"] if kind == "random" else ["--data", str(tmp_path / "d.txt" if kind == "list" else data)]
    assert (
        main(["onnx", "quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), *given, *words.split()])
        == 1
    )
    assert f"{words.split()[0]} is for pictures" in capsys.readouterr().err
    assert not (tmp_path / "q.onnx").exists()


def test_a_function_of_ones_own_takes_no_options_of_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They changed nothing, and stood in preprocess.yaml."""
    onnx.save(models.model(PICTURES, {}), tmp_path / "m.onnx")
    picture(tmp_path / "pictures" / "a.png")
    (tmp_path / "mine.py").write_text("def read(path):\n    raise SystemExit\n")
    words = ["--data", str(tmp_path / "pictures"), "--preprocess", f"{tmp_path / 'mine.py'}:read", "--bgr"]
    assert main(["onnx", "quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), *words]) == 1
    assert "so that --bgr changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["npz", "npy", "random"])
def test_a_function_for_files_needs_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.model("g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }", {}), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((2, 4), np.float32))
    np.save(tmp_path / "d.npy", np.ones((2, 4), np.float32))
    (tmp_path / "mine.py").write_text("def read(path):\n    raise SystemExit\n")
    given = ["--random"] if kind == "random" else ["--data", str(tmp_path / f"d.{kind}")]
    words = ["onnx", "quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), *given]
    assert main([*words, "--preprocess", f"{tmp_path / 'mine.py'}:read"]) == 1
    assert "--preprocess is called with the path of each sample" in capsys.readouterr().err


@pytest.mark.parametrize("pictures_judge", [False, True])
def test_options_of_pictures_are_heeded_where_either_kind_of_samples_is_pictures(
    pictures_judge: bool, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    graph = "g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) { y = Conv (x, w) }"
    onnx.save(models.model(graph, {"w": models.normal(4, 3, 1, 1)}), tmp_path / "m.onnx")
    (tmp_path / "p").mkdir()
    image.new("RGB", (8, 8), (9, 99, 199)).save(tmp_path / "p" / "a.png")
    np.savez(tmp_path / "d.npz", x=models.normal(2, 3, 8, 8))
    given = [str(tmp_path / name) for name in (("d.npz", "p") if pictures_judge else ("p", "d.npz"))]
    words = ["onnx", "quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), "-p", "A8W8"]
    assert main([*words, "--data", given[0], "--eval-data", given[1], "--mean", "0.5"]) == 0


def test_data_sets_by_name_are_told_from_a_sample() -> None:
    """What ``datasets.load_dataset`` gives without ``split`` has one data set a part."""

    class Rows:
        column_names = ("image",)

    proto = models.model("g (float[2] image) => (float[2] y) { y = Relu (image) }", {}, 17)
    for part in (Rows(), [{"image": [1.0, 2.0]}]):
        with pytest.raises(DataError, match=r"several data sets, \['train'\], by name: give one, as \['train'\]"):
            ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(proto, None, {"train": part})
