"""The command line: what a newcomer types, what a program reads, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark import __version__
from quark.cli import main
from quark.cli.beside import preprocessing_beside, recipe_beside
from quark.cli.common import THREADS
from quark.cli.settings import parse_settings
from quark.cli.verdicts import Bound
from quark.config.plan import Plan
from quark.config.presets import HARDWARE, PRESETS
from quark.config.tensor import TensorSpec
from quark.demo import data
from quark.errors import ConfigError
from quark.measure.distance import Distance
from quark.numerics.formats import FORMATS, Block
from quark.onnx.compare import Comparison
from quark.onnx.graph import model as graph_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model, eight samples, and the model quantized with A8W8."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copy(data.model_path(), folder / "model.onnx")
    np.savez(folder / "samples.npz", image=data.split()[0][0][:8])
    command = ["onnx", "quantize", f"{folder}/model.onnx", "-o", f"{folder}/q.onnx", "-p", "A8W8", "--no-check"]
    assert main([*command, "--data", f"{folder}/samples.npz"]) == 0
    return folder


def quantize(folder: Path, *extra: str, output: str = "other.onnx") -> int:
    paths = [str(folder / "model.onnx"), "-o", str(folder / output)]
    return main(["onnx", "quantize", *paths, *extra])


def object_on(capture: Capture) -> dict[str, Any]:
    """The JSON object on standard output; Infinity and NaN are not JSON."""
    return json.loads(capture.readouterr().out, parse_constant=pytest.fail)


def sentence(capture: Capture) -> str:
    """The one line of the error."""
    printed = capture.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


def test_generated_samples_may_stand_beside_real_ones_to_judge_by(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were refused, as if --data had been given, after all the work; so were paths that do not exist."""
    judged = ["--eval-data", str(folder / "samples.npz")]
    assert quantize(folder, "--random", *judged, "--json", output="judged.onnx") == 0
    assert object_on(capsys)["checked_samples"] == 8
    monkeypatch.setattr("quark.cli.quantization.ModelQuantizer.run", pytest.fail)
    assert quantize(folder, "--random", "--eval-data", "none.npz", output="late.onnx") == 1
    assert sentence(capsys).startswith("error: --eval-data 'none.npz' does not exist")


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("None", None),
        ("null", None),
        ("3", 3),
        ("99.9", 99.9),
        ("1e-3", 0.001),
        ("mae", "mae"),
        ("[Conv, Gemm]", ["Conv", "Gemm"]),
        ('["Conv"]', ["Conv"]),
        ("{input: [1, 3, 8, 8]}", {"input": [1, 3, 8, 8]}),
        ("a=b", "a=b"),
    ],
)
def test_values_of_set(text: str, value: object) -> None:
    assert parse_settings([f"Name={text}"]) == {"Name": value}


@pytest.mark.parametrize("text", ["Percentile", "=3", "A=[1", "A={"])
def test_settings_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_settings([text])


def test_a_setting_given_twice() -> None:
    with pytest.raises(ConfigError, match="--set A is given twice"):
        parse_settings(["A=1", "A=2"])


# ---- help and usage --------------------------------------------------------------------------------------------------


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quark {__version__}\n"


@pytest.mark.parametrize("command", [["onnx", "quantize"], ["onnx", "inspect"], ["onnx", "compare"]])
def test_help_has_an_example(command: list[str], capsys: Capture) -> None:
    assert main([*command, "--help"]) == 0
    assert f"quark {' '.join(command)} model.onnx" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["onnx", "quantize", "m.onnx"], ["nonsense"], ["onnx", "quantize", "--nonsense"]])
def test_wrong_usage_is_2(command: list[str], capsys: Capture) -> None:
    assert main(command) == 2
    assert "Usage: quark" in capsys.readouterr().err


# ---- quantize --------------------------------------------------------------------------------------------------------


def test_a_quantization_reads_the_float_model_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, inputs and weights of one reading; what was written is read to be checked, for its size and coverage."""
    read, seen = graph_model._read, []
    monkeypatch.setattr(graph_model, "_read", lambda path: seen.append(Path(path).name) or read(path))
    monkeypatch.setenv("QUARK_THREADS", "")
    for name in THREADS:
        monkeypatch.setenv(name, "")
    path = tmp_path / "fresh.onnx"
    path.write_bytes((folder / "model.onnx").read_bytes())
    words = ["--random", "--samples", "2", "--no-check", "--threads", "1"]
    assert main(["onnx", "quantize", str(path), "-o", str(tmp_path / "out.onnx"), *words]) == 0
    assert seen.count("fresh.onnx") == 1 and len(seen) <= 4
    assert os.environ["QUARK_THREADS"] == "1"


def test_quantized_model_runs_and_is_small(folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "q.onnx")
    (inputs, labels) = data.split()[1]
    logits = session.run(None, {"image": inputs})[0]
    assert (logits.argmax(axis=1) == labels).mean() > 0.97
    assert (folder / "q.onnx").stat().st_size < 0.35 * (folder / "model.onnx").stat().st_size


def test_tables_of_quantize(folder: Path, capsys: Capture) -> None:
    assert quantize(folder, "--data", str(folder / "samples.npz")) == 0
    printed = capsys.readouterr()
    for words in ("Operators", "Conv", "Outcome", "size", "latency", "SQNR of logits", "cosine of logits"):
        assert words in printed.out
    assert "Wrote" in printed.err and "other.onnx" in printed.err


def test_json_of_quantize(folder: Path, capsys: Capture) -> None:
    assert quantize(folder, "--data", str(folder / "samples.npz"), "--samples", "3", "--json") == 0
    found = object_on(capsys)
    assert found["outputs"]["logits"]["sqnr"] > 15
    assert found["checked_samples"] == 3
    assert found["bytes"]["quantized"] == (folder / "other.onnx").stat().st_size
    assert 0 < found["nodes"]["quantized"] <= found["nodes"]["total"]
    assert found["latency_seconds"]["float"] > 0


def test_presets_settings_and_exclusions_reach_the_plan(folder: Path) -> None:
    chosen = ["--preset", "XINT8", "--set", "OpTypesToQuantize=[Conv]", "--exclude", "^/body/body.0/.*", "--no-check"]
    assert quantize(folder, "--data", str(folder / "samples.npz"), *chosen, "--plan", f"{folder}/p.json") == 0
    plan = Plan.from_json((folder / "p.json").read_text())
    assert {node.op_type for node in plan.nodes.values() if node.quantized and node.op_type != "Relu"} == {"Conv"}
    first = next(node for node in plan.nodes.values() if node.name.startswith("/body/body.0/"))
    assert not first.quantized
    assert {tensor.spec.scale_rule for tensor in plan} == {"power_of_two"}


def test_target_cpu_makes_activations_unsigned(folder: Path, capsys: Capture) -> None:
    common = ["--data", str(folder / "samples.npz"), "--preset", "A8W8", "--no-check"]
    kinds = []
    for target in ("any", "cpu"):
        assert quantize(folder, *common, "--target", target) == 0
        capsys.readouterr()
        assert main(["onnx", "inspect", str(folder / "other.onnx"), "--json"]) == 0
        kinds.append(set(object_on(capsys)["activations"]))
    assert kinds == [{"int8"}, {"uint8"}]


def test_random_data_is_noted(folder: Path, capsys: Capture) -> None:
    assert quantize(folder, "--random", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["checked_samples"] == 1
    assert "generated data" in printed.err


def test_shape_and_range_of_random_data(folder: Path, capsys: Capture) -> None:
    shaped = [
        "--random",
        "--no-check",
        "--set",
        "FloatWhereFaster=false",
        "--set",
        "RandomDataReaderInputShape={image: [1, 1, 32, 32]}",
    ]
    assert quantize(folder, *shaped, "--set", "RandomDataReaderInputDataRange={image: [0, 9]}") == 0
    assert 8 < largest_input(folder / "other.onnx") < 10
    assert quantize(folder, *shaped) == 0
    assert 0.8 < largest_input(folder / "other.onnx") < 1.1
    capsys.readouterr()
    assert quantize(folder, "--random", "--set", "RandomDataReaderInputShape={pixels: [1]}") == 1
    assert "pixels" in capsys.readouterr().err


def largest_input(path: Path) -> float:
    """What the largest code of the quantized graph input stands for (uint8)."""
    model = onnx.load(path)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    node = next(node for node in model.graph.node if node.input[0] == "image")
    return (255 - float(stored[node.input[2]])) * float(stored[node.input[1]])


def test_weights_only_needs_no_data(folder: Path, capsys: Capture) -> None:
    assert quantize(folder, "--set", "WeightsOnly=true", "--json") == 0
    assert "outputs" not in object_on(capsys)
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(folder / "other.onnx").graph.node}


def test_report_of_quantize(folder: Path) -> None:
    page = folder / "pages" / "report.html"
    assert quantize(folder, "--data", str(folder / "samples.npz"), "--report", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    assert "model.onnx → other.onnx" in text and "/body/body.2/first/first.0/Conv" in text


# ---- inspect, compare, lists -----------------------------------------------------------------------------------------


def test_inspect_float_and_quantized(folder: Path, capsys: Capture) -> None:
    assert main(["onnx", "inspect", str(folder / "model.onnx"), "--json"]) == 0
    found = object_on(capsys)
    assert found["inputs"] == [{"name": "image", "dtype": "float32", "shape": ["N", 1, 32, 32]}]
    assert found["operators"]["Conv"] == 8 and found["quantized"] == {} and found["opset"] == 17
    assert main(["onnx", "inspect", str(folder / "q.onnx"), "--json"]) == 0
    found = object_on(capsys)
    assert found["quantized"]["Conv"] == 8 and set(found["activations"]) == {"int8"}
    assert found["weights"]["int8"][1] > 350_000


def test_inspect_for_people(folder: Path, capsys: Capture) -> None:
    assert main(["onnx", "inspect", str(folder / "model.onnx")]) == 0
    printed = capsys.readouterr().out
    assert "[N, 1, 32, 32]" in printed and "1.6 MB" in printed and "this is a float model" in printed


def test_compare(folder: Path, capsys: Capture) -> None:
    common = [str(folder / "model.onnx"), str(folder / "q.onnx"), "--data", str(folder / "samples.npz")]
    assert main(["onnx", "compare", *common]) == 0
    printed = capsys.readouterr().out
    assert "End to end" in printed and "Layer by layer, worst first" in printed
    assert main(["onnx", "compare", *common, "--json", "--report", str(folder / "c.html")]) == 0
    found = object_on(capsys)
    assert found["samples"] == 8 and len(found["layers"]) >= 10
    assert {"Conv", "Relu", "Add", "Gemm"} <= {layer["op_type"] for layer in found["layers"]}
    assert "q.onnx against model.onnx" in (folder / "c.html").read_text(encoding="utf-8")


def test_several_models_are_compared_and_the_page_has_the_same_figures(folder: Path, capsys: Capture) -> None:
    models = [str(folder / name) for name in ("model.onnx", "q.onnx", "model.onnx")]
    common = [*models, "--data", str(folder / "samples.npz"), "--report", str(folder / "both.html")]
    assert main(["onnx", "compare", *common, "--json", "--fail-under", "sqnr=90"]) == 3
    told = capsys.readouterr()
    assert "q.onnx: --fail-under" in told.err and "model.onnx: --fail-under" not in told.err
    first, second = json.loads(told.out)["models"].values()
    page = (folder / "both.html").read_text(encoding="utf-8")
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert shown["models"] == ["q.onnx", "model.onnx"] and shown["examples"][0]["kind"] == "classes"
    rows = {row["t"]: row for row in shown["layers"]}
    for layer in first["layers"]:
        alone, own, accumulated, *_ = rows[layer["tensor"]]["m"][0]
        for here, there in ((alone, layer["alone"]), (own, layer["own"]), (accumulated, layer["sqnr"])):
            assert here == there if isinstance(there, str | None) else here == pytest.approx(there, abs=0.006)
    assert all(float(layer["alone"] or "inf") > 120 for layer in second["layers"])  # a model against itself
    head = next(row for row in shown["layers"] if row["o"] == "Gemm")
    assert head["w"] in shown["tensors"] and "Gemm" in shown["words"][shown["reasons"][0][head["n"]]]


def test_a_model_against_itself_is_equal(folder: Path, capsys: Capture) -> None:
    model = str(folder / "model.onnx")
    assert main(["onnx", "compare", model, model, "--data", str(folder / "samples.npz"), "--json"]) == 0
    found = object_on(capsys)
    assert found["outputs"]["logits"]["sqnr"] == "inf"
    assert {layer["sqnr"] for layer in found["layers"]} == {"inf"}


# ---- the verdict -----------------------------------------------------------------------------------------------------

SUBJECTS = ("accuracy", "speed", "size", "coverage")


def test_the_last_lines_are_the_verdict(folder: Path, capsys: Capture) -> None:
    samples = str(folder / "samples.npz")
    assert quantize(folder, "--data", samples, "--eval-data", samples) == 0
    last = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in last] == list(SUBJECTS)
    assert (
        "good" in last[0]
        and "8 samples of --eval-data" in last[0]
        and "99 % of the multiplications in integers and 100 % of the weights" in last[3]
    )
    assert quantize(folder, "--data", samples, "--json") == 0
    verdict = object_on(capsys)["verdict"]
    assert verdict["accuracy"]["word"] == "good" and verdict["next"] == []


@pytest.mark.parametrize(
    "words", [[], ["--eval-data", "SAMPLES"], ["--fail-under", "sqnr=1"], ["--fail-slower"], ["--report", "r.html"]]
)
def test_who_asks_for_a_figure_gets_that_of_all_samples(
    words: list[str], folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that nobody asked for stops early where the model is slow; here every model is."""
    monkeypatch.setattr("quark.cli.quantization.ENOUGH", 0.0)
    monkeypatch.chdir(tmp_path)
    samples = str(folder / "samples.npz")
    asked = [samples if word == "SAMPLES" else word for word in words]
    assert quantize(folder, "--data", samples, *asked, "--json") in (0, 3)
    assert object_on(capsys)["checked_samples"] == (8 if words else 4)


def test_a_lost_model_says_what_helps_and_the_command_works(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges that clip most values lose this model; the advised command keeps the samples and has been tried."""
    monkeypatch.setattr("quark.onnx.climb.WORTH_DECIBELS", 0.1)  # what gains more comes later, and takes longer
    samples = str(folder / "samples.npz")
    bad = ["--preset", "S8S8_AAWS", "--set", "Percentile=60"]
    assert quantize(folder, "--data", samples, *bad, "--fail-under", "sqnr=20") == 3
    printed = capsys.readouterr()
    assert "--fail-under sqnr=20" in printed.err and "Wrote" in printed.err
    last = [line for line in printed.out.splitlines() if line.startswith("next")]
    assert last and samples in last[0] and ("tried: " in last[0] or "no better" in last[0])
    words = shlex.split(last[0].removeprefix("next").split("   (tried")[0])
    monkeypatch.setattr("quark.cli.verdicts.SECONDS", 0.0)
    assert words[:3] == ["quark", "onnx", "quantize"] and main(words[1:]) == 0


def test_a_recipe_that_finds_nothing_to_do_is_no_error_of_the_command(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an algorithm says of this model while the advice is tried comes after the model was written."""

    def nothing(*_: object) -> None:
        raise ConfigError("GPTQConfig: the model has no MatMul")

    monkeypatch.setattr("quark.cli.verdicts.ModelQuantizer", lambda _: SimpleNamespace(run=nothing))
    bad = ["--preset", "S8S8_AAWS", "--set", "Percentile=60"]
    assert quantize(folder, "--data", str(folder / "samples.npz"), *bad) == 0
    printed = capsys.readouterr()
    assert "no better" in printed.out and "error" not in printed.err


def test_bounds_that_cannot_be_meant(folder: Path, capsys: Capture) -> None:
    never = {
        "cosine=1.5": "from -1 to 1",
        "cosine=-2": "never -2",
        "sqnr=-inf": "every model has a sqnr of -inf or more",
        "kept=95": "kept is from 0 to 1, and never 95",
    }
    told = {"sqnr": "sqnr=20", "sqnt=3": "Did you mean 'sqnr'", "sqnr=x": "'x' is not", "sqnr=nan": "'nan' is not"}
    for text, words in {**told, **never}.items():
        assert quantize(folder, "--random", "--fail-under", text) == 1
        assert words in capsys.readouterr().err


def test_compare_ends_with_a_verdict_and_holds_to_a_bound(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.compare.pace_of", lambda *_: {"float": 2.0, "quantized": 1.0})
    files = [str(folder / name) for name in ("model.onnx", "q.onnx", "samples.npz")]
    words = ["onnx", "compare", *files[:2], "--data", files[2]]
    assert main([*words, "--fail-under", "sqnr=20"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-4:]] == [
        *("accuracy", "speed", "size", "coverage")
    ]
    for bound, said in (("sqnr=90", "the worst output, '"), ("kept=0.9", "too few answers")):
        assert main([*words, "--fail-under", bound]) == 3
        told = capsys.readouterr().err
        assert f"--fail-under {bound}" in told and said in told
    assert main([*words, "--fail-slower"]) == 0
    monkeypatch.setattr("quark.onnx.compare.pace_of", lambda *_: {"float": 1.0, "quantized": 2.0})
    capsys.readouterr()
    assert main([*words, "--fail-slower"]) == 3
    assert "--fail-slower: 0.50 times as fast as float here" in capsys.readouterr().err


@pytest.mark.parametrize("order", [("good", "broken"), ("broken", "good")])
def test_an_output_that_is_not_a_number_is_below_every_bound(order: tuple[str, str]) -> None:
    """The worst output is named, wherever it stands."""
    outputs = {name: Distance() for name in order}
    for name, value in (("good", 1.0), ("broken", np.nan)):
        outputs[name].update(np.ones(4), np.full(4, value))
    said = Bound("sqnr", 20).failure(Comparison(outputs, (), (), 1))
    assert said == "--fail-under sqnr=20: the worst output, 'broken', has nan dB"


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_pictures_in_class_folders_a_broken_one_and_a_mean_of_another_unit(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    shape = data.split()[0][0][0].shape
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 255, shape[1:], np.uint8)
            pillow.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    (tmp_path / "a" / "broken.png").write_bytes(b"no picture")
    words = ["--data", str(tmp_path), "--no-check"]
    assert quantize(folder, *words, "--mean", "123.7") == 0
    told = capsys.readouterr().err
    assert "use --scale 1" in told and told.count("skipped: ") == 1
    assert quantize(folder, *words, "--strict") == 1
    assert "broken.png" in capsys.readouterr().err
    code = f"import numpy\ndef read(path):\n    return numpy.zeros({tuple(shape)}, numpy.float32)\n"
    (tmp_path / "mine.py").write_text(code)
    assert quantize(folder, *words, "--preprocess", f"{tmp_path / 'mine.py'}:read") == 0
    for flag, value, said in (("--size", "8", "224x224"), ("--resize", "fit", "stretch"), ("--scale", "3", "255")):
        assert quantize(folder, *words, flag, value) == 1
        assert said in capsys.readouterr().err


def test_lists(capsys: Capture) -> None:
    assert main(["presets", "--json"]) == 0
    assert {"A8W8", "XINT8", "A8W8_CPU"} <= set(object_on(capsys))
    assert main(["options", "--json"]) == 0
    assert object_on(capsys)["Percentile"]["default"] == 99.999
    assert main(["options"]) == 0 and "Percentile" in capsys.readouterr().out


def test_every_preset_is_one_line_that_says_what_it_is_for(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["presets"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, preset in PRESETS.items():
        (words,) = (line for line in lines if line[:1] == [name])
        assert words[-1] in HARDWARE and preset.weight.format in " ".join(words)
    for kind in HARDWARE:
        assert main(["presets", "--for", kind, "--json"]) == 0
        assert {name for name, one in PRESETS.items() if kind in one.hardware} == set(object_on(capsys))
    assert main(["presets", "A8W8_CPU"]) == 0 and "uint8 asymmetric per tensor" in capsys.readouterr().out
    assert main(["presets", "--for", "tpu"]) == 1 and "cpu, npu, gpu" in capsys.readouterr().err
    assert main(["presets", "A8W8_CPUS"]) == 1 and "Did you mean 'A8W8_CPU'" in capsys.readouterr().err


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_spec_says_only_what_its_format_has(format: str) -> None:
    """Blocks find their scales themselves, and a type of unit scale has none: neither is ranged by a method."""
    row, words = FORMATS[format], TensorSpec(format, method="percentile").describe()
    assert ("blocks of" in words) == isinstance(row, Block)
    has_range = row.tensor_scale if isinstance(row, Block) else not row.unit_scale
    assert words.startswith(format) and ("percentile" in words) == has_range


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--random", "--preset", "A8W9"], ["A8W9", "Did you mean 'A8W8'"]),
        (["--random", "--set", "Percentil=9"], ["Percentil", "Did you mean 'Percentile'"]),
        (["--random", "--set", "Percentile=high"], ["Percentile", "'high'"]),
        (["--random", "--set", "Percentile"], ["Option=value"]),
        (["--random", "--target", "gpu"], ["--layout", "gpu", "cpu"]),
        ([], ["--data", "--random"]),
        (["--random", "--data", "x"], ["--data", "--random"]),
        (["--data", "nowhere.npz"], ["nowhere.npz", "does not exist"]),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, extra: list[str], words: list[str], capsys: Capture) -> None:
    assert quantize(folder, *extra, output="never.onnx") == 1
    said = sentence(capsys)
    assert all(word in said for word in words), said
    assert not (folder / "never.onnx").exists()


def test_model_that_is_missing_or_corrupt(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    for name, words in (("missing.onnx", "does not exist"), ("bad.onnx", "bad.onnx")):
        assert main(["onnx", "quantize", str(tmp_path / name), "-o", str(tmp_path / "o.onnx"), "--random"]) == 1
        assert words in sentence(capsys)
        assert main(["onnx", "inspect", str(tmp_path / name)]) == 1
        assert words in sentence(capsys)


def test_output_folder_that_is_missing(folder: Path, capsys: Capture) -> None:
    assert quantize(folder, "--random", output="no/where.onnx") == 1
    assert "does not exist" in sentence(capsys)


def test_samples_that_do_not_fit(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "wrong.npz", image=np.zeros((2, 1, 16, 16), np.float32))
    assert quantize(folder, "--data", str(tmp_path / "wrong.npz"), output="never.onnx") == 1
    assert "image" in sentence(capsys)
    common = [str(folder / "model.onnx"), str(folder / "q.onnx")]
    assert main(["onnx", "compare", *common, "--data", str(tmp_path / "wrong.npz")]) == 1
    assert "image" in sentence(capsys)


def test_models_that_are_no_pair(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    model = onnx.load(folder / "model.onnx")
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    onnx.save(model, tmp_path / "other.onnx")
    common = [str(folder / "model.onnx"), str(tmp_path / "other.onnx"), "--data", str(folder / "samples.npz")]
    assert main(["onnx", "compare", *common]) == 1
    assert "different outputs" in sentence(capsys)


def test_report_that_cannot_be_written(folder: Path, capsys: Capture) -> None:
    assert quantize(folder, "--random", "--report", str(folder)) == 1
    assert "--report" in (said := sentence(capsys)) and "is a folder" in said


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "quark", "presets"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "A8W8_CPU" in done.stdout, done.stderr


def test_what_lies_beside_an_output_is_known_from_words_too(tmp_path: Path) -> None:
    """Some versions of typer give the checks before work what was typed, some give paths."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").touch()
    given = {"model": tmp_path / "m.onnx", "output": tmp_path / "q.onnx", "data": tmp_path / "pictures"}
    for beside in (recipe_beside, preprocessing_beside):
        found = [
            [*beside({**{key: kind(value) for key, value in given.items()}, "preprocess": None})]
            for kind in (Path, str)
        ]
        assert found[0] == found[1] and len(found[0]) == 1
