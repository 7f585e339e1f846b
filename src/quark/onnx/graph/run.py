"""Run a model and look at its inner tensors.

The named tensors become the outputs of a copy of the graph, and what does not lead to them is taken out of it.
Weights are shared with the model, not serialized. Where only the extremes of a tensor are wanted, the graph itself
reduces it (ReduceMin, ReduceMax, and whether there is a NaN, which the two may swallow), and three numbers come back
instead of the tensor. Graph optimizations stay on: tensors that are outputs keep their names and values, up to the
fusions that the user's own session has as well.

The memory arena is off: it would keep the largest size that every output ever had. Threads that wait spin only
where that is asked for: the core may be needed for counting what the last run gave (a third of the time on ResNet-50
with histograms; without them spinning saves a fifth). Nothing global of ONNX Runtime is touched, logging included.

Not handled: tensors inside subgraphs; extremes of tensors that are not float32, float16, bfloat16 or float64.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.dataclass import dataclass
from quark.errors import DataError, ModelError, check_names, nearest
from quark.ir.surgery import Names, label, opset, remove_unused, tensors_by_name
from quark.ir.walk import all_nodes
from quark.onnx.graph import budget
from quark.onnx.graph.admission import registered
from quark.onnx.graph.libraries import Libraries, library_files
from quark.onnx.graph.pieces import Pieces, open_in_pieces
from quark.onnx.graph.session import LEFT_OUT, ON_CPU, RUNTIME_ERRORS, Light, Runtime, quiet_options
from quark.report.process import present, shared

Feed = Mapping[str, np.ndarray]
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
OWN_DOMAINS = frozenset(("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training"))
RUNTIME_DOMAINS = frozenset(
    ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "com.microsoft.experimental")
)
IS_NAN_OPSET = 9
#: Bytes of the largest block by which glibc moves its thresholds (DEFAULT_MMAP_THRESHOLD_MAX), its header left out.
LARGEST_KEPT = (1 << 25) - (1 << 13)
#: Bytes by which a process grows before freed memory is looked for, and its size after that was done last.
GROWTH, _trimmed = 1 << 23, {"size": 0}
_AS_GIVEN = (LEFT_OUT, "WeightBiasQuantization")


@dataclass(frozen=True)
class Extremes:
    """What the graph says of one tensor and one sample; ``lo`` > ``hi`` where the tensor was empty."""

    lo: float
    hi: float
    has_nan: bool


@dataclass(frozen=True)
class Observation:
    """What one run gave: whole tensors, and extremes of others."""

    values: dict[str, np.ndarray]
    extremes: dict[str, Extremes]


class Runner:
    """A session that gives chosen tensors.

    Args:
        model: comes back unchanged; its weights must not be written to while the runner lives.
        values: tensors wanted whole. A graph input is passed through from the feed.
        extremes: tensors of which only the extremes are wanted; those that cannot be reduced in the graph are fetched
            and reduced here.
        runtime: how it is run.
        complete: open and run the whole model, and not only what leads to the tensors: one that ONNX Runtime refuses
            shows itself then, wherever its fault is.

    Raises:
        ModelError: there is no such tensor, an operator is unknown, a loop has no end, or ONNX Runtime refuses the
            model.
        ConfigError: an execution provider that this ONNX Runtime does not have.
    """

    def __init__(
        self,
        model: ir.Model,
        values: Iterable[str] = (),
        extremes: Iterable[str] = (),
        runtime: Runtime = ON_CPU,
        complete: bool = False,
    ) -> None:
        opened = model.clone()
        budget.check_ends(opened)
        self._loop = budget.loop_without_count(opened)
        tensors = tensors_by_name(opened)
        wanted = dict.fromkeys(values)
        reduced = [name for name in dict.fromkeys(extremes) if name not in wanted]
        for name in (*wanted, *reduced):
            _check_known(name, tensors, opened)
        in_graph = [name for name in reduced if _reducible(tensors[name], opened)]
        self._runtime = runtime
        self._fed = frozenset(str(value.name) for value in opened.graph.inputs)
        self._whole, self._reduced = tuple(wanted), tuple(reduced)
        fetched = [name for name in (*wanted, *reduced) if name not in in_graph and name not in self._fed]
        outputs = [tensors[name] for name in fetched]
        names = Names(opened)
        for name in in_graph:
            outputs += _reduce(opened, tensors[name], names)
        self._fetched, self._in_graph = fetched, in_graph
        self._asked = [str(value.name) for value in outputs]
        if complete:
            outputs += [value for value in opened.graph.outputs if value not in outputs]
        if runtime.libraries:
            session_options(runtime)  # a library that cannot be loaded is told before anything about the graph
        self._session = self._open(opened, outputs) if outputs else None

    def _open(self, model: ir.Model, outputs: list[ir.Value]) -> onnxruntime.InferenceSession | Pieces:
        model.graph.outputs[:] = outputs
        remove_unused(model)
        _check_providers(self._runtime.providers)
        self._light = Light.of(model)
        try:
            return self._opened()
        except ModelError as error:
            raise unknown_operator(model, self._runtime.libraries) or _in_one_line(error) from error

    def _opened(self) -> onnxruntime.InferenceSession | Pieces:
        keep_heap()
        try:
            return open_in_pieces(self._light, partial(session_options, self._runtime), self._runtime.providers)
        finally:
            trim_heap()

    def under(self, runtime: Runtime) -> Runner:
        """The same tensors of the same model, run in another way; a graph that is read and cut once.

        Raises:
            ModelError: ONNX Runtime refuses the model there.
        """
        other = copy(self)
        other._runtime = runtime
        other._session = None if self._session is None else other._opened()
        return other

    @property
    def session(self) -> onnxruntime.InferenceSession | None:
        """Of the whole graph; None where nothing is to be run, or the graph is run in pieces."""
        return self._session if isinstance(self._session, onnxruntime.InferenceSession) else None

    def run(self, feed: Feed) -> Observation:
        """One inference.

        Args:
            feed: every input of the model, by name.

        Raises:
            DataError: the model cannot run on this sample; the message has the shapes and ONNX Runtime's reason.
        """
        found = self._infer(feed)
        whole = dict(zip(self._fetched, found, strict=False))
        numbers = [float(value) for value in found[len(self._fetched) :]]
        triples = zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True)
        extremes = {
            name: Extremes(lo, hi, nan > 0) for name, (lo, hi, nan) in zip(self._in_graph, triples, strict=True)
        }
        whole.update((name, np.asarray(feed[name])) for name in (*self._whole, *self._reduced) if name in self._fed)
        here = {name: _extremes_of(whole.pop(name)) for name in self._reduced if name in whole}
        return Observation(whole, {**extremes, **here})

    def _infer(self, feed: Feed) -> list[np.ndarray]:
        if self._session is None:
            return []
        try:
            found = run_in_time(self._session, self._asked or None, feed, self._loop)
            made = [as_array(value) for value in found[: len(self._asked)]]
        except RUNTIME_ERRORS as error:
            raise unfit(feed, error) from error
        self._light.check()
        return made


def unfit(feed: Feed, error: Exception) -> DataError:
    """The error for a sample on which ONNX Runtime fails, with the shapes and its reason."""
    given = ", ".join(f"{name!r} {array.dtype} {list(array.shape)}" for name, array in feed.items())
    return DataError(f"the model does not run on this sample ({given}): {_reason(error)}")


def run_in_time(
    session: onnxruntime.InferenceSession | Pieces, names: Sequence[str] | None, feed: Feed, loop: ir.Node | None
) -> list[Any]:
    """What a session makes of a sample.

    Args:
        names: the outputs that are wanted; None: all.
        loop: a Loop of the model that nothing but its condition ends.

    Raises:
        DataError: the loop did not end in ``budget.LOOP_SECONDS``.
    """
    # copies: a BatchNormalization that trains writes its statistics into the inputs of the graph
    given = {name: np.array(array) if isinstance(array, np.ndarray) else array for name, array in feed.items()}
    if loop is None:
        return list(session.run(names, given))
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    clock = threading.Timer(budget.LOOP_SECONDS, setattr, (options, "terminate", True))
    clock.start()
    try:
        return list(session.run(names, given, options))
    except RUNTIME_ERRORS as error:
        if not options.terminate:
            raise
        raise DataError(
            f"the node {label(loop)} does not end: its condition still holds after "
            f"{budget.LOOP_SECONDS:g} s; at most so many are taken"
        ) from error
    finally:
        clock.cancel()


def as_array(value: Any) -> np.ndarray:
    """What a session makes, as one array: of a sequence its tensors stacked, or end to end where their shapes differ;
    of an optional that is empty, nothing."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list):
        return np.asarray(() if value is None else value)
    arrays = [as_array(one) for one in value]
    if len({one.shape for one in arrays}) > 1:
        return np.concatenate([one.ravel() for one in arrays])
    return np.stack(arrays) if arrays else np.empty(0, np.float32)


def session_options(runtime: Runtime = ON_CPU) -> onnxruntime.SessionOptions:
    """Options of a session of our own: silent, without arena unless it is as a user's, with custom operators.

    Raises:
        ModelError: a library cannot be loaded.
    """
    options = quiet_options()
    if not runtime.optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if runtime.as_given:
        options.add_session_config_entry(*_AS_GIVEN)
    if not runtime.usual:
        _sparingly(options, runtime)
    for library in library_files(runtime.libraries):
        try:
            options.register_custom_ops_library(library)
        except RUNTIME_ERRORS as error:
            raise ModelError(f"UserCustomOpLibPath: {str(library)!r} cannot be loaded: {_reason(error)}") from error
    return options


def _sparingly(options: onnxruntime.SessionOptions, runtime: Runtime) -> None:
    """No memory is kept from run to run, and no core busy with waiting."""
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if runtime.spin and not shared() else "0")
    if runtime.threads is not None:
        options.intra_op_num_threads = runtime.threads


def _check_known(name: str, tensors: Mapping[str, ir.Value], model: ir.Model) -> None:
    if name in tensors:
        return
    if name in model.graph.initializers:
        raise ModelError(f"the tensor {name!r} is a constant; only inputs and outputs of nodes can be observed")
    raise ModelError(f"the model has no tensor {name!r} in its main graph.{nearest(name, tensors)}")


def keep_heap() -> None:
    """Let the C library (glibc) keep what is freed between two samples, instead of fetching it from the system again.

    The system hands out every page anew, and zeroes it: a third of all page faults of a calibration, 0.3 s for
    ResNet-50. glibc keeps twice the size of the largest block that was freed, up to 32 MiB, and takes such blocks from
    what it keeps, unless the caller has told it otherwise. So one is freed here, without a page of it being touched.
    """
    block = np.empty(LARGEST_KEPT, np.uint8)
    del block


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can (glibc).

    Opening a session frees about twice the weights in blocks that glibc would keep: 0.2 GB for ResNet-50. The whole
    heap is walked for it, beside torch in 10 ms and more, which is longer than small models take: nothing is done where
    the process has not grown by ``GROWTH`` since.
    """
    now = present()
    if now < _trimmed["size"] + GROWTH:
        _trimmed["size"] = min(now, _trimmed["size"])
        return
    with suppress(OSError, AttributeError, TypeError):  # another C library, Windows
        ctypes.CDLL(None).malloc_trim(0)
    _trimmed["size"] = present()


def _check_providers(providers: Sequence[str]) -> None:
    available = onnxruntime.get_available_providers()
    check_names("execution provider (ExecutionProviders)", providers, available)


def _reducible(value: ir.Value, model: ir.Model) -> bool:
    """False for graph inputs, which are at hand, and for what ONNX Runtime's reductions do not take."""
    return not value.is_graph_input() and value.dtype in FLOATS and opset(model) >= IS_NAN_OPSET


def _reduce(model: ir.Model, value: ir.Value, names: Names) -> list[ir.Value]:
    """Three new scalars in the graph: smallest value, largest value, 1 where there is a NaN."""
    graph = model.graph

    def add(op_type: str, source: ir.Value, *attributes: ir.Attr) -> ir.Value:
        output = ir.Value(name=names.fresh(f"{value.name}_{op_type}"))
        graph.append(ir.Node("", op_type, [source], attributes, outputs=[output]))
        return output

    whole = ir.AttrInt64("keepdims", 0)
    to_float = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    single = value if value.dtype == ir.DataType.FLOAT else add("Cast", value, to_float)
    nan = add("Cast", add("IsNaN", single), to_float)
    return [add("ReduceMin", single, whole), add("ReduceMax", single, whole), add("ReduceMax", nan, whole)]


def _extremes_of(array: np.ndarray) -> Extremes:
    if not array.size:
        return Extremes(np.inf, -np.inf, False)
    lo, hi = float(array.min()), float(array.max())
    return Extremes(lo, hi, bool(np.isnan(lo)))


def unknown_operator(model: ir.Model, libraries: Libraries) -> ModelError | None:
    """The error for the first node of a domain that ONNX Runtime does not have, if there is one."""
    defined = {(function.domain, function.name) for function in model.functions.values()}
    for node in all_nodes(model):
        key = (node.domain, node.op_type)
        if node.domain in OWN_DOMAINS or key in defined or (node.domain in RUNTIME_DOMAINS and key in registered()):
            continue
        remedy = (
            "the libraries in UserCustomOpLibPath do not define it"
            if libraries
            else ("name the library that defines it in the option UserCustomOpLibPath")
        )
        return ModelError(
            f"the node {label(node)} is of the operator {node.op_type!r} of the domain {node.domain!r}, which ONNX "
            f"Runtime {onnxruntime.__version__} does not have: {remedy}"
        )
    return None


def _in_one_line(error: ModelError) -> ModelError:
    return ModelError(_reason(error))


def _reason(error: Exception) -> str:
    """ONNX Runtime's message on one line, without its codes and source positions."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    text = re.sub(r"\S+\.(cc|h):\d+ \S+( \[with.*?\])? ", "", text)
    return " ".join(text.split())
