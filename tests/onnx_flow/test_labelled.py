"""Metrics by name: each against a second way to compute it, labels from every kind of file, and what cannot be read."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from quark.cli import main
from quark.demo import data
from quark.errors import ConfigError, DataError
from quark.measure import labelled as arrays
from quark.measure.detections import Detections, average_precision
from quark.measure.score import Score, error, mean, score
from quark.onnx.labelled import METRICS, metric_of, metrics_on
from quark.onnx.labels import LabelSource, classes_of
from quark.onnx.preprocessing import Preprocessing
from quark.search.function import load_function, score_of

random = np.random.default_rng(0)


def saved(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: list[str], constants: dict[str, Any]) -> Path:
    made = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    ins = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    outs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", ins, outs, made)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_the_jackknife_of_a_mean_is_the_usual_standard_error() -> None:
    one, other = random.random(40), random.random(40)
    gaps = one - other
    assert error(mean(one), mean(other)) == pytest.approx(gaps.std(ddof=1) / np.sqrt(40))
    assert error(mean(one), mean(one)) == 0 and mean(one).value == pytest.approx(one.mean())
    assert np.isnan(error(Score(1.0), mean(one))) and np.isnan(error(mean([1.0]), mean([1.0])))


def test_many_samples_are_left_out_in_groups() -> None:
    values = random.random(1000)
    found = score(lambda chosen: float(values[list(chosen)].mean()), 1000)
    assert len(found.without) == 50 and error(found, mean(np.zeros(1000))) == pytest.approx(
        values.std() / np.sqrt(1000), rel=0.35
    )


def test_a_function_of_the_user_gives_a_number_or_one_for_every_sample() -> None:
    assert score_of(0.5, "f") == Score(0.5) and score_of({"f": 2}, "f").value == 2
    assert score_of([1, 0, 1, 1], "f").value == 0.75 and len(score_of(np.ones(3), "f").without) == 3
    for wrong in ([], ["a"], "x", {"g": 1}):
        with pytest.raises(ConfigError):
            score_of(wrong, "f")


def test_average_precision_is_that_of_hand_made_curves() -> None:
    truth = [np.array([[0, 0, 10, 10, 0], [20, 20, 30, 30, 1]]), np.array([[0, 0, 10, 10, 0]])]
    exact = [Detections(one[:, :4].astype(float), np.full(len(one), 0.9), one[:, 4].astype(int)) for one in truth]
    assert average_precision(exact, truth)([0, 1]) == pytest.approx(1.0)
    # class 0: the first of two is missed: recall 1/2 at precision 1 → 51 of 101 points; class 1 found
    half = [Detections(exact[0].boxes[1:], exact[0].scores[1:], exact[0].classes[1:]), exact[1]]
    assert average_precision(half, truth)([0, 1]) == pytest.approx((51 / 101 + 1) / 2)
    assert average_precision(half, truth)([1]) == pytest.approx(1.0)  # the second picture alone
    moved = [Detections(one.boxes + 6, one.scores, one.classes) for one in exact]
    assert average_precision(moved, truth)([0, 1]) == pytest.approx(0.0)  # boxes overlap by less than a half
    none = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, int))
    assert average_precision([none, none], truth)([0, 1]) == 0.0


def test_masks_sounds_and_tokens() -> None:
    truth, said = np.array([[0, 0, 1], [1, 255, 2]]), np.array([[0, 1, 1], [1, 7, 2]])
    counts = arrays.overlaps(said, truth, 256)
    assert arrays.mean_overlap(counts[None]) == pytest.approx((1 / 2 + 2 / 3 + 1) / 3)
    clean = random.standard_normal(1000)
    noisy = 3 * clean + 0.3 * random.standard_normal(1000)
    assert arrays.decibels(np.array([arrays.si_sdr(clean, noisy)])) == pytest.approx(20, abs=0.5)
    assert arrays.decibels(np.array([arrays.si_sdr(clean, clean)])) > 200
    logits, ids = np.zeros((1, 5, 8)), np.array([[1, 2, 3, 4, 5]])
    assert arrays.perplexity(np.array([arrays.log_loss(logits, ids)])) == pytest.approx(8)
    assert (
        arrays.among_first(np.array([0.1, 0.4, 0.3]), 2, 2) == 1 and arrays.among_first(np.array([1.0, 2]), 0, 1) == 0
    )
    assert arrays.among_first(np.array([np.nan, 0.1]), 0, 1) == 0


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two pictures of each of five classes, in a folder per class."""
    images, labels = data.split()[0]
    for kind in range(5):
        (tmp_path / "images" / str(kind)).mkdir(parents=True)
        for place, index in enumerate(np.flatnonzero(np.asarray(labels) == kind)[:4]):
            np.save(tmp_path / "images" / str(kind) / f"{place}.npy", images[index][None])
    return tmp_path / "images"


def test_folders_are_classes_and_decide(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = data.model_path()
    words = ["auto", str(model), "--for", "npu", "--minutes", "0", "--data", str(folders), "--metric", "top1"]
    count = len(list(folders.rglob("*.npy")))
    code = main([*words, "-o", str(folders.parent / "best.onnx")])
    printed = capsys.readouterr().out
    assert code in (0, 3) and "top1" in printed and "% on samples that decided nothing (float" in printed
    assert count >= 8
    for place, name in enumerate(sorted(one.name for one in folders.iterdir())):
        (folders / name).rename(folders / f"class {place}")
    main([*words, "-o", str(folders.parent / "best2.onnx")])
    said = capsys.readouterr().err
    assert "folders" in said and "classes apart" in said  # ten classes of the model, five folders


def test_classes_of_every_kind_of_file(tmp_path: Path) -> None:
    files = [tmp_path / "a" / "x.jpg", tmp_path / "b" / "y.jpg"]
    kinds: dict[str, str] = {"l.txt": "3\n1\n", "l.csv": "file,class\ny.jpg,1\nx.jpg,3\n", "one.csv": "label\n3\n1\n"}
    for name, text in kinds.items():
        (tmp_path / name).write_text(text)
        assert classes_of(LabelSource(tmp_path / "m", tmp_path / name, files)) == [3, 1]
    np.save(tmp_path / "l.npy", np.array([3, 1]))
    assert classes_of(LabelSource(tmp_path / "m", tmp_path / "l.npy", files)) == [3, 1]
    assert classes_of(LabelSource(tmp_path / "m", None, files)) == [0, 1]  # the order of the folders' names
    for text, message in (
        ("x.jpg,3\n", "no class for the sample 'y.jpg'."),
        ("a,b,c\n1,2,3\n", "a file and its class"),
    ):
        (tmp_path / "w.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            classes_of(LabelSource(tmp_path / "m", tmp_path / "w.csv", files))
    with pytest.raises(DataError, match="rows of one file"):
        classes_of(LabelSource(tmp_path / "m", None, [None, None]))
    with pytest.raises(DataError, match="is a folder: give a file, or leave it out"):
        classes_of(LabelSource(tmp_path / "m", tmp_path, files))


def test_an_unknown_metric_is_named_with_the_nearest_and_what_labels_it_needs() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'map50'"):
        metric_of("map5")
    for name in METRICS:
        if METRICS[name].labels:
            with pytest.raises(ConfigError, match=f"--metric {name} needs --labels"):
                metrics_on(name, Path("m.onnx"), LabelSource(Path("m.onnx"), None, [None]), [([], [])])


# ---- whole models ----------------------------------------------------------------------------------------------------


def boxes(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]], LabelSource, float]:
    """A detector whose boxes are its input: what it finds is written down as the truth of a picture twice as large."""
    rows = 64
    model = saved(
        folder / "m.onnx",
        [
            helper.make_node("ReduceMean", ["image"], ["zero"], axes=[0, 1, 2, 3]),
            helper.make_node("Mul", ["zero", "nothing"], ["none"]),
            helper.make_node("Add", ["b", "none"], ["boxes"]),
            helper.make_node("Add", ["s", "none"], ["scores"]),
        ],
        {"image": (TensorProto.FLOAT, [1, 3, 32, 64])},
        ["boxes", "scores"],
        {"b": _corners(rows), "s": _scores(rows), "nothing": np.float32(0).reshape(1, 1, 1, 1)},
    )
    model = _flat(model)
    files = [folder / f"{k}.png" for k in range(3)]
    truth = [(kind, box) for kind, box in zip((0, 1, 0), _corners(rows)[0, :3], strict=True)]
    images = [{"id": k, "file_name": f"{k}.png", "width": 128, "height": 64} for k in range(3)]
    found = [
        {"image_id": k, "category_id": 5 + 2 * kind, "bbox": [float(v) for v in (*box[:2], *(box[2:] - box[:2]))]}
        for k in range(3)
        for kind, box in ((kind, box * [128, 64, 128, 64]) for kind, box in truth)
    ]
    told = {"images": images, "annotations": found, "categories": [{"id": 5}, {"id": 7}], "info": {"year": 2026}}
    (folder / "coco.json").write_text(json.dumps(told))
    feeds = [{"image": np.zeros((1, 3, 32, 64), np.float32)} for _ in files]
    return model, feeds, LabelSource(model, folder / "coco.json", files), 1.0


def _corners(rows: int) -> np.ndarray:
    low = np.stack(np.meshgrid(np.linspace(0, 0.9, 8), np.linspace(0, 0.9, 8)), -1).reshape(1, rows, 2)
    return np.concatenate([low, low + 0.08], -1).astype(np.float32)


def _scores(rows: int) -> np.ndarray:
    made = np.full((1, rows, 2), 0.001, np.float32)
    made[0, [0, 1, 2], [0, 1, 0]] = 0.9
    return made


def _flat(path: Path) -> Path:
    """The zero that depends on the picture gets the rank of boxes."""
    model = onnx.load(path)
    model.graph.node.insert(2, helper.make_node("Squeeze", ["none"], ["flat"]))
    for node in model.graph.node[3:]:
        node.input[1] = "flat"
    onnx.save(model, path)
    return path


def masks(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]], LabelSource, float]:
    """A network that says the class of a pixel is the brightest channel; one pixel of the truth differs."""
    model = saved(
        folder / "m.onnx",
        [helper.make_node("Mul", ["image", "one"], ["y"])],
        {"image": (TensorProto.FLOAT, [1, 3, 4, 4])},
        ["y"],
        {"one": np.float32([1])},
    )
    feeds, files = [], []
    (folder / "masks").mkdir()
    for k in range(2):
        image = random.random((1, 3, 4, 4)).astype(np.float32)
        feeds.append({"image": image})
        files.append(folder / f"p{k}.png")
        Image.fromarray(image[0].argmax(0).astype(np.uint8)).resize((8, 8), 0).save(folder / "masks" / f"p{k}.png")
    return model, feeds, LabelSource(model, folder / "masks", files), 1.0


def sounds(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]], LabelSource, float]:
    """A network that makes sounds half as loud, which SI-SDR does not see."""
    model = saved(
        folder / "m.onnx",
        [helper.make_node("Mul", ["x", "half"], ["y"])],
        {"x": (TensorProto.FLOAT, [1, 160])},
        ["y"],
        {"half": np.float32([0.5])},
    )
    (folder / "clean").mkdir()
    feeds = []
    for k in range(2):
        frames = (random.standard_normal(160) * 3000).astype(np.int16)
        with wave.open(str(folder / "clean" / f"{k}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 160, "NONE", ""))
            file.writeframes(frames.tobytes())
        sound, noise = frames / 32768, random.standard_normal(160)
        noise -= sound * (noise @ sound) / (sound @ sound)  # 40 dB less, and nothing of the sound in it
        noise *= 0.01 * np.linalg.norm(sound) / np.linalg.norm(noise)
        feeds.append({"x": (sound + noise).astype(np.float32)[None]})
    return model, feeds, LabelSource(model, folder / "clean", [folder / f"{k}.wav" for k in range(2)]), 40.0


def tokens(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]], LabelSource, float]:
    """A table of logits in which every token is followed by the next one with the probability 1/2 of 3."""
    logits = np.log(np.where(np.roll(np.eye(3), 1, 1) > 0, 0.5, 0.25)).astype(np.float32)
    model = saved(
        folder / "m.onnx",
        [helper.make_node("Gather", ["table", "input_ids"], ["logits"])],
        {"input_ids": (TensorProto.INT64, [1, 4])},
        ["logits"],
        {"table": logits},
    )
    feeds = [{"input_ids": np.array([[0, 1, 2, 0]])}, {"input_ids": np.array([[2, 0, 1, 2]])}]
    return model, feeds, LabelSource(model, None, [None, None]), -2.0


MODELS: dict[str, Callable[[Path], Any]] = {"map50": boxes, "miou": masks, "si-sdr": sounds, "perplexity": tokens}


def test_every_metric_has_a_model_here() -> None:
    assert set(MODELS) == set(METRICS)


@pytest.mark.parametrize("name", MODELS)
def test_the_metric_of_a_model_whose_answers_are_known(name: str, tmp_path: Path) -> None:
    model, feeds, given, expected = MODELS[name](tmp_path)
    part = list(range(len(feeds)))
    one, again = metrics_on(name, model, given, [(feeds, part), (feeds[:1], part[:1])])
    assert one(str(model)).value == pytest.approx(expected, abs=0.6 if name == "si-sdr" else 1e-3)
    assert len(one(str(model)).without) == len(feeds) and again(str(model)).without == ()


def told(change: Callable[[Any], Any]) -> Callable[[Path, LabelSource], None]:
    """Change what coco.json says."""

    def damage(folder: Path, given: LabelSource) -> None:
        path = folder / "coco.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return damage


def painted(folder: Path, given: LabelSource) -> None:
    Image.fromarray(np.full((8, 8), 3, np.uint8)).save(folder / "masks" / "p1.png")


def one_channel(folder: Path, given: LabelSource) -> None:
    model = onnx.load(given.model)
    model.graph.node.append(helper.make_node("ReduceMax", ["y"], ["z"], axes=[1]))
    model.graph.output[0].name = "z"
    onnx.save(model, given.model)


def renamed(folder: Path, given: LabelSource) -> None:
    (folder / "clean" / "0.wav").rename(folder / "clean" / "7.wav")


DAMAGES: dict[str, tuple[str, Callable[[Path, LabelSource], Any], str]] = {
    "a box of no image": ("map50", told(lambda x: x["annotations"][4].update(image_id=9)), "image 9, which is not"),
    "a box to the left": ("map50", told(lambda x: x["annotations"][4].update(bbox=[9, 9, -3, 3])), r"-3.0, 3.0\]"),
    "another category": ("map50", told(lambda x: x["annotations"][4].update(category_id=6)), "category 6"),
    "more classes": (
        "map50",
        told(lambda x: x["categories"].insert(0, {"id": 1})),
        "class 2 .from 0 on., and .* knows 2",
    ),
    "a picture less": ("map50", told(lambda x: x["images"].pop()), "image 2, which is not"),
    "no picture": (
        "map50",
        told(lambda x: x["images"][2].update(file_name="02.png")),
        "'2.png'. Did you mean '02.png'",
    ),
    "a class more": ("miou", painted, "a mask has the class 3, and the model tells 3 apart"),
    "no mask": (
        "miou",
        lambda folder, given: (folder / "masks" / "p1.png").unlink(),
        "no mask for the sample 'p1.png'",
    ),
    "one channel": ("miou", one_channel, "one channel"),
    "another sound": ("si-sdr", renamed, "no clean sound for the sample '0'"),
    "a sound less": ("si-sdr", lambda folder, given: (folder / "clean" / "1.wav").unlink(), "sample '1'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_labels_that_do_not_fit_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    """A number that looked like a metric would be worse than none."""
    metric, damage, message = DAMAGES[name]
    model, feeds, given, _ = MODELS[metric](tmp_path)
    damage(tmp_path, given)
    with pytest.raises(DataError, match=message) as found:
        metrics_on(metric, model, given, [(feeds, list(range(len(feeds))))])[0](str(model))
    assert "\n" not in str(found.value)


def test_sounds_of_other_names_are_taken_in_their_order(tmp_path: Path) -> None:
    model, feeds, given, expected = sounds(tmp_path)
    for k in (0, 1):
        (tmp_path / "clean" / f"{k}.wav").rename(tmp_path / "clean" / f"clean_{k}.wav")
    assert metrics_on("si-sdr", model, given, [(feeds, [0, 1])])[0](str(model)).value == pytest.approx(
        expected, abs=0.6
    )


@pytest.mark.parametrize(("first", "message"), [(9, ""), (10, "10 classes, so every answer"), (99, "10 classes")])
def test_a_metric_that_every_answer_fulfils_is_refused(first: int, message: str) -> None:
    given = LabelSource(data.model_path(), None, [Path(f"{k}/{k}.npy") for k in range(10)])
    parts = [([{"image": image[None]} for image in data.split()[0][0][:10]], list(range(10)))]
    if not message:
        assert metrics_on(f"top{first}", given.model, given, parts)[0](str(given.model)).value <= 1
        return
    with pytest.raises(DataError, match=message):
        metrics_on(f"top{first}", given.model, given, parts)


def test_a_file_of_two_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("x.jpg,3\ny.jpg,1\nx.jpg,3\n")
    given = LabelSource(tmp_path / "m", tmp_path / "l.csv", [tmp_path / "x.jpg", tmp_path / "y.jpg"])
    assert classes_of(given) == [3, 1]
    (tmp_path / "l.csv").write_text("x.jpg,3\ny.jpg,1\nx.jpg,4\n")
    with pytest.raises(DataError, match=r"gives 'x\.jpg' the classes 3 and 4"):
        classes_of(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no.py:f", "the file 'no.py' does not exist"),
        ("no.py:", "as in task.py:accuracy"),
        ("accuracy:f", "as in task.py:accuracy"),
    ],
)
def test_a_function_that_is_not_there_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(text)


@pytest.mark.parametrize(("value", "message"), [([], "an empty list"), (np.ones((2, 2)), "must return a number")])
def test_what_a_function_returned_is_told_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        score_of(value, "f")
    assert "\n" not in str(found.value)


def test_boxes_lie_where_the_picture_was_put() -> None:
    label = type("L", (), {"size": (100, 50), "rows": ((10.0, 10.0, 20.0, 20.0, 0.0, 0.0),)})
    for resize, expected in (("stretch", (4, 8, 8, 16)), ("letterbox", (4, 14, 8, 18)), ("crop", (0, 8, 0, 16))):
        given = LabelSource(Path("m"), Path("l"), [None], Preprocessing(resize=resize))
        assert given.seen(label, (40, 40), False)[0, :4] == pytest.approx(expected)  # type: ignore[arg-type]
        assert given.seen(label, (40, 40), True)[0, :4] == pytest.approx(np.array(expected) / 40)  # type: ignore[arg-type]
