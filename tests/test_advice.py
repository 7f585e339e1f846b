"""The last lines are commands: each that is advised runs, and what was bad is better after it."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.cli import main, quantization, verdicts
from quark.onnx import ModelQuantizer, climb, tuned_speed
from quark.onnx.coverage import Coverage, coverage
from quark.onnx.graph.model import load
from quark.onnx.latency import FEWEST
from quark.report import verdict
from quark.search.parts import spread_order

Capture = pytest.CaptureFixture[str]


def written(folder: Path, text: str, **weights: np.ndarray) -> list[str]:
    """The words that quantize a model into ``folder``."""
    onnx.save(models.model(text, weights), folder / "m.onnx")
    np.savez(folder / "data.npz", x=models.normal(4, 64))
    paths = [str(folder / name) for name in ("m.onnx", "q.onnx", "data.npz")]
    return ["onnx", "quantize", paths[0], "-o", paths[1], "--data", paths[2]]


def advised(words: list[str], word: str, capture: Capture) -> str:
    """The last line of a command that holds ``word``, after it has ended well."""
    assert main(words) == 0
    return next(line for line in reversed(capture.readouterr().out.splitlines()) if word in line)


def run_again(line: str) -> int:
    """Carry out the command in a line."""
    words = shlex.split(line[line.index("quark ") :].partition("   (")[0])
    return main([*words[1:]])


LAYERS = "g (float[N, 64] x) => (float[N, 64] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, v) y = Relu(c) }"


def weights() -> dict[str, np.ndarray]:
    return {"w": models.normal(64, 64, scale=0.1), "v": models.normal(64, 64, scale=0.1, seed=2)}


def slower(again: float) -> Callable[..., dict[str, float]]:
    """Timings: half as fast as float, and ``again`` times as slow as it whatever is tried."""
    found = iter([2.0])
    return lambda *_: {"float": 1.0, "quantized": next(found, again)}


def test_slower_than_float_ends_in_what_is_not(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*written(tmp_path, LAYERS, **weights()), "-p", "A8W8_CPU"]
    with monkeypatch.context() as patched:
        patched.setattr("quark.onnx.compare.pace_of", slower(0.5))
        line = advised(words, "TuneSpeed", capsys)
    assert "tried: 2.00 times as fast as float, accuracy good, SQNR of y" in line
    with monkeypatch.context() as patched:  # neither is what is tried
        patched.setattr("quark.onnx.compare.pace_of", slower(1.0))
        assert "nothing to win" in advised(words, "next", capsys)
    with monkeypatch.context() as patched:  # it would take too long
        patched.setattr("quark.onnx.compare.pace_of", slower(0.5))
        patched.setattr(verdicts, "WORK", 0.0)
        assert "not tried: accuracy may change" in advised(words, "TuneSpeed", capsys)

    def seconds(paths: dict[str, Path], *args: Any) -> dict[str, float]:
        return {one: 1.0 if one == tuned_speed.FLOAT else 2.0 for one in paths}

    monkeypatch.setattr(tuned_speed, "quiet_seconds", seconds)
    monkeypatch.setattr(tuned_speed, "_node_seconds", lambda *_: {})  # a busy machine may find all faster in float
    assert run_again(line) == 0
    assert not any(node.op_type == "QuantizeLinear" for node in load(tmp_path / "q.onnx").graph)


@pytest.mark.parametrize(
    ("gain", "level", "told"),
    [(0.4, 1, "no better"), (0.6, 1, "tried: doubtful"), (9.0, 0, "lost too; try everything")],
)
def test_what_gains_less_than_half_a_decibel_or_stays_lost_is_not_offered(
    gain: float, level: int, told: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13.0 and 13.2 dB on four samples were a command to type, and so was one that ended in another lost model."""
    seen: list[float] = []

    def judged(*given: Any) -> verdict.Judged:
        seen.append(13.0 + (gain if len(seen) > 1 else 0.0))
        return verdict.Judged("y", level, f"SQNR of y {seen[-1]:.1f} dB", seen[-1], seen[-1])

    monkeypatch.setattr(verdicts, "worst", judged)
    assert main([*written(tmp_path, LAYERS, **weights()), "-p", "A8W8"]) == 0
    said = capsys.readouterr().out
    assert told in said and ("(tried: " in said) == told.startswith("tried")


def test_a_model_that_stays_in_float_says_so_and_how_to_quantize_it_all_the_same(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is faster in integers: no coverage line told so, and small ones were slower than float."""
    kernels = {f"w{k}": models.normal(4, 4 if k else 3, 3, 3, scale=0.2, seed=k) for k in range(4)}
    layers = " ".join(
        f"c{k} = Conv <pads = [1, 1, 1, 1]> ({f'r{k - 1}' if k else 'x'}, w{k}) r{k} = Relu (c{k})" for k in range(4)
    )
    text = f"g (float[N, 3, 24, 24] x) => (float[N, 4, 24, 24] y) {{ {layers} y = Identity (r3) }}"
    words = [*written(tmp_path, text, **kernels), "-p", "A8W8_CPU"]
    np.savez(tmp_path / "data.npz", x=models.normal(4, 3, 24, 24))
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()[-5:]
    assert any(line.startswith("coverage  low: 0 % of the multiplications") for line in said)
    line = next(line for line in said if "FloatWhereFaster=False" in line)
    assert run_again(line) == 0
    assert "coverage  quantized: 100 %" in capsys.readouterr().out
    monkeypatch.setattr("quark.onnx.tuned_speed._chosen", lambda seconds: "all in float")
    monkeypatch.setattr("quark.onnx.tuned_speed.SECONDS", 0.0)  # whatever is measured
    assert main([*words, "--tune-speed"]) == 0
    told = capsys.readouterr().out
    assert "all layers: TuneSpeed" in told and "FloatWhereFaster: " not in told, "its clock decided, not the table"


def test_integers_are_not_offered_where_none_were_left_out(tmp_path: Path) -> None:
    """A table of a few constants: no layer stays in float for its speed, and the command changed nothing."""
    words = [*written(tmp_path, LAYERS, **weights()), "-p", "A8W8_CPU"]
    assert main(words) == 0
    made = verdicts.Subject(tmp_path / "m.onnx", tmp_path / "q.onnx", verdicts.Choice("A8W8_CPU"), (), "")
    assert "quark onnx explain" in verdicts._explained(replace(made, counted=Coverage((), 9, 0)))


def test_a_larger_file_ends_in_a_smaller_one_or_in_the_float_model(tmp_path: Path, capsys: Capture) -> None:
    chain = " ".join(f"t{k + 1} = Elu(t{k})" for k in range(60))
    text = f"g (float[N, 64] x) => (float[N, 64] y) {{ t0 = MatMul(x, w) {chain} y = Relu(t60) }}"
    more = ["-p", "A8W8", "--set", "QuantizeAllOpTypes=true"]
    line = advised([*written(tmp_path, text, w=weights()["w"]), *more], "times smaller)", capsys)
    choice = verdicts._weights_only(verdicts.Choice("A8W8_CPU", {"TuneSpeed": True, "Percentile": 99}))
    assert choice.options == {"Percentile": 99, "WeightsOnly": True}, "forms are timed on samples, which weights lack"
    sizes = [(tmp_path / name).stat().st_size for name in ("m.onnx", "q.onnx")]
    assert sizes[1] > sizes[0] and "PrintSummary" not in line
    assert run_again(line) == 0
    assert (tmp_path / "q.onnx").stat().st_size < sizes[0]
    plain = text.replace("MatMul(x, w)", "Relu(x)")
    line = advised([*written(tmp_path, plain), *more], "size matters", capsys)
    assert "use the float model" in line


def test_nothing_is_tried_where_the_weights_are_too_few_to_save_anything(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial is a whole quantization: a third of the time of a graph of 10,000 nodes."""
    runs: list[Any] = []
    run = ModelQuantizer.run
    monkeypatch.setattr(ModelQuantizer, "run", lambda *given, **more: runs.append(1) or run(*given, **more))
    chain = " ".join(f"t{k + 1} = Elu(t{k})" for k in range(60))
    for size, count in ((verdicts.FEW, 1), (2 * verdicts.FEW, 3)):
        text = f"g (float[N, {size}] x) => (float[N, {size}] y) {{ t0 = Mul(x, w) {chain} y = Relu(t60) }}"
        words = written(tmp_path, text, w=models.normal(1, size))
        np.savez(tmp_path / "data.npz", x=models.normal(4, size))
        more = ["-p", "A8W8", "--set", "QuantizeAllOpTypes=true", "--no-check", "--overwrite"]
        assert "use the float model" in advised([*words, *more], "size matters", capsys)
        assert len(runs) == count
        runs.clear()


def test_a_command_leaves_the_collector_of_cycles_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(verdicts, "coverage", lambda *given: seen.append(gc.get_threshold()) or coverage(*given))
    kept = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    before = gc.get_threshold()
    assert main([*written(tmp_path, LAYERS, **weights()), "-p", "A8W8", "--no-check"]) == 0
    after = gc.get_threshold()
    gc.set_threshold(*kept)
    assert seen[0][0] > before[0] and after == before


@pytest.mark.parametrize("named", ["node_a", "of a long name that an exporter has joined of dozens of names node_a"])
def test_low_coverage_ends_in_the_reason_of_the_largest_layer(named: str, tmp_path: Path, capsys: Capture) -> None:
    text = "g (float[N, 64] x) => (float[N, 8] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }"
    words = written(tmp_path, text, w=models.normal(64, 256, scale=0.1), v=models.normal(256, 8, scale=0.1, seed=2))
    model = onnx.load(tmp_path / "m.onnx")
    for node in model.graph.node:
        node.name = named.replace("_a", f"_{node.output[0]}")
    onnx.save(model, tmp_path / "m.onnx")
    line = advised([*words, "-p", "A8W8", "--exclude", named], "quark onnx explain", capsys)
    assert run_again(line) == 0 and "joined" not in line
    said = capsys.readouterr().out
    assert "exclude" in said and said.startswith(f"MatMul {named!r}: float") and said.count("\n") == 1


def test_a_comparison_that_is_bad_names_the_command_that_searches(tmp_path: Path, capsys: Capture) -> None:
    words = written(tmp_path, LAYERS, **weights())
    assert main([*words, "-p", "A8W8", "--no-check"]) == 0
    broken = onnx.load(tmp_path / "q.onnx")
    for tensor in broken.graph.initializer:
        if tensor.name.startswith("w") and tensor.data_type == onnx.TensorProto.INT8:
            tensor.raw_data = bytes(reversed(tensor.raw_data))
    onnx.save(broken, tmp_path / "q.onnx")
    capsys.readouterr()
    said = ["onnx", "compare", words[2], words[4], "--data", words[6]]
    line = advised(said, "quark auto", capsys)
    assert run_again(f"{line} --for size --minutes 0.02") == 0
    assert (tmp_path / "q_best.onnx").exists()


def test_a_comparison_tells_the_speed_and_what_is_faster(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*written(tmp_path, LAYERS, **weights()), "-p", "A8W8", "--no-check"]
    assert main(words) == 0
    capsys.readouterr()
    monkeypatch.setattr("quark.onnx.compare.pace_of", lambda *_: {"float": 1.0, "quantized": 2.0})
    line = advised(["onnx", "compare", words[2], words[4], "--data", words[6]], "TuneSpeed", capsys)
    assert run_again(line) == 0 and (tmp_path / "q_timed.onnx").is_file()
    assert main(["onnx", "compare", words[2], words[4], "--data", words[6]]) == 0
    assert "speed     slower: 0.50 times" in capsys.readouterr().out


@pytest.mark.parametrize(("preset", "purpose"), [("XINT8", "npu"), ("A8W8_CPU", "cpu"), ("MATMUL_NBITS", "size")])
def test_what_no_quick_recipe_mends_ends_in_auto(
    preset: str, purpose: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "SQNR", (200.0, 300.0))  # dB that nothing reaches
    monkeypatch.setattr(verdicts, "SECONDS", 0.0)
    text = LAYERS.replace("b = Relu", "[relu] b = Relu")
    words = [*written(tmp_path, text, **weights()), "-p", preset, "--exclude", "relu"]
    line = advised(words, "quark auto", capsys)
    assert "--exclude relu" in line
    assert f"--for {purpose} -o {tmp_path / 'q.auto.onnx'}" in line
    assert run_again(f"{line} --minutes 0.02") in (0, 3)
    assert (tmp_path / "q.auto.onnx").is_file()


def halves(folder: Path, kind: int) -> list[str]:
    """The words that quantize two convolutions of a type of 16 bits."""
    text = """<ir_version: 10, opset_import: ["": 22]> g (TYPE[1, 3, 16, 16] x) => (TYPE[1, 8, 12, 12] y) {
        [first] a = Conv(x, w) [second] y = Conv(a, v) }"""
    model = onnx.parser.parse_model(text.replace("TYPE", {10: "float16", 16: "bfloat16"}[kind]))
    for name, channels in (("w", 3), ("v", 8)):
        values = models.normal(8, channels, 3, 3, scale=0.1)
        model.graph.initializer.append(onnx.helper.make_tensor(name, kind, values.shape, values.reshape(-1).tolist()))
    onnx.save(model, folder / "m.onnx")
    return ["onnx", "quantize", str(folder / "m.onnx"), "-o", str(folder / "q.onnx"), "--random", "-p", "A8W8"]


def test_a_float16_model_in_float_ends_in_float32_inside(tmp_path: Path, capsys: Capture) -> None:
    line = advised(halves(tmp_path, onnx.TensorProto.FLOAT16), "next", capsys)
    assert "FasterForms=True" in line and coverage(tmp_path / "q.onnx").integer == 0
    assert run_again(line) == 0 and coverage(tmp_path / "q.onnx").integer == 1
    assert onnx.load(tmp_path / "q.onnx").graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


def test_a_quantized_layer_that_runs_in_float_is_not_told_the_rule_that_quantized_it(
    tmp_path: Path, capsys: Capture
) -> None:
    line = advised(halves(tmp_path, onnx.TensorProto.FLOAT16), "coverage", capsys)
    assert "0 % of the multiplications" in line and "has no integer kernel" in line and "global_config" not in line


def test_a_float16_model_that_computes_in_float32_already_is_not_told_to(tmp_path: Path, capsys: Capture) -> None:
    words = [*halves(tmp_path, onnx.TensorProto.FLOAT16)[:-1], "A8W8_CPU", "--set", "FloatWhereFaster=False"]
    assert "in float" in advised([*words, "--exclude", "second"], "coverage", capsys)
    assert "FasterForms" not in advised([*words, "--exclude", "second"], "next", capsys)


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS", "BF16"])
def test_a_bfloat16_model_is_told_the_command_that_makes_it_float32(
    preset: str, tmp_path: Path, capsys: Capture
) -> None:
    """ONNX Runtime has no kernels for it; as float32 it keeps its values, and what it did not run runs."""
    words = [*halves(tmp_path, onnx.TensorProto.BFLOAT16)[:-1], preset]
    assert main(words) == 1
    told = " ".join(capsys.readouterr().err.split())
    line = told[told.index("quark onnx tool") :].split(" see docs")[0]
    assert run_again(line) == 0
    narrow, wide = (ir.load(tmp_path / name).graph.initializers for name in ("m.onnx", "m.float32.onnx"))
    for name, value in wide.items():
        np.testing.assert_array_equal(value.const_value.numpy(), narrow[name].const_value.numpy().astype(np.float32))
    if preset != "MATMUL_NBITS":  # there is no MatMul
        words[2] = str(tmp_path / "m.float32.onnx")
        assert main(words) == 0


def test_a_model_that_is_quantized_in_part_is_told_the_command_that_makes_it_float(
    tmp_path: Path, capsys: Capture
) -> None:
    words = [*written(tmp_path, LAYERS, **weights()), "-p", "A8W8", "--no-check"]
    assert main([*words, "--exclude", "^c.*"]) == 0
    again = [*words[:2], str(tmp_path / "q.onnx"), "-o", str(tmp_path / "r.onnx"), *words[5:]]
    capsys.readouterr()
    assert main(again) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert run_again(told[: told.index(" see docs")]) == 0
    assert main([*again[:2], str(tmp_path / "q.float32.onnx"), *again[3:]]) == 0
    assert coverage(tmp_path / "r.onnx").integer == 1


CLASSES, PLACES = ("FloatOutputs", "hardly told apart"), ("MeasureSoftmax", "attention over many places")
TAILS = {
    "softmax": ("y = Softmax<axis = 1>(b)", CLASSES),
    "moved": ("s = Softmax<axis = 1>(b) y = Unsqueeze(s, two)", CLASSES),
    "twice": ("s = Softmax<axis = 1>(b) y = Mul(s, s)", PLACES),
    "attention": ("s = Softmax<axis = 1>(b) y = MatMul(s, u)", PLACES),
}


def even_classes(folder: Path, tail: str) -> list[str]:
    """The words that quantize a classifier whose 1,000 classes are hardly told apart."""
    layers = "[first] a = MatMul(x, w) [relu] r = Relu(a) [last] b = MatMul(r, v)"
    text = f"g (float[N, 64] x) => (float y) {{ {layers} {tail} }}"
    values = {"w": models.normal(64, 64, scale=0.1), "v": models.normal(64, 1000, scale=0.1, seed=2)}
    values["u"] = models.normal(1000, 8, seed=3)
    return written(folder, text, **values, two=np.array([2], np.int64))


@pytest.mark.parametrize("preset", ["XINT8", "U8U8_AAWA"])
@pytest.mark.parametrize("tail", TAILS)
def test_classes_that_are_lost_on_a_scale_from_0_to_1_come_back(
    tail: str, preset: str, tmp_path: Path, capsys: Capture
) -> None:
    body, (option, cause) = TAILS[tail]
    line = advised([*even_classes(tmp_path, body), "-p", preset], option, capsys)
    assert cause in line and "tried: good" in line
    assert run_again(line) == 0
    assert "accuracy  good" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [
        ["-p", "A8W8"],
        ["-p", "A8W8", "--exclude", "first"],
        ["-p", "A8W8_CPU", "--layout", "any"],
        ["-p", "A8W8", "--set", "QuantizeBias=False", "-a", "cle"],
        ["-p", "A8W8", "--eval-data", "eval.npz"],
        ["--config", "c.yaml"],
        ["--config", "c.yaml", "--exclude", "last"],
    ],
    ids=" ".join,
)
def test_the_figure_beside_a_command_is_that_of_the_command(
    more: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*even_classes(tmp_path, TAILS["twice"][0]), *more]
    Path("c.yaml").write_text("{preset: A8W8, exclude: [relu], layers: {first: float}}")
    np.savez("eval.npz", x=models.normal(4, 64, seed=3))
    line = advised(words, "tried: ", capsys)
    figure = line.partition("tried: ")[2].partition("; cause: ")[0]
    assert all(word in shlex.split(line) for word in more[0 if more[0] == "--config" else 2 :] if word != "-a")
    assert run_again(line) == 0
    again = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("accuracy"))
    assert again.split(None, 1)[1].partition(" (")[0] == figure.replace(", ", ": ", 1)


def test_the_size_of_the_model_and_the_samples_say_how_much_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: two products of 64 x 64; all samples calibrate, and both models run on those compared.

    A clock made the advice another one on a busy machine, and a ResNet-50 was tried four times as long as it was made.
    """
    seen = []

    class Watched(climb.Climb):
        def within(self, seconds: float, probe: Any = None) -> climb.Attempt:
            seen.append(self.left)
            return self.first

    monkeypatch.setattr(climb, "Climb", Watched)
    monkeypatch.setattr(verdict, "SQNR", (200.0, 300.0))  # dB that nothing reaches
    monkeypatch.setattr(verdicts, "PER_SECOND", 1e6)  # multiplications that take so long that they count
    words = written(tmp_path, LAYERS, **weights())
    assert main([*words, "-p", "A8W8"]) == 0
    count, nodes = len(np.load(words[6])["x"]), len(onnx.load(words[2]).graph.node)
    each = 0.002 * nodes + 2 * 64 * 64 * (count + 2 * min(count, 16)) / 1e6
    assert seen == [pytest.approx(7.0 / each, rel=1e-6)]


def test_what_is_tried_is_judged_on_the_samples_that_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "ENOUGH", 0.0)
    words = written(tmp_path, LAYERS, **weights())
    assert main([*words, "-p", "A8W8"]) == 0
    samples = [{"x": row[None]} for row in models.normal(9, 64)]
    done = quantization.check_of(Path(words[2]), Path(words[4]), samples, False, None, hurry=True)
    assert len(done.samples) == done.comparison.samples == FEWEST


@pytest.mark.parametrize(("preset", "npu"), [("XINT8", True), ("A8W8_CPU", False)])
def test_files_with_the_scales_of_npus_are_told_to_be_made_for_them(
    preset: str, npu: bool, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``compare`` knows no preset, and a model for an NPU that is slower on a CPU was advised to be timed there."""
    words = written(tmp_path, LAYERS, **weights())
    assert main([*words, "-p", preset, "--set", "FloatWhereFaster=False"]) == 0
    monkeypatch.setattr("quark.onnx.compare.pace_of", lambda *_: {"float": 1.0, "quantized": 2.0})
    capsys.readouterr()
    assert main(["onnx", "compare", words[2], words[4], "--data", words[6]]) == 0
    said = capsys.readouterr().out
    assert ("made for NPUs" in said) is npu and ("TuneSpeed" in said) is not npu


def test_a_quiet_beginning_decides_nothing(tmp_path: Path, capsys: Capture) -> None:
    """A sound that begins with seconds of silence: the check looks at samples spread over all of it."""
    words = written(tmp_path, LAYERS, **weights())
    sound = models.normal(256, 1, 64)
    sound[:64] = 0.0  # the first 16 and more: what says nothing, or what codes round to nothing
    np.savez(words[6], x=sound)
    assert main([*words, "-p", "A8W8"]) == 0
    assert "accuracy  good" in capsys.readouterr().out


def test_every_beginning_of_the_order_is_spread_over_all() -> None:
    assert spread_order(8) == [0, 4, 2, 6, 1, 5, 3, 7] and spread_order(1) == [0] and spread_order(0) == []
    for count in range(2, 70):
        order = spread_order(count)
        assert sorted(order) == list(range(count))
        for most in range(1, count + 1):
            gaps = np.diff([-1, *sorted(order[:most]), count])
            assert gaps.max() <= 2 * -(-count // most) + 1


@pytest.mark.parametrize("what", ["check_of", "advise", "page"])
def test_what_fails_after_the_work_leaves_the_model(
    what: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model takes hours, and what judges it seconds: neither a defect there nor ^C takes it away."""

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantization, what, fail)
    words = [*written(tmp_path, LAYERS, **weights()), "--report", str(tmp_path / "new" / "r.html")]
    assert main(words) != 0
    assert "q.onnx is written and keeps its place" in " ".join(capsys.readouterr().err.split())
    assert load(tmp_path / "q.onnx").graph is not None
    assert not (tmp_path / "new").exists()
