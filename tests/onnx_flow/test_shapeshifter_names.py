"""quark.shapeshifter: a RunConfig, an Engine, files, classes of passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.onnx.passes.registry import unregister_pass
from quark.onnx.shapeshifter import TEMPLATES, transform
from quark.shapeshifter import Engine, LoadConfigFromFileOrDict, ONNXModelConfig, ONNXPass, RunConfig, shapeshifter

FOLD = {"onnx_fold_batch_norm": {"fold_batch_norm": True}}


def test_a_model_in_memory_comes_back_and_stays() -> None:
    proto = models.cnn()
    before = proto.SerializeToString(deterministic=True)
    engine = Engine(RunConfig(passes=FOLD))
    for _ in range(2):  # an engine runs as often as it is asked to
        result = engine.run(proto)
        assert result is not None and "BatchNormalization" not in models.op_types(result)
    assert proto.SerializeToString(deterministic=True) == before
    models.assert_close(models.run(result, models.feeds(proto)), models.run(proto, models.feeds(proto)), 1e-5)


def test_a_file_goes_to_a_file(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    config = RunConfig(ONNXModelConfig(tmp_path / "in.onnx"), passes=FOLD, output_model_path=tmp_path / "out.onnx")
    assert shapeshifter(config) is None
    assert "BatchNormalization" not in models.op_types(onnx.load(tmp_path / "out.onnx"))
    with pytest.raises(ConfigError, match="say in output_model_path"):
        shapeshifter(RunConfig(ONNXModelConfig(tmp_path / "in.onnx"), passes=FOLD))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_loaded_by_name(name: str) -> None:
    data = LoadConfigFromFileOrDict(name).data
    result = shapeshifter(RunConfig(**data), models.cnn())
    wanted = transform(models.cnn(), name).proto
    assert result is not None and wanted is not None
    assert result.SerializeToString(deterministic=True) == wanted.SerializeToString(deterministic=True)
    assert result.opset_import[0].version == 21


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"passes": {"fold_batchnorm": {}}}, "unknown pass"),
        ({"pases": {}}, "a key that a RunConfig does not have.*pases"),
        (RunConfig(passes=FOLD, input_model_config={"model_type": "pytorch", "input_model_path": "m"}), "only onnx"),
        (3, "a RunConfig or a mapping, not int"),
    ],
)
def test_a_wrong_configuration_is_refused_when_the_engine_is_made(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(config)  # type: ignore[arg-type]


class RenameGraphPass(ONNXPass):
    """Give the graph another name."""

    def run(self, model: onnx.ModelProto) -> onnx.ModelProto:
        model.graph.name = self.config["name"]
        return model


@pytest.fixture
def registered() -> Iterator[None]:
    RenameGraphPass.register()
    yield
    unregister_pass("rename_graph")


def test_a_class_of_ones_own(registered: None) -> None:
    config = {"passes": {"rename_graph": {"name": "net"}, **FOLD}}
    result = shapeshifter(config, models.cnn())
    assert result is not None and result.graph.name == "net" and "BatchNormalization" not in models.op_types(result)
    again = transform(models.cnn(), {"passes": {"onnx_rename_graph": {"name": models.cnn().graph.name}}})
    assert [one.fired for one in again.reports] == [0]
    with pytest.raises(ConfigError, match="there is a pass 'rename_graph' already"):
        RenameGraphPass.register()


def test_a_class_says_how_it_is_named() -> None:
    class Renamer(ONNXPass):
        pass

    with pytest.raises(ConfigError, match="has to be named after its pass"):
        Renamer.register()


def test_importing_the_names_is_cheap() -> None:
    code = "import sys, quark.shapeshifter; print({'onnx', 'onnx_ir', 'onnxruntime', 'torch'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
