"""Lists of passes from YAML, mappings and templates; the registry and passes of the user's own; the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models, pass_models

from quark.cli import main
from quark.errors import ConfigError, ModelError
from quark.onnx.graph.report import PassReport
from quark.onnx.passes.registry import get_pass, passes, register_pass, unregister_pass
from quark.onnx.shapeshifter import TEMPLATES, read, transform


def test_passes_run_in_the_order_they_are_written_in() -> None:
    proto = pass_models.concat_norm()
    done = transform(proto, {"passes": ["copy_shared_init", {"onnx_fold_batch_norm_after_concat": {}}]})
    assert [(one.name, one.fired) for one in done.reports] == [
        ("copy_shared_init", 3),
        ("fold_batch_norm_after_concat", 1),
    ]
    assert done.proto is not None
    models.assert_close(models.run(done.proto, models.feeds(proto)), models.run(proto, models.feeds(proto)))


def test_a_pass_whose_switch_is_false_does_not_run() -> None:
    off = {"onnx_fold_batch_norm": {"fold_batch_norm": False}}
    done = transform(models.cnn(), {"passes": {**off, "optimize_with_ort": {"optimize_with_ort": True}}})
    assert [one.name for one in done.reports] == ["optimize_with_ort"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"passes": {"fold_batchnorm": None}}, "unknown pass 'fold_batchnorm'.* Did you mean 'fold_batch_norm'"),
        ({"passes": {"fold_batch_norm": {"epsilon": 1}}}, "unknown parameter of the pass 'fold_batch_norm': 'epsilon'"),
        ({"passes": {"fold_batch_norm": {"fold_batch_norm": "perhaps"}}}, "cannot be 'perhaps'"),
        ({"passes": {"convert_opset_version": None}}, "needs the parameter 'target_opset_version'"),
        ({"passes": {"convert_opset_version": {"target_opset_version": "new"}}}, "cannot be 'new'"),
        ({"passes": {"fold_batch_norm": 3}}, "are a mapping"),
        ({"passes": 3}, "a mapping or a list"),
        ({"passes": {}}, "no pass is listed and switched on"),
        ({"passs": {"fold_batch_norm": None}}, "unknown key 'passs'.* Did you mean 'passes'"),
        ({"passes": ["fold_relu"], "preprocess_passes": ["fold_relu"]}, "not both"),
        ({"passes": ["fold_relu"], "input_model_config": {"model_type": "pytorch"}}, "only onnx"),
        ("xint9", "'xint9' is neither a file nor a template. Did you mean 'xint8'"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_runs(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transform(models.cnn(), config)


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "passes.yaml").write_text("passes: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read(tmp_path / "passes.yaml")


def test_the_configuration_may_name_both_files(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    source, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    text = {"input_model_config": {"input_model_path": str(source)}, "output_model_path": str(output)}
    (tmp_path / "passes.yaml").write_text(json.dumps({**text, "passes": ["fold_batch_norm"]}), encoding="utf-8")
    assert transform(None, tmp_path / "passes.yaml").proto is None
    assert "BatchNormalization" not in models.op_types(onnx.load(output))
    with pytest.raises(ConfigError, match="no model is given"):
        transform(None, {"passes": ["fold_batch_norm"]})


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_reads_and_runs(name: str) -> None:
    recipe = read(name)
    assert [row.name for row, _ in recipe.before][:2] == ["convert_opset_version", "simplify"]
    proto = pass_models.instance_norm()
    done = transform(proto, name)
    assert done.proto is not None and "InstanceNormalization" in models.op_types(done.proto)
    models.assert_close(models.run(done.proto, models.feeds(proto)), models.run(proto, models.feeds(proto)), 1e-4)


# ---- passes of one's own ---------------------------------------------------------------------------------------------


def drop_names(model: ir.Model, prefix: Annotated[str, "What the new names begin with."] = "n") -> PassReport:
    """Number the nodes."""
    for number, node in enumerate(model.graph):
        node.name = f"{prefix}{number}"
    return PassReport("x", len(model.graph))


@pytest.fixture
def registered() -> Iterator[None]:
    register_pass("number_nodes", drop_names)
    yield
    unregister_pass("number_nodes")


@pytest.mark.usefixtures("registered")
def test_a_pass_of_ones_own() -> None:
    row = get_pass("onnx_number_nodes")
    assert (row.doc, row.parameters["prefix"].doc) == ("Number the nodes.", "What the new names begin with.")
    done = transform(models.cnn(), {"passes": {"number_nodes": {"prefix": "k"}}})
    assert done.proto is not None and done.proto.graph.node[0].name == "k0" and done.reports[0].name == "number_nodes"
    with pytest.raises(ConfigError, match="there is a pass"):
        register_pass("number_nodes", drop_names)


def test_what_is_no_pass() -> None:
    with pytest.raises(ConfigError, match="there is a pass 'fold_relu' already"):
        register_pass("onnx_fold_relu", drop_names)
    with pytest.raises(ConfigError, match="must be a function"):
        register_pass("other", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown pass of your own"):
        unregister_pass("fold_relu")
    register_pass("silent", lambda model: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(ConfigError, match="returned NoneType"):
            transform(models.cnn(), {"passes": ["silent"]})
    finally:
        unregister_pass("silent")


# ---- attributes ------------------------------------------------------------------------------------------------------


def test_attributes_of_named_nodes() -> None:
    def update(node: str, **attributes: object) -> dict[str, object]:
        updates = [{"node_name": node, "attributes": attributes}]
        return {"passes": {"set_node_attributes": {"node_attribute_updates": updates}}}

    done = transform(models.cnn(), update("c1", pads=[1, 1, 1, 1], strides=[2, 2]))
    conv = done.proto.graph.node[0]
    assert done.reports[0].fired == 1 and [a.ints for a in conv.attribute if a.name == "strides"] == [[2, 2]]
    for config, message in (
        (update("c9", pads=[1]), "unknown node 'c9'"),
        (update("c1", padd=[1]), "unknown attribute of Conv 'c1': 'padd'.* Did you mean 'pads'"),
    ):
        with pytest.raises(ModelError, match=message):
            transform(models.cnn(), config)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    arguments = ["onnx", "transform", str(tmp_path / "in.onnx"), "-o", str(tmp_path / "out.onnx")]
    assert main([*arguments, "--config", "xint8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fold_batch_norm"]["fired"] == 2 and (tmp_path / "out.onnx").exists()
    assert main([*arguments, "--config", "xint9"]) == 1
    assert "Did you mean" in capsys.readouterr().err


def test_the_command_runs_passes_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    (tmp_path / "p.yaml").write_text("passes: {named_by_file: {word: hello}}")
    (tmp_path / "own.py").write_text(
        "from quark.onnx.graph.report import PassReport\n"
        "from quark.onnx.passes.registry import register_pass\n"
        "def run(model, word: str = 'x') -> PassReport:\n"
        "    model.graph.name = word\n"
        "    return PassReport('named', 1)\n"
        "register_pass('named_by_file', run)\n"
    )
    arguments = ["onnx", "transform", str(tmp_path / "in.onnx"), "-o", str(tmp_path / "out.onnx")]
    arguments += ["--config", str(tmp_path / "p.yaml")]
    assert main(arguments) == 1 and "unknown pass 'named_by_file'" in capsys.readouterr().err
    try:
        assert main([*arguments, "--register", str(tmp_path / "own.py")]) == 0
    finally:
        unregister_pass("named_by_file")
    assert onnx.load(tmp_path / "out.onnx").graph.name == "hello"
    (tmp_path / "bad.py").write_text("1 / 0")
    for name, message in (("bad.py", "ZeroDivisionError"), ("none.py", "there is no file")):
        assert main([*arguments, "--register", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err


def test_its_help_lists_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "transform", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in passes())
