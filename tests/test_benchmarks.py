"""The benchmarks run, on a toy network, and what they compute is right; their figures are no test."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import fidelity, growth, measure, models, onnx_ptq
from benchmarks.fidelity import Score
from benchmarks.growth import exponent
from benchmarks.measure import Outcome
from benchmarks.peers.job import FileReader, read_feeds, write_feeds
from benchmarks.resnet_latency import VARIANTS

ROOT = measure.ROOT


def run_benchmark(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_time_report_of_a_toy_network(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_benchmark(
        "onnx_ptq", "--toy", "--methods", "minmax", "--repeats", "1", "--samples", "2", "--json", str(file)
    )
    assert file.exists(), done.stderr
    report = json.loads(file.read_text())
    by_tool = {line["tool"]: line for line in report["lines"]}
    assert set(by_tool) == {"bare inference", "ours", "onnxruntime"}
    for tool in ("ours", "onnxruntime"):
        assert by_tool[tool]["error"] is None
        assert 0 < by_tool[tool]["seconds"] < by_tool[tool]["process_seconds"]
        assert 0.02 < by_tool[tool]["peak_gb"] < 4
    assert by_tool["ours"]["verdict"].startswith(("pass", "FAIL"))
    assert report["machine"]["cores"] >= 1
    assert "| minmax" in done.stdout


@pytest.mark.slow
def test_fidelity_report_of_a_toy_network(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_benchmark("fidelity", "--models", "toy", "--configs", "int8-minmax", "--json", str(file))
    assert file.exists(), done.stderr
    (line,) = json.loads(file.read_text())["lines"]
    for tool in ("ours", "onnxruntime"):
        assert line[tool]["error"] is None
        (ratio,) = line[tool]["sqnr"].values()
        assert 10 < ratio < 60
    assert line["verdict"].startswith("never worse"), line


@pytest.mark.slow
def test_latency_report_names_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--toy", "--latency", "--repeats", "1", "--samples", "2", "--json", str(file))
    done = run_benchmark("onnx_ptq", *arguments)
    assert file.exists(), done.stderr
    lines = {line["variant"]: line for line in json.loads(file.read_text())["lines"]}
    assert "QLinearConv" not in lines["float"]["kernels"]
    assert len(lines) == 1 + len(VARIANTS)
    for name, line in lines.items():
        assert line["milliseconds"] > 0, line
        if "cpu" in name.lower():
            assert line["kernels"]["QLinearConv"] == 8
            assert line["kernels"].get("DequantizeLinear", 0) <= 1


@pytest.mark.slow  # its 25 million weights are drawn
def test_the_network_is_a_resnet_50() -> None:
    network = models.resnet(models.Shape(image=32))
    kinds = [node.op_type for node in network.graph.node]
    parameters = sum(math.prod(tensor.dims) for tensor in network.graph.initializer)
    assert (kinds.count("Conv"), kinds.count("Gemm"), kinds.count("Add"), len(kinds)) == (53, 1, 16, 122)
    assert 25.4e6 < parameters < 25.7e6


def test_the_network_is_the_same_each_time() -> None:
    first, second = models.resnet(models.TOY), models.resnet(models.TOY)
    assert first.SerializeToString() == second.SerializeToString()


def test_the_normalization_is_folded_in() -> None:
    network = models.resnet(models.TOY)
    network.graph.output.add().name = network.graph.node[0].output[0]
    session = onnxruntime.InferenceSession(network.SerializeToString(), providers=["CPUExecutionProvider"])
    values = np.concatenate([session.run(None, feed)[1] for feed in models.random_images(32, 4, seed=0)])
    gamma = np.random.default_rng(0)
    gamma.standard_normal((8, 3, 7, 7), dtype=np.float32)
    np.testing.assert_allclose(values.std((0, 2, 3)), gamma.lognormal(0, 0.3, 8), rtol=1e-3)


def test_feeds_survive_the_file(tmp_path: Path) -> None:
    feeds = [{"a/b:0": np.full((2, 1), k, np.float32), "sr": np.array(k, np.int64)} for k in range(11)]
    write_feeds(tmp_path / "feeds.npz", feeds)
    found = list(read_feeds(tmp_path / "feeds.npz"))
    assert [int(feed["sr"]) for feed in found] == list(range(11))
    assert found[10]["a/b:0"].shape == (2, 1)
    reader = FileReader(tmp_path / "feeds.npz")
    assert len(reader) == 11
    while reader.get_next() is not None:
        pass
    reader.rewind()
    first = reader.get_next()
    assert first is not None and first["sr"] == 0


def test_sqnr_is_taken_over_all_samples() -> None:
    signal = [[np.array([10.0, 0.0], np.float32)], [np.array([0.0, 10.0], np.float32)]]
    other = [[np.array([9.0, 0.0], np.float32)], [np.array([0.0, 7.0], np.float32)]]
    energy, noise = fidelity.energies(["y"], signal)["y"], fidelity.energies(["y"], signal, other)["y"]
    assert (energy, noise) == ([100.0, 100.0], [1.0, 9.0])
    assert fidelity.ratio(energy, noise) == pytest.approx(10 * math.log10(20))
    assert fidelity.ratio(energy, [0.0, 0.0]) == fidelity.CEILING_DB
    assert fidelity.ratio(energy, [math.nan, 0.0]) == -fidelity.CEILING_DB


@pytest.mark.parametrize(
    ("ours", "expected"),
    [({"a": 30.0, "b": 30.0}, "WORSE (-1.00 ± 0.00 dB)"), ({"a": 29.95, "b": 31.0}, "never worse (-0.05 ± 0.00 dB)")],
)
def test_verdict_looks_at_every_output_and_the_better_peer(ours: dict[str, float], expected: str) -> None:
    peers = [Score(sqnr={"a": 30.0, "b": 10.0}), Score(sqnr={"a": 5.0, "b": 31.0}), Score(error="fails")]
    assert fidelity.verdict(Score(sqnr=ours), peers) == expected


def test_a_deficit_within_its_error_is_level() -> None:
    steady, uneven = [1.1] * 100, [float(k % 2) * 2.2 for k in range(100)]
    peer = Score(sqnr={"a": 30.4}, noise={"a": [1.0] * 100})
    assert fidelity.verdict(Score(sqnr={"a": 30.0}, noise={"a": steady}), [peer]).startswith("WORSE (-0.40 ± 0.00")
    assert fidelity.verdict(Score(sqnr={"a": 30.0}, noise={"a": uneven}), [peer]).startswith("level (-0.40 ± 0.4")


def test_verdict_without_a_rival_or_without_ours() -> None:
    assert fidelity.verdict(Score(sqnr={"a": 1.0}), [Score(error="crash")]) == "no rival"
    assert fidelity.verdict(Score(error="crash"), [Score(sqnr={"a": 1.0})]) == "fails"


@pytest.mark.parametrize(
    ("seconds", "gigabytes", "expected"), [(3.9, 0.59, "pass"), (4.1, 0.3, "FAIL"), (1.0, 0.61, "FAIL")]
)
def test_limits_hold_time_and_memory(seconds: float, gigabytes: float, expected: str) -> None:
    job = onnx_ptq.Job(onnx_ptq.OURS, "minmax", "quark_job", {})
    found = onnx_ptq.verdict(job, Outcome(seconds=seconds, peak_gb=gigabytes), bare_seconds=2.0)
    assert found.startswith(f"{expected} (limit 4.00 s")


def test_a_failing_job_gives_its_reason(tmp_path: Path) -> None:
    job = {"models": {"float": str(tmp_path / "absent.onnx")}, "feeds": str(tmp_path / "absent.npz")}
    outcome = measure.run_job("float_job", job)
    assert not outcome.ok
    assert "FileNotFoundError" in (outcome.error or "")


def test_a_jobs_peak_memory_is_its_own(tmp_path: Path) -> None:
    network = models.resnet(models.TOY)
    (tmp_path / "model.onnx").write_bytes(network.SerializeToString())
    write_feeds(tmp_path / "feeds.npz", models.random_images(32, 1, seed=0))
    ballast = np.ones(40_000_000)
    job = {"models": {"float": str(tmp_path / "model.onnx")}, "feeds": str(tmp_path / "feeds.npz")}
    outcome = measure.run_job("float_job", job)
    assert outcome.ok, outcome.error
    assert outcome.peak_gb < ballast.nbytes / 1e9


def test_repeats_become_their_median_and_largest_peak() -> None:
    outcomes = [Outcome(s, s, s, s, peak, {}) for s, peak in ((1.0, 0.3), (5.0, 0.2), (2.0, 0.1))]
    merged = measure.middle(outcomes)
    assert (merged.seconds, merged.peak_gb) == (2.0, 0.3)
    assert measure.middle([*outcomes, Outcome(error="boom")]).error == "boom"


def test_adaround_objective_is_the_relative_error_of_the_layers(tmp_path: Path) -> None:
    """Two layers, of which the quantized model doubles the second: (0 + 1) / 2."""
    from benchmarks import adaround
    from tests.onnx_flow.models import model

    graph = "g (float[1, 2] x) => (float[1, 2] y) { [a] h = Gemm (x, w) r = Relu (h) [b] y = Gemm (r, v) }"
    weights = {"w": np.eye(2, dtype=np.float32), "v": np.eye(2, dtype=np.float32)}
    paths = [str(tmp_path / name) for name in ("float.onnx", "other.onnx")]
    onnx.save(model(graph, weights), paths[0])
    onnx.save(model(graph, {**weights, "v": 2 * weights["v"]}), paths[1])
    write_feeds(tmp_path / "feeds.npz", [{"x": np.array([[1, 2]], np.float32)}, {"x": np.array([[3, -1]], np.float32)}])
    assert adaround.results_of(onnx.load(paths[0])) == ["r", "y"]
    assert adaround.objective(paths[0], paths[1], str(tmp_path / "feeds.npz")) == pytest.approx(0.5)


@pytest.mark.slow
def test_adaround_report_of_a_toy_network() -> None:
    pytest.importorskip("torch")
    done = run_benchmark("adaround", "--toy", "--samples", "2", "--iterations", "4")
    assert "| ours, AdaRound" in done.stdout and "pass" in done.stdout, done.stderr


@pytest.mark.slow
def test_accuracy_report_of_one_recipe() -> None:
    if not (ROOT / ".." / "shared" / "data" / "models").exists():
        pytest.skip("the shared models are not beside the repository")
    done = run_benchmark("onnx_accuracy", "--models", "hard-sigmoid")
    cells = done.stdout.splitlines()[-1].split("|")
    assert 0.1 < float(cells[6]) < 0.4, done.stderr


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_growth_is_told_without_what_every_job_costs(power: float) -> None:
    costs = [30.0 + size**power for size in (1, 4, 16)]
    assert exponent(costs, 4) == pytest.approx(power)
    assert exponent([30.0, 30.01, 30.02], 4) is None and exponent([2.0, 1.0, 3.0], 4) is None


@pytest.mark.slow
def test_growth_of_a_job_is_measured_in_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys, time\nwhile time.process_time() < 0.2 * int(sys.argv[2]): pass"
    axis = growth.Axis((1, 2, 4), ("spin",), code, lambda kind, size: [kind, str(size)])
    monkeypatch.setattr(growth, "AXES", {"turns": axis})
    assert growth.main([]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split("|")
    assert 0.5 < float(cells[6]) < 1.5
