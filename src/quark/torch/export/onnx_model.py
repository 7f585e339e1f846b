"""``export_onnx``: a quantized torch model as an ONNX file that stock ONNX Runtime runs.

    mark every quantizer → torch.onnx (dynamo) → nodes of the formats → operators as functions → file

Weights are stored as codes, also after ``freeze``. The model is not changed. ONNX Runtime rounds the activations of
layers with 4- and 8-bit weights to int8 by its own choice (MatMulNBits); the session option
``session.qdq_matmulnbits_accuracy_level`` = "1" has it compute in float32.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.files.folder import new_folder
from quark.reading import reason_of
from quark.torch.calibration import evaluating, without_cache
from quark.torch.export.huggingface import config_of
from quark.torch.export.onnx_decoder import Traced, check_varying, with_cache
from quark.torch.export.onnx_marks import DOMAIN, Marked, marking, quantizers_of
from quark.torch.export.onnx_run import answers_of, run_exported
from quark.torch.export.onnx_verify import verify_weights
from quark.torch.export.skeleton import compact_layers, unpack
from quark.torch.export.stored import StoredTensor
from quark.torch.rotated import refuse_to_export

FILE = "quark_model.onnx"
OPSET = 21  # 4-bit types, and scales per block
EXTERNAL = 1 << 30  # bytes above which tensors go to a file of their own


def export_onnx(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    input_args: torch.Tensor | tuple[Any, ...],
    opset_version: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    verbose: bool = False,
    do_constant_folding: bool = True,
    operator_export_type: Any = None,
    uint4_int4_flag: bool = False,
    dynamo: bool = True,
    dynamic_shapes: Any = None,
    use_cache: bool = False,
    verify: bool = True,
) -> None:
    """Write ``<output_dir>/quark_model.onnx``.

    Args:
        model: quantized, frozen or not, or imported; float32.
        output_dir: made if it is not there.
        input_args: what the model is called with, to trace it: a tensor, or a tuple of arguments; a mapping at its end,
            or alone, holds keywords where ``forward`` knows all its keys.
        opset_version: 21 or later; None: 21.
        input_names, output_names: of the graph.
        verbose: the exporter reports.
        do_constant_folding: simplify the graph.
        operator_export_type, uint4_int4_flag, dynamo: of the peer's interface; there is one exporter, and 4-bit codes
            are always stored as such.
        dynamic_shapes: which dimensions vary, as ``torch.onnx.export`` takes them.
        use_cache: a decoder of transformers with its cache as inputs and outputs, every size varying; names and order
            as in :mod:`quark.torch.export.onnx_decoder`. Without it no cache is written.
        verify: before the file appears, evaluate the decoding of every weight in it, and compare it with what the model
            computes with; open it in ONNX Runtime and run it on ``input_args``.

    Raises:
        ModelError: a model that is not quantized, that torch's exporter cannot trace or convert, or that ONNX Runtime
            does not run; the reason follows.
        ConfigError: a scheme that ONNX cannot say, or a file that is there already.
    """
    config_of(model)
    refuse_to_export(model)
    check_float32(model)
    if opset_version is not None and opset_version < OPSET:
        raise ConfigError(f"opset_version must be {OPSET} or later, not {opset_version}")
    if (Path(output_dir) / FILE).exists():
        raise ConfigError(f"{str(Path(output_dir) / FILE)!r} already exists; delete it, or export to another folder")
    if any(True for _ in compact_layers(model)):
        model = unpack(copy.deepcopy(model))
    arguments, keywords = called_with(model, input_args)
    check_varying(arguments, dynamic_shapes)
    with evaluating(model), without_cache(model):
        traced = Traced(model, arguments, keywords, input_names, output_names, dynamic_shapes)
        if use_cache:
            refuse_names(input_names, output_names, dynamic_shapes)
            traced = with_cache(model, arguments)
        wanted = answers_of(traced) if verify else []
        found = quantizers_of(model)
        proto = trace(traced, found, opset_version or OPSET, verbose, do_constant_folding)
    made, results, turned = replaced(proto, found)
    with new_folder(output_dir, beside=True) as folder:
        save(made, folder / FILE)
        if verify:
            verify_weights(folder / FILE, found, results, turned)
            run_exported(folder / FILE, traced, wanted)


def check_float32(model: nn.Module) -> None:
    """The model computes in float32: decoded weights do, and a graph has no type that both would be cast to.

    Raises:
        ConfigError: a tensor of another type.
    """
    types = {name: value.dtype for name, value in model.named_parameters() if value.is_floating_point()}
    types |= {name: one.dtype for name, one in model.named_modules() if isinstance(one, StoredTensor)}
    for name, dtype in types.items():
        if dtype is not torch.float32 and dtype.itemsize > 1:
            raise ConfigError(f"an ONNX file computes in float32, and {name!r} is {dtype}: quantize model.float()")


def called_with(model: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments. ``torch.onnx.export`` takes any mapping at the end for keywords, also one that
    is an argument itself, as ``added_cond_kwargs`` of diffusers."""
    arguments = given if isinstance(given, tuple) else (given,)
    if arguments and isinstance(arguments[-1], Mapping):
        known = inspect.signature(model.forward).parameters.values()
        names = {parameter.name for parameter in known}
        if names >= set(arguments[-1]) or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
            return arguments[:-1], dict(arguments[-1])
    return arguments, {}


def refuse_names(*given: Any) -> None:
    """With a cache, names and varying sizes are fixed.

    Raises:
        ConfigError: one is given.
    """
    if any(given):
        raise ConfigError(
            "use_cache gives inputs, outputs and varying sizes their names: leave input_names, "
            "output_names and dynamic_shapes out"
        )


def trace(traced: Traced, found: Sequence[Marked], opset: int, verbose: bool, optimize: bool) -> Any:
    """The graph of torch's exporter, in which quantizers are marks."""
    with marking(traced.model, found), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the exporter's own
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            program: Any = torch.onnx.export(
                traced.model,
                (*traced.arguments, dict(traced.keywords)),  # the last mapping is taken for the keywords
                dynamo=True,
                opset_version=opset,
                input_names=list(traced.input_names) or None,
                output_names=list(traced.output_names) or None,
                verbose=verbose,
                optimize=optimize,
                dynamic_shapes=traced.dynamic_shapes,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = reason_of(error.__cause__ or error)
            raise ModelError(f"{type(traced.model).__name__}: torch's exporter cannot write it: {reason}") from error
    pass_over_squeezes(program.model)
    return program.model_proto


def pass_over_squeezes(model: Any) -> None:
    """``tensor.squeeze(dim)`` passes over a size that is not 1; ONNX Runtime refuses the Squeeze that torch's exporter
    writes for it. Where the size is known it becomes an Identity."""
    from onnx_ir.convenience import get_const_tensor

    for node in model.graph:
        if node.op_type != "Squeeze" or len(node.inputs) != 2 or node.inputs[0].shape is None:
            continue
        axes = get_const_tensor(node.inputs[1])
        if axes is None or axes.size != 1:
            continue
        size = node.inputs[0].shape[int(axes.numpy().item())]
        if isinstance(size, int) and size != 1:
            node.op_type = "Identity"
            node.resize_inputs(1)


def replaced(proto: Any, found: Sequence[Marked]) -> tuple[Any, dict[int, str], set[str]]:
    """The graph with nodes of the formats in the place of the marks, and the functions of our operators.

    Returns:
        It; the name of what each quantizer gives, by its number; of these, those that are stored transposed.
    """
    from quark.operators import add_functions
    from quark.torch.export.onnx_floats import keep_floats
    from quark.torch.export.onnx_moves import quantize_moved
    from quark.torch.export.onnx_nodes import nodes_of
    from quark.torch.export.onnx_turned import turn_weights

    graph, made = proto.graph, []
    renamed: dict[str, str] = {}
    done: dict[int, str] = {}
    calls: Counter[int] = Counter()
    outputs, lengths = {value.name for value in graph.output}, lengths_in(graph)
    for node in graph.node:
        for k, name in enumerate(node.input):
            node.input[k] = renamed.get(name, name)
        if node.domain != DOMAIN:
            made.append(node)
            continue
        key = node.attribute[0].i
        constant = found[key].value is not None
        if not (constant and key in done):
            calls[key] += 1
            length = lengths.get(node.output[0])
            nodes, result = nodes_of(again(found[key], calls[key]), node.input[0], length)
            made.extend(nodes.nodes)
            graph.initializer.extend(nodes.constants)
            done[key] = result
        renamed[node.output[0]] = done[key]
        if node.output[0] in outputs:
            made.append(identity(done[key], node.output[0]))
    del graph.node[:]
    graph.node.extend(made)
    quantize_moved(graph)
    turned = turn_weights(graph)
    keep_floats(graph)
    work_around(proto)
    drop_unused(graph)
    for k in reversed(range(len(proto.opset_import))):
        if proto.opset_import[k].domain == DOMAIN:
            del proto.opset_import[k]
    del graph.value_info[:]
    add_functions(proto)
    return proto, done, turned


def work_around(proto: Any) -> None:
    """Write the nodes that keep faults of runtimes away; the weights stay where they are."""
    import onnx_ir as ir

    from quark.ir.runtime_faults import work_around_faults

    model = ir.from_proto(proto)
    before = {*model.graph.initializers}
    work_around_faults(model)
    del proto.graph.node[:]
    proto.graph.node.extend(map(ir.to_proto, model.graph))
    added = [value.const_value for name, value in model.graph.initializers.items() if name not in before]
    proto.graph.initializer.extend(map(ir.to_proto, added))


def lengths_in(graph: Any) -> dict[str, int]:
    """How long the last axis of each value is, where the graph says so."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.output)}
    return {name: dims[-1].dim_value for name, dims in shapes.items() if dims and dims[-1].HasField("dim_value")}


def again(marked: Marked, call: int) -> Marked:
    """A quantizer at its second call and later ones: names of nodes are used once."""
    return marked if call == 1 else replace(marked, name=f"{marked.name}.call_{call}")


def identity(source: str, target: str) -> Any:
    """A node that gives a tensor another name."""
    from onnx import helper

    return helper.make_node("Identity", [source], [target])


def drop_unused(graph: Any) -> None:
    """Remove the float weights that nothing reads any more."""
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def save(proto: Any, path: Path) -> None:
    """The file; large models keep their tensors beside it."""
    import onnx

    if proto.ByteSize() < EXTERNAL:
        onnx.save(proto, path)
        return
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}.data")
