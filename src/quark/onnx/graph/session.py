"""Open a model that is in memory in ONNX Runtime without serializing its weights.

The weights go in as ``OrtValue`` that share the arrays of the model, so that opening costs one copy (ONNX Runtime's
own packing) instead of four: measured on ResNet-50 shapes, 0.26 s instead of 1.37 s, and 80 MB less at the peak.

External data stay in their files: ONNX Runtime maps them itself and lets go of what it packs into a form of its own.

ONNX Runtime's telemetry is off: ``quark`` says so before it is imported; here it is told again, for a process that had
imported it already.

A MaxPool answers what it says behind a Pad, too: ONNX Runtime (1.31) joins the two, and zeros around values below 0
are lost.

Not handled: types below a byte (int4 and the like) travel with the protobuf; they are small.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from quark.config.options import Options
from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.ir.in_file import InFile, WeightFile
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load, readable_ir_version
from quark.onnx.graph.weightless import data_folder, external_proto, file_proto
from quark.report import process

#: Where a model that is handed over in memory has its external data.
_FOLDER = "session.model_external_initializers_file_folder_path"
#: Bytes of a protobuf up to which ONNX Runtime gets a copy of it, weights and all.
COPIED = 1 << 26
#: Names of optimizers that are not run, with semicolons between them; that of the one that loses zeros.
LEFT_OUT, _LOSES_ZEROS = "optimization.disable_specified_optimizers", "Pad_Fusion"
CPU = ("CPUExecutionProvider",)
RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    _state.EPFail,
    _state.Fail,
    _state.InvalidArgument,
    _state.InvalidGraph,
    _state.InvalidProtobuf,
    _state.NoModel,
    _state.NoSuchFile,
    _state.NotImplemented,
    _state.RuntimeException,
    RuntimeError,
    ValueError,
)
"""What ONNX Runtime raises; its classes share no base below ``Exception``."""

onnxruntime.disable_telemetry_events()


@dataclass(frozen=True)
class Runtime:
    """How ONNX Runtime runs a model of ours.

    Attributes:
        providers: execution providers, the preferred one first.
        libraries: files with custom operators (``UserCustomOpLibPath``).
        threads: threads within an operator; None: as many as there are cores, or as this process is lent.
        spin: let threads that wait keep their core busy, where all cores are ours.
        as_given: float weights stay what they are. ONNX Runtime (1.31) otherwise rounds those of a Conv,
            ConvTranspose or Gemm between DequantizeLinear and QuantizeLinear to int8, one scale per tensor.
        optimize: let ONNX Runtime rewrite the graph; False: every node computes what it says.
        usual: memory and threads are as in a session that a user opens, whose time is measured.
    """

    providers: Sequence[str] = CPU
    libraries: Libraries = None
    threads: int | None = None
    spin: bool = False
    as_given: bool = False
    optimize: bool = True
    usual: bool = False

    @classmethod
    def of(cls, options: Options) -> Runtime:
        """What the options of a job say."""
        libraries = options.UserCustomOpLibPath
        kept = libraries if libraries is None or isinstance(libraries, str) else tuple(libraries)
        return cls(tuple(options.ExecutionProviders), kept)


ON_CPU = Runtime()


def open_session(
    model: ir.Model,
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[str] = CPU,
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session of ``model``. The session keeps the arrays it shares with the model alive.

    Args:
        model: Comes back unchanged. Do not write into its arrays while the session runs.
        options: Session options, for this one session only (the weights are attached to them).
        providers: Execution providers, the preferred one first.

    Raises:
        ModelError: ONNX Runtime does not accept the model; the message carries its reason.
    """
    return open_light(Light.of(model), options or quiet_options(), providers)


@dataclass(frozen=True)
class Light:
    """A model as ONNX Runtime gets it.

    Attributes:
        proto: the graph; large weights are names of data that is not there.
        weights: those weights, which share the memory of the model.
        folder: where external data lies that stays in its files.
        files: model files that large weights have stayed in.
    """

    proto: onnx.ModelProto
    weights: dict[str, ir.TensorProtocol]
    folder: Path | None
    files: frozenset[WeightFile] = frozenset()

    @classmethod
    def of(cls, model: ir.Model) -> Light:
        """The form of a model, which comes back unchanged."""
        folder = data_folder(model)
        proto, weights = external_proto(model) if folder is None else file_proto(model, folder)
        tensors = (value.const_value for value in model.graph.initializers.values())
        files = frozenset(tensor.weights for tensor in tensors if isinstance(tensor, InFile))
        return cls(proto, weights, folder, files)

    def check(self) -> None:
        """Raise ``ModelError`` where a model file that weights are in has changed."""
        for file in self.files:
            file.check()

    @classmethod
    def of_file(cls, path: Path) -> Light:
        """The form of a file; its external data stay where they are."""
        return cls(onnx.load(path, load_external_data=False), {}, path.absolute().parent)

    @classmethod
    def of_proto(cls, proto: onnx.ModelProto) -> Light:
        """The form of a protobuf in memory: itself, where it is small enough to be copied."""
        return cls(proto, {}, None) if proto.ByteSize() <= COPIED else cls.of(load(proto))


def open_light(
    light: Light, options: onnxruntime.SessionOptions, providers: Sequence[str]
) -> onnxruntime.InferenceSession:
    """``open_session`` of a model that is in its form for ONNX Runtime already."""
    if light.folder is not None:
        options.add_session_config_entry(_FOLDER, str(light.folder))
    if loses_zeros(light.proto):
        _leave_out(options, _LOSES_ZEROS)
    values = [_shared(tensor) for tensor in light.weights.values()]
    options.add_external_initializers(list(light.weights), values)
    try:
        session = onnxruntime.InferenceSession(_serialized(light.proto), options, providers=list(providers))
    except RUNTIME_ERRORS as error:
        light.check()
        raise ModelError(f"ONNX Runtime does not accept the model: {error}") from error
    light.check()
    _keep_alive(session, values)
    return session


def loses_zeros(proto: onnx.ModelProto) -> str | None:
    """The name of a MaxPool that reads what a Pad makes of values that may be below 0."""
    pools = {node.input[0]: node for node in proto.graph.node if node.op_type == "MaxPool"}
    pads = {node.input[0]: node for node in proto.graph.node if node.op_type == "Pad" and node.output[0] in pools}
    above = {node.output[0] for node in proto.graph.node if pads and node.op_type in ("Relu", "Sigmoid")}
    return next((pools[pad.output[0]].name for given, pad in pads.items() if given not in above), None)


def _leave_out(options: onnxruntime.SessionOptions, optimizer: str) -> None:
    before = ""
    with suppress(RuntimeError):  # nothing is left out yet
        before = options.get_session_config_entry(LEFT_OUT)
    options.add_session_config_entry(LEFT_OUT, ";".join(filter(None, (before, optimizer))))


def _serialized(proto: onnx.ModelProto) -> bytes:
    """The protobuf with an IR version that its opset needs, where it states a later one than runtimes read.

    The package onnx writes its newest version into every model that names none, whatever the opset; ONNX Runtime reads
    that version a release later. Of a field that comes twice a protobuf has the last value.
    """
    version = readable_ir_version(proto)
    return bytes(proto.SerializeToString()) + (b"" if version == proto.ir_version else bytes((0x08, version)))


def quiet_options() -> onnxruntime.SessionOptions:
    """Options that log nothing and have the threads that this process is lent, as every session of ours has them.

    Of a machine that is shared, ONNX Runtime takes as many threads as it has cores, and they keep each other's busy:
    a float ResNet-50 on one core of two then took 61 ms for 37, its int8 form 33 for 12.

    ONNX Runtime's warnings are about speed, or about declared shapes of the user's float model at every inference,
    which bury the verdict; its errors come to us as exceptions.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = process.session_threads()
    return options


def _shared(tensor: ir.TensorProtocol) -> onnxruntime.OrtValue:
    """An ``OrtValue`` on the memory of ``tensor``, copied only where that is not aligned."""
    array = np.require(tensor.numpy(), requirements=("C_CONTIGUOUS", "ALIGNED"))
    if array.dtype.isbuiltin == 1:  # the kind of ml_dtypes' float8_e5m2 is that of NumPy's own floats
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    raw = array.view(f"u{array.dtype.itemsize}")  # bfloat16, float8: types that NumPy itself does not have
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, int(tensor.dtype))


def _keep_alive(session: onnxruntime.InferenceSession, values: Sequence[onnxruntime.OrtValue]) -> None:
    """ONNX Runtime does not own shared memory: hold the arrays until the session is gone."""
    weakref.finalize(session, tuple, values).atexit = False
