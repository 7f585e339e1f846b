"""``quark.auto``: the best quantized form of a model, ONNX or torch, proved on samples that decided nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.errors import ConfigError
from quark.files.outputs import check_outputs, drafts
from quark.files.private import private_folder
from quark.search.function import digest_of_code

if TYPE_CHECKING:
    from quark.onnx.trials import OnnxOutcome
    from quark.torch.auto import TorchOutcome


def auto(
    model: Any,
    samples: Iterable[Any],
    output: str | os.PathLike[str] | None = None,
    purpose: str | None = None,
    drop: float | None = None,
    metric: Callable[[Any], Any] | None = None,
    minutes: float = 10.0,
    ledger: str | os.PathLike[str] | None = None,
    workers: int = 1,
    custom_ops: str | os.PathLike[str] | None = None,
    exclude: Sequence[str] = (),
) -> OnnxOutcome | TorchOutcome:
    """Try what an expert would try, choose, and judge the winner on samples that decided nothing.

    Args:
        model: the path of an .onnx file; or a torch model, or the folder of one. It is not changed.
        samples: feeds ``{input name: array}`` of an ONNX model; what a torch model is called with.
        output: where the winner is written: an .onnx file, or a new folder. A torch model that is not from a folder is
            quantized again from ``winner.values``.
        purpose: "cpu", "npu" or "size" for ONNX; "vllm", "llama.cpp", "genai" or "transformers" for torch.
        drop: the part of the metric that may be lost.
        metric: your function, path of an ONNX model (or torch model) → number, or one for each sample, larger is
            better.
        minutes: for all trials.
        ledger: a JSON file that keeps finished trials; after a kill the same call goes on from there. It belongs to the
            model, the samples, and the name and code of ``metric`` (not to what that calls).
        workers: recipes of an ONNX model that are compared at once, in processes.
        custom_ops: a library with custom operators of an ONNX model, or a folder of some.
        exclude: nodes of an ONNX model that stay in float, by name or ``^regular expression``.

    Returns:
        The outcome: ``solved``, ``winner``, ``trials``, ``reported``, ``notes``.

    Raises:
        ConfigError, DataError, ModelError: nothing can be tried at all, or an output that cannot be written.
    """
    wanted: dict[str, Any] = {
        "drop": drop,
        "metric": metric,
        "seconds": 60 * minutes,
        "identity": digest_of_code(metric),
    }
    wanted["ledger"] = None if ledger is None else Path(ledger)
    if isinstance(model, (str, os.PathLike)) and not Path(model).is_dir():
        own: dict[str, Any] = {"purpose": purpose or "cpu", "workers": workers, "exclude": tuple(exclude)}
        own["libraries"] = None if custom_ops is None else os.fspath(custom_ops)
        return _onnx(Path(model), samples, output, {**own, **wanted})
    if custom_ops is not None:
        raise ConfigError(f"custom_ops is {str(custom_ops)!r}: operators of one's own are for ONNX models")
    if exclude:
        raise ConfigError(f"exclude is {list(exclude)}: it names nodes of ONNX models")
    if workers != 1:
        raise ConfigError(f"workers is {workers}: a torch model is quantized in place, one trial after the other")
    return _torch(model, samples, output, {"purpose": purpose or "transformers", **wanted})


def _onnx(model: Path, samples: Iterable[Any], output: Any, wanted: dict[str, Any]) -> OnnxOutcome:
    from quark.onnx.auto import auto as search
    from quark.onnx.data_layout import as_reader
    from quark.onnx.graph.model import inputs_of_model, output_of
    from quark.onnx.trial_files import write_model
    from quark.onnx.trials import OnnxGoal
    from quark.search.parts import split

    outputs = {} if output is None else {"model": output_of(Path(output))}
    check_outputs(outputs.values(), inputs_of_model(model, "the float model"))
    goal = OnnxGoal(**wanted)
    with private_folder() as folder:
        found = search(model, split(list(as_reader(model, samples))), goal, folder)
        with drafts(outputs) as paths:
            for path in paths.values():
                write_model(found.winner.path or model, path)
        return found


def _torch(model: Any, samples: Iterable[Any], output: Any, wanted: dict[str, Any]) -> TorchOutcome:
    from quark.search.parts import split
    from quark.torch.auto import TorchGoal, write
    from quark.torch.auto import auto as search
    from quark.torch.language import load_model

    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    if output is not None and source is None:
        raise ConfigError("output: a torch model is written from its folder; give the folder instead of the model")
    loaded, given = model if source is None else load_model(source), list(samples)
    goal = TorchGoal(**wanted)
    found = search(loaded, given, goal, source=source if output is not None else None)
    if output is not None and source is not None:
        write(loaded, found, split(given).fit, Path(output), source, goal.program)
    return found
