"""ONNX Runtime tells nobody: no run of ours leaves its database in the user's cache, or needs a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
#: A quantization that opens sessions for folding, calibration and comparison.
RUN = """
import sys
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from quark.onnx import ModelQuantizer, get_default_config, Config
values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
config = Config(get_default_config("A8W8_CPU"))
ModelQuantizer(config).quantize_model(model, sys.argv[1], [{"x": np.ones((2, 4), np.float32)}])
"""
#: Where caches are: of Linux, of macOS (below HOME), of Windows.
HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "LOCALAPPDATA", "APPDATA", "USERPROFILE")
#: What would switch the telemetry off without us.
ELSEWHERE = ("CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "CODEBUILD_BUILD_ID", "BUILDKITE")
OURS = ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED")


def left_behind(code: str, tmp_path: Path, before: tuple[str, ...] = ()) -> list[str]:
    """The files that a program leaves in the homes and caches of its user."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in (*ELSEWHERE, *OURS)}
    environment = {**kept, **dict.fromkeys(HOMES, str(home)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*before, sys.executable, "-c", code, str(tmp_path / "q.onnx")]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()]


def test_a_quantization_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    assert left_behind(RUN, tmp_path) == []
    assert (tmp_path / "q.onnx").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are of Linux")
def test_a_quantization_works_without_a_route_to_anywhere(tmp_path: Path) -> None:
    alone = ("unshare", "--map-root-user", "--net")
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this system makes no network namespace")
    assert left_behind(RUN, tmp_path, alone) == []


@pytest.mark.parametrize("value", ["0", "1"])
def test_who_sets_the_variable_decides(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OURS[0], value)
    code = f"import os, quark; print(os.environ[{OURS[0]!r}])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [value]
