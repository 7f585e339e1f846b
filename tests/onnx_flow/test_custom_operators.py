"""Models with operators of the user's own library, through the command line and inside of bodies."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models
from tests.seeds.custom_operator import library

from quark.cli import main
from quark.onnx import ModelQuantizer, QConfig


def flat() -> onnx.ModelProto:
    """The shape of what the operator makes is known to nobody, so that a run has to tell it."""
    graph = """
    flat (float[1, 4, 8, 8] x) => (float[1, 4, a, b] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w) t = my.domain.Twice (c) y = Conv <pads = [1, 1, 1, 1]> (t, w)
    }"""
    return models.model(graph, {"w": models.normal(4, 4, 3, 3, scale=0.2)}, 17, domains={"my.domain": 1})


def inside() -> onnx.ModelProto:
    """The same in the body of a Loop that hands its state on."""
    graph = """
    inside (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
        y = Loop <body = step (int64 i, bool go, float[1, 4, 8, 8] s) => (bool on, float[1, 4, 8, 8] z) {
            on = Identity (go) c = Conv <pads = [1, 1, 1, 1]> (s, w) t = my.domain.Twice (c) z = Relu (t)
        }> (times, , x)
    }"""
    weights = {"w": models.normal(4, 4, 3, 3, scale=0.2), "times": np.array(3, np.int64)}
    return models.model(graph, weights, 17, domains={"my.domain": 1})


def command(line: str) -> int:
    return main(shlex.split(line))


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "UINT8_DYNAMIC_QUANT"])
def test_commands_run_the_users_operators(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, source, written = library(tmp_path), tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(flat(), source)
    given = f"--preset {preset} --random --set UserCustomOpLibPath={made}"
    assert command(f"onnx quantize {source} -o {written} {given} --report {tmp_path}/r.html") == 0
    assert "coverage" in capsys.readouterr().out
    assert command(f"onnx compare {source} {written} --random --custom-ops {made} --report {tmp_path}/c.html") == 0
    assert "accuracy" in capsys.readouterr().out
    assert command(f"onnx search {source} -o {tmp_path}/s.yaml --target 'sqnr>=5' {given.split(' ', 2)[2]}") in (0, 3)


def test_auto_runs_the_users_operators_and_its_recipe_makes_the_model_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, source, written = library(tmp_path), tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(flat(), source)
    np.savez(tmp_path / "s.npz", x=models.normal(20, 4, 8, 8))
    np.savez(tmp_path / "clean.npz", x=models.normal(20, 4, 8, 8))
    given = f"{source} --data {tmp_path}/s.npz"
    line = f"auto {given} -o {written} --custom-ops {made} --for npu --minutes 0.1"
    line += f" --metric si-sdr --labels {tmp_path}/clean.npz"
    assert command(line) in (0, 3)
    said = capsys.readouterr().out
    assert str(made) not in said.partition("result")[0], "the library is no part of a trial's name"
    assert f"--custom-ops {made}" in said or "UserCustomOpLibPath" in said, "the next command needs it"
    assert command(f"onnx quantize {given} -o {tmp_path}/again.onnx --config {tmp_path}/q.recipe.yaml") == 0
    assert (tmp_path / "again.onnx").read_bytes() == written.read_bytes()


#: Lines that run a model.
RUNNING = (
    "onnx quantize m.onnx -o q.onnx --random",
    "onnx sensitivity m.onnx --random",
    "onnx search m.onnx -o p.yaml --random --target sqnr>=5",
    "onnx compare m.onnx m.onnx --random",
    "auto m.onnx -o q.onnx --data s.npz",
)


@pytest.mark.parametrize("line", RUNNING)
def test_an_operator_that_nobody_defines_is_told_with_a_flag_of_the_command(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a message asks for can be typed after the same command."""
    monkeypatch.chdir(tmp_path)
    onnx.save(flat(), "m.onnx")
    np.savez("s.npz", x=models.normal(2, 4, 8, 8))
    assert command(line) == 1
    said = capsys.readouterr().err
    (flag,) = set(re.findall(r"--custom-ops|--set(?= UserCustomOpLibPath)", said))
    value = "nothing.so" if flag == "--custom-ops" else "UserCustomOpLibPath=nothing.so"
    assert command(f"{line} {flag} {value}") == 1
    again = capsys.readouterr().err
    assert flag in again and "nothing.so" in again


def test_a_library_that_is_not_there_ends_a_search_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(flat(), "m.onnx")
    np.savez("s.npz", x=models.normal(8, 4, 8, 8))
    assert command("auto m.onnx --data s.npz -o q.onnx --ledger l.json --custom-ops nothing.so") == 1
    assert "error: --custom-ops: there is no 'nothing.so'" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "s.npz"}


def test_a_body_with_the_users_operators_is_quantized(tmp_path: Path) -> None:
    made, proto = library(tmp_path), inside()
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False, UserCustomOpLibPath=str(made))
    feeds = [{"x": models.normal(1, 4, 8, 8, seed=seed)} for seed in range(3)]
    found = ModelQuantizer(config).quantize_model(proto, None, feeds)
    assert found is not None
    (body,) = (attribute.g for node in found.graph.node for attribute in node.attribute if attribute.name == "body")
    assert "DequantizeLinear" in {node.op_type for node in body.node}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(made))
    wanted, given = (onnxruntime.InferenceSession(one.SerializeToString(), options) for one in (proto, found))
    reference, result = wanted.run(None, feeds[0])[0], given.run(None, feeds[0])[0]
    assert np.abs(reference - result).max() < 0.1 * np.abs(reference).max()
