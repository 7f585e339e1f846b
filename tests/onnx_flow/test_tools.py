"""The contract of the tools, over the whole list: each runs on a model, its result loads, runs and keeps the outputs,
or changes what the table here says and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models, pass_models

from quark.cli import main as quark
from quark.errors import ConfigError
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt16Spec
from quark.onnx.explain import explain
from quark.onnx.tools.command import find, main, names, pairs, parse
from quark.onnx.tools.names import TOOLS

Proto = Callable[[], onnx.ModelProto]


@dataclass(frozen=True)
class Case:
    """A model, the arguments behind the two files, and how far the outputs may go (None: it does not run here).

    ``db`` is a least SQNR in dB instead of a tolerance, for tools that round or stop rounding.
    """

    proto: Proto
    arguments: tuple[str, ...] = ()
    tolerance: float | None = 1e-5
    db: float | None = None
    gone: str = ""
    made: str = ""
    feed: Callable[[np.ndarray], np.ndarray] | None = None
    back: Callable[[np.ndarray], np.ndarray] | None = None


def quantized(preset: str, **options: object) -> Proto:
    return lambda: pass_models.quantized(preset, **options)


def wide() -> onnx.ModelProto:
    """uint16 activations, int8 weights."""
    config = QConfig(QLayerConfig(input_tensors=UInt16Spec(), weight=Int8Spec()), extra_options={"PrintSummary": False})
    proto = models.cnn()
    result = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
    assert result is not None and any(t.data_type == onnx.TensorProto.UINT16 for t in result.graph.initializer)
    return result


def _last(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, 1, -1) if array.ndim == 4 else array


def _single(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


CASES: dict[str, Case] = {
    "convert_a8w8_npu_to_a8w8_cpu": Case(quantized("XINT8"), db=25.0),
    "convert_bias_int32_to_int16": Case(quantized("A8W8"), tolerance=1e-2),
    "convert_custom_ops": Case(pass_models.extended, gone="ExtendedQuantizeLinear", made="VitisQuantizeLinear"),
    "convert_customqdq_to_qdq": Case(pass_models.extended, gone="ExtendedQuantizeLinear", made="QuantizeLinear"),
    "convert_dynamic_to_fixed": Case(models.cnn, ("--fix_shapes", "x:[2,3,16,16]")),
    "fix_shapes": Case(models.cnn, ("--fix_shapes", "x:[2,3,16,16];y:[2,10]")),
    "convert_fp16_to_bf16": Case(pass_models.half_model, db=30.0, made="Cast", feed=_single),
    "convert_fp16_to_bfp16": Case(pass_models.half_model, db=30.0, made="BFPQuantizeDequantize", feed=_single),
    "convert_fp16_to_fp32": Case(pass_models.half_model, tolerance=1e-2, feed=_single),
    "convert_fp32_to_bf16": Case(models.cnn, ("--format", "customqdq"), db=30.0, made="ExtendedQuantizeLinear"),
    "convert_fp32_to_bfp16": Case(models.cnn, db=30.0, made="BFPQuantizeDequantize"),
    "convert_fp32_to_fp16": Case(models.cnn, ("--keep_io_types",), tolerance=1e-2, made="Cast"),
    "convert_lstm_to_customlstm": Case(pass_models.lstm, tolerance=0.0, gone="LSTM", made="ExtendedLSTM"),
    "convert_nchw_to_nhwc": Case(pass_models.pools_and_splits, feed=_last, back=_last),
    "convert_onnx_to_onnxtxt": Case(models.cnn, tolerance=None),
    "convert_onnxtxt_to_onnx": Case(models.cnn, tolerance=None),
    "convert_opset_version": Case(models.cnn, ("--target_opset_version", "21")),
    "convert_qdq_to_qop": Case(quantized("A8W8_CPU"), tolerance=5e-2, made="QLinearConv"),
    "convert_quant_to_float": Case(quantized("A8W8"), db=20.0, gone="DequantizeLinear"),
    "convert_resize_fs_to_pof2s": Case(quantized("A8W8"), db=20.0),
    "convert_s8s8_to_u8s8": Case(quantized("A8W8")),
    "convert_u16s8_to_s16s8": Case(wide),
    "convert_u16u8_to_u8u8": Case(wide, db=20.0),
    "convert_shared_initializer_to_unique": Case(pass_models.concat_norm, ("--op_types", "Conv,ConvTranspose")),
    "insert_clip_bfloat16_qdq": Case(quantized("BF16"), made="Clip"),
    "replace_bfloat16_qdq_cast": Case(quantized("BF16"), gone="ExtendedQuantizeLinear", made="Cast"),
    "remove_bf16_cast": Case(quantized("BF16", BF16QDQToCast=True), db=30.0),
    "remove_initializer_from_input": Case(lambda: models.initializers_as_inputs(models.cnn())),
    "remove_qdq": Case(quantized("A8W8"), db=20.0, gone="QuantizeLinear"),
    "remove_qdq_mul_add": Case(quantized("A8W8"), db=20.0),
    "remove_qdq_between_ops": Case(quantized("A8W8"), ("--between_ops", "Conv,Mul;Mul,Add"), db=20.0),
    "replace_inf_weights": Case(pass_models.infinite, ("--replace_inf_value", "1000")),
    "random_quantize": Case(models.cnn, ("--config", "A8W8"), db=0.0, made="QuantizeLinear"),
    "print_a16w8_a8w8_nodes": Case(quantized("A8W8"), tolerance=None),
    "print_names": Case(models.cnn, tolerance=None),
    "print_sizes": Case(models.cnn, tolerance=None),
    "save_weights_hist": Case(models.cnn, tolerance=None),
    "save_tensor_hist": Case(lambda: _fixed(models.cnn()), tolerance=None),
}


def _fixed(proto: onnx.ModelProto) -> onnx.ModelProto:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    return proto


#: The tools of the interface that this project follows (AMD Quark 0.13); print_names and print_sizes are more.
DOCUMENTED = [
    "convert_a8w8_npu_to_a8w8_cpu",
    "convert_bias_int32_to_int16",
    "convert_custom_ops",
    "convert_customqdq_to_qdq",
    "convert_dynamic_to_fixed",
    "fix_shapes",
    "convert_fp16_to_bf16",
    "convert_fp32_to_bf16",
    "convert_fp16_to_bfp16",
    "convert_fp32_to_bfp16",
    "convert_fp16_to_fp32",
    "convert_fp32_to_fp16",
    "convert_lstm_to_customlstm",
    "convert_nchw_to_nhwc",
    "convert_onnx_to_onnxtxt",
    "convert_onnxtxt_to_onnx",
    "convert_opset_version",
    "convert_qdq_to_qop",
    "convert_quant_to_float",
    "convert_resize_fs_to_pof2s",
    "convert_s8s8_to_u8s8",
    "convert_u16s8_to_s16s8",
    "convert_u16u8_to_u8u8",
    "convert_shared_initializer_to_unique",
    "evaluate",
    "insert_clip_bfloat16_qdq",
    "replace_bfloat16_qdq_cast",
    "remove_bf16_cast",
    "print_a16w8_a8w8_nodes",
    "random_quantize",
    "remove_initializer_from_input",
    "remove_qdq",
    "remove_qdq_mul_add",
    "replace_inf_weights",
    "remove_qdq_between_ops",
    "save_tensor_hist",
    "save_weights_hist",
]


def test_every_tool_has_a_case() -> None:
    assert set(CASES) == set(TOOLS)


def test_every_documented_tool_is_there_as_a_module_and_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert quark(["onnx", "tool"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name in DOCUMENTED:
        assert find_spec(f"quark.onnx.tools.{name}") is not None, name
        assert name in listed, name


def sqnr(reference: np.ndarray, found: np.ndarray) -> float:
    difference = (reference - found).astype(np.float64)
    return float(10 * np.log10((reference.astype(np.float64) ** 2).sum() / max((difference**2).sum(), 1e-30)))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].tolerance is not None])
def test_a_tool_writes_a_model_that_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, proto = CASES[name], CASES[name].proto()
    source, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(proto, source)
    before = source.read_bytes()
    assert main(find(name), [str(source), *case.arguments, "--output_model_path", str(output)]) == 0
    assert f"written: {output}" in capsys.readouterr().out and source.read_bytes() == before
    result = onnx.load(output)
    assert result.SerializeToString(deterministic=True) != proto.SerializeToString(deterministic=True)
    onnx.checker.check_model(result, full_check=True)
    operators = models.op_types(result)
    assert case.gone not in operators and (not case.made or case.made in operators)
    feeds = models.feeds(proto)
    given = {key: case.feed(array) if case.feed else array for key, array in feeds.items()}
    expected = [case.back(array) if case.back else array for array in models.run(proto, feeds)]
    found = models.run(result, given)
    for ours, theirs in zip(found, expected, strict=True):
        if case.db is not None:
            assert sqnr(theirs, ours) > case.db
        else:
            models.assert_close([ours.astype(theirs.dtype)], [theirs], case.tolerance or 0)


def test_text_and_back(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    assert main(find("convert_onnx_to_onnxtxt"), [str(tmp_path / "in.onnx"), str(tmp_path / "m.txt")]) == 0
    assert 'op_type: "Conv"' in (tmp_path / "m.txt").read_text(encoding="utf-8")
    assert main(find("convert_onnxtxt_to_onnx"), [str(tmp_path / "m.txt"), str(tmp_path / "out.onnx")]) == 0
    feeds = models.feeds(models.cnn())
    models.assert_close(models.run(tmp_path / "out.onnx", feeds), models.run(models.cnn(), feeds), 0)
    (tmp_path / "bad.txt").write_text("graph { node", encoding="utf-8")
    assert main(find("convert_onnxtxt_to_onnx"), [str(tmp_path / "bad.txt"), str(tmp_path / "x.onnx")]) == 1


def test_pairs_behind_float_weights_go_too(tmp_path: Path) -> None:
    """As TensorRT's tools write what was trained with quantizers: the advised tool left them, and was advised again."""
    text = """g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) {
        xq = QuantizeLinear (x, s, z) xd = DequantizeLinear (xq, s, z)
        wq = QuantizeLinear <axis = 0> (w, ws, wz) wd = DequantizeLinear <axis = 0> (wq, ws, wz)
        y = Conv <pads = [1, 1, 1, 1]> (xd, wd)
    }"""
    weight, zero = models.normal(4, 3, 3, 3), np.zeros(4, np.int8)
    held = {"w": weight, "ws": np.full(4, 0.03, np.float32), "wz": zero, "s": np.float32(0.03), "z": np.int8(0)}
    onnx.save(models.model(text, held), tmp_path / "m.onnx")
    made = tmp_path / "f.onnx"
    assert quark(["onnx", "tool", "convert_quant_to_float", str(tmp_path / "m.onnx"), str(made)]) == 0
    proto = onnx.load(made)
    assert [node.op_type for node in proto.graph.node] == ["Conv"]
    assert [np.array_equal(onnx.numpy_helper.to_array(t), weight) for t in proto.graph.initializer] == [True]


def test_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    onnx.save(pass_models.quantized("A8W8"), tmp_path / "q.onnx")
    assert main(find("print_names"), [str(tmp_path / "in.onnx")]) == 0
    assert "node    c1  Conv  (x, w1) -> (c1)" in capsys.readouterr().out
    assert main(find("print_sizes"), [str(tmp_path / "in.onnx")]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["2,304", "FLOAT"]  # 8 x 8 x 3 x 3 floats
    assert main(find("print_a16w8_a8w8_nodes"), [str(tmp_path / "q.onnx")]) == 0
    told = capsys.readouterr().out
    assert "a8w8" in told and "c (Conv)" in told


def test_pages_of_histograms(tmp_path: Path) -> None:
    onnx.save(_fixed(models.cnn()), tmp_path / "in.onnx")
    source = str(tmp_path / "in.onnx")
    assert main(find("save_weights_hist"), [source, str(tmp_path / "w.html"), "--perchannel"]) == 0
    assert "w1[7]" in (tmp_path / "w.html").read_text(encoding="utf-8")
    assert main(find("save_tensor_hist"), [source, str(tmp_path / "t.html")]) == 0
    assert "r2" in (tmp_path / "t.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("form", "made"), [("with_cast", "Cast"), ("simulate_bf16", "Cast"), ("bf16", "Cast")])
def test_forms_of_bfloat16(form: str, made: str, tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    arguments = ["--input", str(tmp_path / "in.onnx"), "--output", str(tmp_path / "out.onnx"), "--format", form]
    assert main(find("convert_fp32_to_bf16"), arguments) == 0
    result = onnx.load(tmp_path / "out.onnx")
    assert made in models.op_types(result)
    kinds = {tensor.data_type for tensor in result.graph.initializer}
    assert (onnx.TensorProto.BFLOAT16 in kinds) == (form != "simulate_bf16")


@pytest.mark.parametrize(
    ("tool", "arguments"), [("convert_opset_version", ["21"]), ("convert_bias_int32_to_int16", [])]
)
def test_a_quantized_model_that_is_lifted_still_loads(tool: str, arguments: list[str], tmp_path: Path) -> None:
    """ONNX Runtime refuses opset 21 where a float node reads a moved int8 tensor (``quark.ir.runtime_faults``)."""
    graph = """g (float[1,16,8,8] x) => (float[1,16,4,4] z) {
        [first] a = Conv(x, w, b) [pool] p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a) [wave] z = Sin(p) }"""
    proto = models.model(graph, {"w": models.normal(16, 16, 1, 1), "b": models.normal(16)})
    options = {"PrintSummary": False, "NodesToExcludeOutputQuantization": ["pool"]}
    feed = models.feeds(proto)
    made = ModelQuantizer(QConfig(extra_options=options)).quantize_model(proto, None, [feed])
    onnx.save(made, tmp_path / "in.onnx")
    assert main(find(tool), [str(tmp_path / "in.onnx"), *arguments, str(tmp_path / "out.onnx")]) == 0
    lifted = onnx.load(tmp_path / "out.onnx")
    assert lifted.opset_import[0].version == 21
    exact, found = (models.session(one).run(None, feed)[0] for one in (proto, lifted))
    assert np.sum(exact**2) > 100 * np.sum((exact - found) ** 2)


def test_bfloat16_tensors_are_of_an_opset_that_knows_them(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    arguments = [str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--format", "bf16"]
    assert main(find("convert_fp32_to_bf16"), arguments) == 0
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    assert onnx.load(tmp_path / "out.onnx").opset_import[0].version >= 22


def test_weights_that_are_graph_inputs_have_histograms(tmp_path: Path) -> None:
    onnx.save(models.initializers_as_inputs(models.cnn()), tmp_path / "in.onnx")
    assert main(find("save_weights_hist"), [str(tmp_path / "in.onnx"), str(tmp_path / "w.html")]) == 0
    assert "w2" in (tmp_path / "w.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("subgraph", ["c2:r2", '[[["c2"], ["r2"]]]'])
def test_random_quantize_leaves_nodes_and_subgraphs_in_float(subgraph: str, tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    arguments = ["--input_model_path", str(tmp_path / "in.onnx"), "--quantized_model_path", str(tmp_path / "q.onnx")]
    chosen = ["--exclude_nodes", "y", "--exclude_subgraphs", subgraph]
    assert main(find("random_quantize"), [*arguments, "--config", "A8W8", *chosen]) == 0
    for node in ("c2", "r2", "y"):
        assert "float, because" in explain(tmp_path / "q.onnx", node)
    assert explain(tmp_path / "q.onnx", "c1").startswith("Conv 'c1': quantized")


# ---- the command line of a tool --------------------------------------------------------------------------------------


def test_files_by_position_and_by_every_flag(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    source, output = str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")
    tool = find("convert_opset_version")
    for arguments in (
        [source, "19", output],
        ["--input", source, "--output", output, "--target_opset_version", "19"],
        ["--input_model", source, "19", "--output_model_path", output],
    ):
        assert main(tool, arguments) == 0
        assert onnx.load(output).opset_import[0].version == 19


def test_external_data_and_words_for_true(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    arguments = [str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]
    assert main(find("convert_fp16_to_fp32"), [*arguments, "--save_as_external_data", "True"]) == 0
    assert (tmp_path / "out.onnx.data").exists()
    assert names("a;b") == names("a,b") == names('["a", "b"]') == ["a", "b"] and pairs("A,B;C,D")[1] == ("C", "D")


@pytest.mark.parametrize(
    "arguments", [[], ["a"], ["a", "b", "c", "d"], ["a", "new", "b"], ["a", "b", "--target", "3"]], ids=str
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(find("convert_opset_version"), arguments)
    assert stop.value.code == 2 and "usage" in capsys.readouterr().err


#: Flags of the published tools beyond those of the files; each is taken here, too.
FLAGS = {
    "convert_custom_ops": "--external_data --reverse_conversion",
    "convert_dynamic_to_fixed": "--fix_shapes=x:[1]",
    "convert_fp16_to_bf16": "--format=bf16 --save_as_external_data",
    "convert_fp16_to_fp32": "--save_as_external_data --subgraphs_to_include=a:b",
    "convert_fp32_to_fp16": "--keep_io_types --disable_shape_infer --save_as_external_data --all_tensors_to_one_file "
    "--not_simplify",
    "convert_shared_initializer_to_unique": "--op_types=Conv",
    "fix_shapes": "--fix_shapes=x:[1] --save_as_external_data",
    "random_quantize": "--config=XINT8 --exclude_nodes=a --exclude_subgraphs=a:b --save_as_external_data",
    "remove_qdq_between_ops": "--between_ops=Conv,Relu",
    "replace_inf_weights": "--replace_inf_value=1",
    "save_tensor_hist": "--data_path=d",
    "save_weights_hist": "--perchannel",
}


@pytest.mark.parametrize("name", FLAGS)
def test_the_published_flags_are_taken(name: str) -> None:
    assert parse(find(name), ["--input", "a", "--output", "b", *FLAGS[name].split()]).input == "a"


def test_a_tool_does_not_write_over_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    before, path = (tmp_path / "in.onnx").read_bytes(), str(tmp_path / "in.onnx")
    assert main(find("convert_opset_version"), [path, "21", str(tmp_path / "." / "in.onnx")]) == 1
    assert "is the input file itself" in capsys.readouterr().err and (tmp_path / "in.onnx").read_bytes() == before


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(find("remove_qdq"), [str(tmp_path / "no.onnx"), str(tmp_path / "out.onnx")]) == 1
    assert capsys.readouterr().err.startswith("error: the model file")
    with pytest.raises(ConfigError, match=r"unknown tool 'remove_qdqs'.* Did you mean 'remove_qdq'"):
        find("remove_qdqs")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "in.onnx")
    assert quark(["onnx", "tool"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in (*TOOLS, "evaluate"))
    assert quark(["onnx", "tool", "fix_shapes", "--help"]) == 0
    assert "--fix_shapes" in capsys.readouterr().out
    arguments = [str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--fix_shapes", "x:[2,3,16,16]"]
    assert quark(["onnx", "tool", "fix_shapes", *arguments]) == 0 and (tmp_path / "out.onnx").exists()
    assert quark(["onnx", "tool", "fix_shape"]) == 1
