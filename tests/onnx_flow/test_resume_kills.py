"""SaveAndRestore under SIGKILL at every step of writing, in calibration and in the tuning of layers.

One process imports everything and forks a job for every moment: the job kills itself there, a second one goes on, and
its file must be that of a job that nobody stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.onnx_flow import models

pytest.importorskip("torch")

GRAPH = """g (float[1, 4, 6, 6] x) => (float[1, 4, 4, 4] y) {
    [one] a = Conv (x, w, b) [relu] r = Relu (a) [two] c = Conv (r, v) [end] y = Relu (c) }"""
WEIGHTS = {
    "w": models.normal(6, 4, 3, 3, seed=1),
    "b": models.normal(6, seed=2),
    "v": models.normal(4, 6, 1, 1, seed=3),
}

DRIVER = """
import json, os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from tests.onnx_flow.test_resume_kills import GRAPH, WEIGHTS, models, np
import torch, onnxruntime
from quark.onnx import AdaQuantConfig, AdaRoundConfig, CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.files import journal
from quark.onnx import counted, flow
from quark.onnx.algorithms import finetune

folder, proto = Path(sys.argv[1]), models.model(GRAPH, WEIGHTS)
samples = [models.feeds(proto, k) for k in range(3)]
events, dies_at = [], -1

def event(name):
    events.append(name)
    if len(events) - 1 == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

@contextmanager
def part_of(goal, also=OSError):  # journal.part_of and replace_file, with a chance to die between all their steps
    event(f"{goal.name}: nothing written")
    draft = goal.with_name(f".{goal.name}.part")
    yield draft
    content = draft.read_bytes()
    draft.write_bytes(content[: len(content) // 2])
    event("half written")
    draft.write_bytes(content)
    event("written")
    os.replace(draft, goal)
    event("replaced")

def replaced(path, content, name=""):
    with part_of(path) as part:
        part.write_text(content)

journal.part_of, journal.replace_file = part_of, replaced

def quantize(name, **options):
    tuned = [AdaRoundConfig(num_iterations=6, batch_size=1), AdaQuantConfig(num_iterations=6, batch_size=1)]
    spec = Int8Spec(calibration_method=CalibMethod.Percentile)
    config = QConfig(
        QLayerConfig(input_tensors=spec, weight=Int8Spec()),
        algo_config=tuned,
        extra_options={"PrintSummary": False, **options},
    )
    ModelQuantizer(config).quantize_model(proto, folder / name, samples)
    return (folder / name).read_bytes()

def child(moment, name, **options):
    global dies_at
    pid = os.fork()
    if not pid:
        dies_at = moment
        try:
            quantize(name, **options)
            (folder / "events.json").write_text(json.dumps(events))
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

state = {"SaveAndRestore": str(folder / "state.json")}
assert child(-1, "whole.onnx") == 0
whole = (folder / "whole.onnx").read_bytes()
assert child(-1, "kept.onnx", **state) == 0 and (folder / "kept.onnx").read_bytes() == whole
total = json.loads((folder / "events.json").read_text())
wrong = []
for moment in range(0, len(total), int(sys.argv[2])):
    for file in [*folder.glob("state.*"), *folder.glob(".state*"), folder / "q.onnx"]:
        if file.is_dir():
            [each.unlink() for each in file.iterdir()]
        elif file.exists():
            file.unlink()
    killed = child(moment, "q.onnx", **state)
    there = (folder / "q.onnx").exists()
    ended = child(-1, "q.onnx", **state)
    same = ended == 0 and (folder / "q.onnx").read_bytes() == whole
    fewer = ended == 0 and len(json.loads((folder / "events.json").read_text())) <= len(total)
    if not (killed == -signal.SIGKILL and not there and same and fewer):
        wrong.append((moment, total[moment], killed, ended, same, fewer))
print(json.dumps({"moments": total, "wrong": wrong}), flush=True)
"""


def driven(folder: Path, step: int) -> dict[str, list]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER, str(folder), str(step)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


@pytest.mark.skipif(not hasattr(os, "fork") or not hasattr(signal, "SIGKILL"), reason="no fork or SIGKILL here")
@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_whenever_a_job_is_killed_it_goes_on_to_the_same_file(tmp_path: Path, step: int) -> None:
    found = driven(tmp_path, step)
    assert found["wrong"] == []
    assert len(found["moments"]) >= 8 * (3 + 2 * 2)  # an entry's file and the list, per sample and per tuned layer


def test_another_setting_of_an_algorithm_is_refused(tmp_path: Path) -> None:
    from quark.errors import ConfigError
    from quark.onnx import AdaRoundConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig

    proto = models.model(GRAPH, WEIGHTS)

    def run(iterations: int) -> None:
        options = {"PrintSummary": False, "SaveAndRestore": str(tmp_path / "s.json")}
        algorithms = [AdaRoundConfig(num_iterations=iterations, batch_size=1)]
        layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
        config = QConfig(layer, algo_config=algorithms, extra_options=options)
        ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])

    run(3)
    before = json.loads((tmp_path / "s.json").read_text())
    with pytest.raises(ConfigError, match="another configuration"):
        run(4)
    assert json.loads((tmp_path / "s.json").read_text()) == before
    assert np.isfinite(before["next"])
