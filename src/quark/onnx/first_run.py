"""The first run of a model that is about to be published: what leaves has been checked in full and has run.

    check     onnx.checker in full
    open      a session as a user opens it, with all optimizations of ONNX Runtime
    run       a calibration sample, or a generated one; then, where a size is free, the same sample of another size
    look      the outputs have the shapes that the model declares, and are finite

Where something of it fails, the float model decides: what it cannot do either (a size that its exporter has fixed
inside, infinity for masked scores) is no fault of the quantized one. Not handled: values that are wrong and finite;
they are what ``compare`` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.config.job import Job
from quark.config.options import Options
from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError, ModelError, short_of_memory
from quark.ir.surgery import name_of
from quark.ir.walk import all_nodes
from quark.onnx.data import Remembering, checked, inputs_of, readable_again, samples_of
from quark.onnx.graph.admission import refusal, refusal_of_proto
from quark.onnx.graph.budget import loop_without_count
from quark.onnx.graph.libraries import library_files
from quark.onnx.graph.pieces import WHOLE, Pieces, open_in_pieces
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import run_in_time, unknown_operator
from quark.onnx.graph.session import COPIED, RUNTIME_ERRORS, Light, quiet_options
from quark.onnx.passes.constants import trains
from quark.onnx.passes.fold_constants import RANDOM
from quark.reading import reason_of

Feed = Mapping[str, np.ndarray]
Source = str | Path | onnx.ModelProto
Session: TypeAlias = onnxruntime.InferenceSession | Pieces
#: Elements of all inputs up to which free sizes are doubled for the second run; they are halved above.
DOUBLED_UP_TO = 1 << 21
NAME = "first run"
_FAILURES: tuple[type[Exception], ...] = (*RUNTIME_ERRORS, MemoryError, ModelError)
_HALF = (
    ": float16 ends at 65,504, and the preset BF16 where float32 does; or keep the layers with larger values in float"
)
_NO_MEMORY = "there is not enough memory for it"


@dataclass(frozen=True)
class Original:
    """The float model, opened when it is asked for its opinion.

    Attributes:
        hint: what is told beside an output that is not finite.
        loop: a Loop that nothing but its condition ends.
    """

    source: Source
    options: Options
    large: bool
    hint: str = ""
    loop: ir.Node | None = None

    def run(self, feed: Feed) -> list[np.ndarray] | None:
        """Its outputs; ``None`` where it does not run either."""
        try:
            return _run(_opened(self.source, self.options, self.large), feed, self.loop)
        except _FAILURES:
            return None


def first_sample(reader: object) -> object:
    """The first sample of a reader, which may have been read; ``None`` where there is none."""
    if isinstance(reader, Remembering):
        return next(iter(reader.first()), None)
    return None if reader is None else next(iter(samples_of(reader, 1)), None)


def first_kept(reader: object) -> object:
    """The reader, its first sample kept where it can be read only once."""
    once = reader is not None and not readable_again(reader) and not isinstance(reader, Remembering)
    return Remembering(reader, 1) if once else reader


def first_run(model: ir.Model, draft: Path | onnx.ModelProto, source: Source, reader: object, job: Job) -> str:
    """Check and run a finished model.

    Args:
        model: the finished model, for what it says of itself.
        draft: the same as it will be published: a file, or the protobuf.
        source: the float model.
        reader: the calibration data; generated values serve where there are none, and in modes that read no data.
        job: what was asked for.

    Returns:
        "" where it ran, otherwise why it was not run.

    Raises:
        ModelError: the model is not valid, or does not do what the float model does.
    """
    options = job.options
    if (reason := _refusal(model, draft, bool(options.UserCustomOpLibPath))) is not None:
        raise ModelError(f"the quantized model is not published: it fails onnx.checker: {reason}")
    large = len(model.graph) > WHOLE
    default = job.rules.default
    half = any(spec is not None and spec.row.onnx_type == "FLOAT16" for spec in (default.inputs, default.weight))
    original = Original(source, options, large, _HALF if half else "", loop_without_count(model))
    if (unknown := unknown_operator(model, options.UserCustomOpLibPath)) is not None:
        return str(unknown)
    feed = tried_on(model, reader, job)
    if isinstance(feed, str):
        return feed
    try:
        session = _opened(draft, options, large)
    except _FAILURES as error:
        return _theirs_too(error, original, feed, "ONNX Runtime does not open it", "here")
    why, other = _tried(session, model, feed, original), other_size(model, feed)
    if not why and other is not None:
        _tried(session, model, other, original)  # a size that cannot be tried says nothing of the first
    return why


def _theirs_too(error: Exception, original: Original, feed: Feed, what: str, where: str) -> str:
    """Why a failure says nothing of the quantized model.

    Raises:
        ModelError: the float model runs.
    """
    if short_of_memory(error):
        return _NO_MEMORY
    if original.run(feed) is None:
        return f"ONNX Runtime does not run the float model {where} either: {reason_of(error)}"
    raise ModelError(f"the quantized model is not published: {what}: {reason_of(error)}") from error


def _refusal(model: ir.Model, draft: Path | onnx.ModelProto, custom: bool) -> str | None:
    """Why the full checker refuses a draft; of a file, or a large one, the graph is asked.

    ``save`` has had the bytes of a file checked, and no shape follows from a large weight: to write and to read all of
    them once more takes longer than the check.
    """
    if isinstance(draft, Path) or draft.ByteSize() > COPIED:
        return refusal(model, custom)
    made = onnx.ModelProto()
    made.CopyFrom(draft)
    return refusal_of_proto(made, custom)


def tried_on(model: ir.Model, reader: object, job: Job) -> Feed | str:
    """A calibration sample, or a generated one (in modes that read no data always), or why there is none."""
    options, inputs = job.options, inputs_of(model)
    sample = first_sample(reader) if job.mode == "static" else None
    try:
        if sample is not None:
            return next(checked([sample], inputs))
        from quark.onnx.random_data import RandomDataReader

        shapes, ranges = options.RandomDataReaderInputShape, options.RandomDataReaderInputDataRange
        return RandomDataReader(model, shapes, ranges).get_next() or {}
    except (DataError, ConfigError) as error:
        return f"there is no sample for it: {error}"


def _opened(model: Path | Source, options: Options, large: bool) -> Session:
    """A session as a user has it: all optimizations on; of a very large graph, a session for every piece."""

    def chosen() -> onnxruntime.SessionOptions:
        found = quiet_options()
        for library in library_files(options.UserCustomOpLibPath):
            found.register_custom_ops_library(library)
        return found

    if large or isinstance(model, onnx.ModelProto):
        light = Light.of_proto(model) if isinstance(model, onnx.ModelProto) else Light.of_file(Path(model))
        return open_in_pieces(light, chosen, options.ExecutionProviders)
    return onnxruntime.InferenceSession(str(model), chosen(), providers=list(options.ExecutionProviders))


def _run(session: Session, feed: Feed, loop: ir.Node | None) -> list[np.ndarray]:
    known = {one.name for one in session.get_inputs()}
    return run_in_time(session, None, {name: array for name, array in feed.items() if name in known}, loop)


def _tried(session: Session, model: ir.Model, feed: Feed, original: Original) -> str:
    """Run one sample; "" or why nothing can be said.

    Raises:
        ModelError: the model fails where the float model does not.
    """
    given = ", ".join(f"{name!r} {array.dtype} {list(array.shape)}" for name, array in feed.items())
    try:
        found = _run(session, feed, original.loop)
    except DataError as error:
        return f"{error} (on {given})"
    except _FAILURES as error:
        return _theirs_too(error, original, feed, f"it does not run on {given}", f"on {given}")
    odd = [str(value.name) for value, array in zip(model.graph.outputs, found, strict=True) if _is_odd(value, array)]
    if odd:
        _compare(odd, found, [str(value.name) for value in model.graph.outputs], original, feed, given)
    return ""


def _is_odd(value: ir.Value, array: object) -> bool:
    """Whether an output has values or a shape that need an explanation."""
    if not isinstance(array, np.ndarray):
        return False
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return True
    shape = value.shape
    if shape is None:
        return False
    pairs = zip(shape, array.shape, strict=False)
    return len(shape) != array.ndim or any(isinstance(size, int) and size != own for size, own in pairs)


def _compare(
    odd: Sequence[str], found: Sequence[np.ndarray], names: Sequence[str], original: Original, feed: Feed, given: str
) -> None:
    """Raise where an odd output is not odd in the float model."""
    for name, ours, theirs in zip(names, found, original.run(feed) or found, strict=True):
        if name not in odd:
            continue
        if np.shape(ours) != np.shape(theirs):
            raise ModelError(
                f"the quantized model is not published: its output {name!r} has the shape {list(np.shape(ours))} on "
                f"{given}, and that of the float model {list(np.shape(theirs))}"
            )
        lost = int(np.isfinite(theirs).sum()) - int(np.isfinite(ours).sum())
        if lost > 0:
            raise ModelError(
                f"the quantized model is not published: its output {name!r} is not finite in {lost} of {ours.size} "
                f"places on {given}, where that of the float model is{original.hint}"
            )


def other_size(model: ir.Model, feed: Feed) -> Feed | None:
    """The sample with its free sizes doubled, or halved where it is large; ``None`` where no size is free.

    Axes behind the first are taken where one of them is free; a free batch alone is doubled. All free sizes change
    alike, so that sizes which follow from each other still do.
    """
    free = {
        str(value.name): [axis for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)]
        for value in model.graph.inputs
        if value.name in feed and feed[str(value.name)].ndim == len(value.shape or ())
    }
    inner = {name: [axis for axis in axes if axis] for name, axes in free.items()}
    axes = inner if any(inner.values()) else free
    if not any(axes.values()):
        return None
    large = sum(array.size for array in feed.values()) > DOUBLED_UP_TO
    sized: Callable[[np.ndarray, int], np.ndarray] = _halved if large else _doubled
    made = dict(feed)
    for name, chosen in axes.items():
        for axis in chosen:
            made[name] = sized(made[name], axis)
    return made


def _doubled(array: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate([array, array], axis)


def _halved(array: np.ndarray, axis: int) -> np.ndarray:
    return np.ascontiguousarray(array.take(range((array.shape[axis] + 1) // 2), axis))


def told(reason: str, model: ir.Model) -> PassReport:
    """The line of the summary, and one where the model draws random numbers: figures of it say nothing."""
    said = [f"not run: {reason}"] if reason else []
    if draws := next(filter(_is_random, all_nodes(model)), None):
        why = "the float model's outputs, too, differ from run to run, and figures of accuracy say nothing"
        cure = "; export the model for inference" if draws.op_type == "Dropout" else ""
        said.append(f"random numbers: {name_of(draws)!r} ({draws.op_type}) draws them; {why}{cure}")
    return PassReport(NAME, 0 if reason else 1, tuple(said))


def _is_random(node: ir.Node) -> bool:
    """Whether a node draws numbers, other ones in every run."""
    return not node.domain and (node.op_type in RANDOM or (node.op_type == "Dropout" and trains(node)))
