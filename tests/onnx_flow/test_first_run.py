"""No model leaves that was not checked in full and did not run, unless the summary says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.random_detectors import pictures, random_detector

from quark.cli import main
from quark.errors import ModelError
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.first_run import DOUBLED_UP_TO, NAME, other_size
from quark.onnx.graph import budget
from quark.onnx.graph import model as files
from quark.onnx.qdq import emit

Q = {"PrintSummary": False}


def quantizer(preset: str = "A8W8", **options: object) -> ModelQuantizer:
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(**Q, **options)
    return ModelQuantizer(config)


def of_pass(model: onnx.ModelProto, **options: object) -> tuple[int, tuple[str, ...]]:
    data = pictures(0)
    report = next(one for one in quantizer(**options).run(model, None, data).passes if one.name == NAME)
    return report.fired, tuple(report.refused)


def test_it_has_run() -> None:
    assert of_pass(random_detector(0)) == (1, ())


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(
    ("op_type", "attributes", "why"),
    [
        ("Reshape", {}, "not published: it does not run"),
        ("Concat", {"axis": 9}, "not published: it fails onnx.checker"),
    ],
    ids=["run", "full check"],
)
def test_a_model_that_fails_is_not_published(
    written: bool, op_type: str, attributes: dict[str, int], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks the graph: here a node before the first output that fails at run time, or whose shape is none."""

    def broken(model: object) -> object:
        output = model.graph.outputs[0]  # type: ignore[attr-defined]
        old = output.producer()
        shape = emit.ir.Value(name="bad_shape", const_value=emit.ir.tensor([7, 7, 7], name="bad_shape"))
        model.graph.register_initializer(shape)  # type: ignore[attr-defined]
        given = [emit.ir.AttrInt64(name, value) for name, value in attributes.items()]
        new = emit.ir.Node("", op_type, [old.inputs[0], old.inputs[0] if given else shape], given, name="bad")
        model.graph.insert_before(old, new)  # type: ignore[attr-defined]
        old.replace_input_with(0, new.outputs[0])
        return model

    whole = emit._with_functions
    monkeypatch.setattr(emit, "_with_functions", lambda model: whole(broken(model)))  # type: ignore[arg-type]
    target = tmp_path / "out.onnx"
    target.write_bytes(b"older")
    with pytest.raises(ModelError, match=why):
        quantizer("XINT8").quantize_model(random_detector(0), target if written else None, pictures(0))
    assert target.read_bytes() == b"older" and list(tmp_path.iterdir()) == [target]


def test_what_the_float_model_cannot_do_is_no_fault() -> None:
    """It takes one size only, whatever its input says; and it gives infinity where nothing is."""
    draw = models.model(
        """one_size (float["n", 3] x) => (float["n", 4] y, float["n", 4] z) {
            wide = MatMul (x, w)
            two = Reshape (wide, sizes)
            y = Relu (two)
            minus = Sub (y, y)
            z = Log (minus)
        }""",
        {"w": models.normal(3, 4, seed=0), "sizes": np.array([2, 4], np.int64)},
        17,
    )
    made = quantizer().quantize_model(draw, None, [{"x": models.normal(2, 3, seed=1)}])
    assert made is not None


def test_values_beyond_float16_end_in_the_preset_that_holds_them() -> None:
    weights = {"w": models.normal(8, 8, scale=1e5), "v": models.normal(8, 4, scale=1e-5)}
    model = models.model(
        "large (float[4, 8] x) => (float[4, 4] y) { a = MatMul (x, w) y = MatMul (a, v) }", weights, 17
    )
    data = [{"x": models.normal(4, 8)}]
    with pytest.raises(
        ModelError, match=r"'y' is not finite in \d+ of 16 places.*float16 ends at 65,504, and the preset BF16"
    ):
        quantizer("FP16").quantize_model(model, None, data)
    assert quantizer("BF16").quantize_model(model, None, data) is not None


def test_without_a_sample_generated_values_serve_and_otherwise_it_says_so() -> None:
    weight = {"w": models.normal(3, 4, seed=0)}
    known = models.model('known (float["n", 3] x) => (float["n", 4] y) { y = MatMul (x, w) }', weight, 17)
    result = quantizer("UINT8_DYNAMIC_QUANT").run(known)
    assert next(one for one in result.passes if one.name == NAME).fired == 1
    unfit = quantizer("UINT8_DYNAMIC_QUANT", RandomDataReaderInputShape={"x": [2, 7]})
    report = next(one for one in unfit.run(known).passes if one.name == NAME)
    assert report.fired == 0 and report.refused[0].startswith("not run: there is no sample")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("r = Dropout (h, half, train) y = MatMul (r, w)", "'n1' (Dropout) draws them; the float model's outputs"),
        ("r = RandomUniformLike (h) y = Add (h, r)", "'n1' (RandomUniformLike) draws them"),
        ("r = Dropout (h, half, eval) y = MatMul (r, w)", ""),
        ("r = Dropout (h) y = MatMul (r, w)", ""),
    ],
)
def test_a_model_that_draws_random_numbers_is_said_to(text: str, said: str) -> None:
    """One left in training mode was "lost" under every preset, and nothing else was said."""
    stored = {"w": models.normal(4, 4), "half": np.array(0.5, np.float32)}
    stored |= {"train": np.array(True), "eval": np.array(False)}
    model = models.model(f"g (float[4, 4] x) => (float[4, 4] y) {{ h = MatMul (x, w) {text} }}", stored, 17)
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    result = quantizer("A8W8", UseRandomData=True).run(model)
    (report,) = [one for one in result.passes if one.name == NAME]
    assert report.fired == 1 and len(report.refused) == bool(said)
    assert not said or (said in report.refused[0] and ("for inference" in report.refused[0]) == ("Dropout" in said))


ENDLESS = """g (float[4, 4] x) => (float[4, 4] y) { h = MatMul (x, w)
    y = Loop (, t, h) <body = b (int64 i, bool c, float[4, 4] s) => (bool d, float[4, 4] o) {
        q = ReduceMax <keepdims = 0> (s) e = Greater (q, far) d = Not (e) o = Relu (s) }> }"""
UNFIT = """g (float["n", 4] x) => (float["n", 2] y) { h = MatMul (x, w) y = Reshape (h, sizes) }"""
TRIED = {
    "a loop that does not end": (ENDLESS, {"t": np.array(True), "far": np.array(np.inf, np.float32)}, "does not end"),
    "a size that nothing takes": (UNFIT, {"sizes": np.array([7, 2])}, "does not run the float model on 'x' float32"),
}


@pytest.mark.parametrize("preset", ["MATMUL_NBITS", "UINT8_DYNAMIC_QUANT"])
@pytest.mark.parametrize("name", TRIED)
def test_what_did_not_run_on_generated_values_is_told(name: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These modes read no samples: nothing has run the float model before."""
    text, weights, why = TRIED[name]
    monkeypatch.setattr(budget, "LOOP_SECONDS", 0.2)
    result = quantizer(preset).run(models.model(text, {"w": models.normal(4, 4), **weights}, 17))
    (report,) = [one for one in result.passes if one.name == NAME]
    assert report.fired == 0 and report.refused[0].startswith("not run: ") and why in report.refused[0]


@pytest.mark.parametrize("name", TRIED)
def test_the_last_lines_of_the_command_say_what_did_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, weights, why = TRIED[name]
    monkeypatch.setattr(budget, "LOOP_SECONDS", 0.2)
    onnx.save(models.model(text, {"w": models.normal(4, 4), **weights}, 17), tmp_path / "m.onnx")
    words = [str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), "--preset", "MATMUL_NBITS"]
    assert main(["onnx", "quantize", *words]) == 0
    said = capsys.readouterr().out
    assert why in " ".join(said[said.rindex("first run not run: ") : said.index("next  ")].split())


def test_another_size_changes_all_free_sizes_alike() -> None:
    model = files.load(random_detector(0))
    feed = {"x": np.zeros((1, 3, 32, 64), np.float32)}
    small, large = other_size(model, feed), other_size(model, {"x": np.zeros((1, 3, 1024, DOUBLED_UP_TO // 1024))})
    assert small is not None and small["x"].shape == (1, 3, 64, 128)
    assert large is not None and large["x"].shape == (1, 3, 512, DOUBLED_UP_TO // 2048)
    model.graph.inputs[0].shape = files.ir.Shape([None, 3, 32, 64])
    batch = other_size(model, feed)
    assert batch is not None and batch["x"].shape == (2, 3, 32, 64)
    model.graph.inputs[0].shape = files.ir.Shape([1, 3, 32, 64])
    assert other_size(model, feed) is None
