"""``quark torch plan`` and ``quark torch explain``: what a quantization of a checkpoint would do, and why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quark.cli.output import print_json, say, show, write_text
from quark.cli.torch_quantize import checked_format, chosen_values
from quark.cli.torch_refusals import check_folder, check_model, check_names, check_reader, typed_schemes
from quark.cli.torch_request import Explained, Predicted
from quark.errors import printable
from quark.report import Table, duration, file_size
from quark.report.process import memory
from quark.report.summary import decision_table, rule_table
from quark.torch.files.headers import FolderUse

if TYPE_CHECKING:
    from quark.config.plan import Plan
    from quark.torch.forecast import TorchForecast


def run(request: Predicted) -> None:
    """Decide about every tensor, and say what comes out; only ``--plan`` is written."""
    start = time.process_time()
    values, found = decided(request, request.samples, request.seq_len, request.batch_size, request.workers)
    seconds = found.seconds + time.process_time() - start  # the job imports and decides as this command has done
    if request.plan is not None:
        write_text(found.plan.to_json(), request.plan)
    readers = list(readers_of(values))
    if request.json:
        print_json(facts(request, found, seconds, readers))
        return
    show(type_table(found.plan))
    show(rule_table(found.plan))
    if request.tensors:
        show(decision_table(found.plan))
    show(float_table(found.plan))
    show(cost_table(request, found, seconds))
    show(
        Table(
            "Who reads it", ("program", "formats"), tuple((name, ", ".join(kinds) or "none") for name, kinds in readers)
        )
    )
    needs = " It needs samples: give a text with --data." if found.samples else ""
    files = ", as does `quantize-files`" if found.by_files else " (file by file it cannot be done)"
    say(f"No weight was read.{needs} `quark torch quantize` with the same options does it{files}.")
    if found.by_files and (here := memory()) is not None and found.needs.memory > here:
        fewer = "; fewer or shorter windows (--samples, --seq-len, --batch-size) take less" if found.samples else ""
        say(f"`quantize-files` takes {file_size(found.needs.memory)} of memory, and here are {file_size(here)}{fewer}.")


def run_explain(request: Explained, name: str, json: bool) -> None:
    """Say why one layer or tensor becomes what it becomes."""
    lines = decided(request)[1].plan.explain(name)
    if json:
        print_json({"model": request.model, "name": name, "because": lines.splitlines()})
        return
    print(printable(lines))


def decided(request: Explained, *windows: int) -> tuple[dict[str, Any], TorchForecast]:
    """Keys and values of the configuration, and what it means for the checkpoint; ``windows``: of ``forecast``."""
    check_folder(request.model)
    check_names(request.scheme, request.kv_cache, request.layers)
    typed = typed_schemes(request.scheme, request.layers)
    check_reader(typed, request.kv_cache, request.format, request.program)
    values = chosen_values(request)
    format = checked_format(request, values)
    check_model(request.model, FolderUse(float=True), values, (), format, request.program)
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.export.write_as import config_for
    from quark.torch.files.prequantized import check_float
    from quark.torch.files.skeleton import float_type, read_skeleton
    from quark.torch.forecast import forecast
    from quark.torch.from_values import config_of

    check_float(request.model)
    checkpoint = read_checkpoint(request.model)
    model = read_skeleton(checkpoint).model
    config = config_for(config_of(values, model), format, request.program, float_type(checkpoint))
    if request.format or request.program:
        check_before_work(model, config, format, request.program, request.model)
    return values, forecast(checkpoint, config, *windows)


def readers_of(values: dict[str, Any]) -> Iterable[tuple[str, list[str]]]:
    """Every program, and the formats in which it reads all schemes of a configuration."""
    from quark.config.file_formats import FORMATS, PROGRAMS, works
    from quark.torch.config_file import schemes_of

    schemes = list(schemes_of(values))
    for program in PROGRAMS.values():
        kinds = [name for name in FORMATS if schemes and all(works(one, name, program.name) for one in schemes)]
        yield program.title, kinds


def facts(
    request: Predicted, found: TorchForecast, seconds: float, readers: Iterable[tuple[str, list[str]]]
) -> dict[str, Any]:
    """The same as data, for ``--json``."""
    plan = found.plan
    return {
        "model": request.model,
        "bytes": {"float": found.float_bytes, "predicted": found.needs.written, "largest_tensor": found.largest},
        "peak_bytes": found.needs.memory,
        "temporary_bytes": found.needs.temporary,
        "seconds": seconds,
        "needs_samples": found.samples,
        "windows": windows_of(request) if found.samples else None,
        "readers": dict(readers),
        "tensors": {t.name: {"role": t.role, "spec": t.spec.describe(), "reason": t.reason} for t in plan},
        "layers": {
            n.name: {"type": n.op_type, "quantized": n.quantized, "reason": n.reason} for n in plan.nodes.values()
        },
    }


def type_table(plan: Plan) -> Table:
    """How many tensors of each kind become what."""
    counted = Counter((tensor.role, tensor.spec.describe()) for tensor in plan)
    return Table(
        "What becomes of it", ("tensor", "data type", "count"), tuple((*key, str(n)) for key, n in counted.items())
    )


def float_table(plan: Plan) -> Table:
    """Layers that stay float, by the reason."""
    counted = Counter((node.op_type, node.reason) for node in plan.nodes.values() if not node.quantized)
    return Table("Stays float", ("layer", "because", "count"), tuple((*key, str(n)) for key, n in counted.items()))


def windows_of(request: Predicted) -> dict[str, int]:
    """The samples for which memory, disk and time are told."""
    return {"samples": request.samples, "seq_len": request.seq_len, "batch_size": request.batch_size}


def cost_table(request: Predicted, found: TorchForecast, seconds: float) -> Table:
    """Sizes of the files, and what ``quantize-files`` takes."""
    needs = found.needs
    at_once = f", {request.workers} workers" if request.workers > 1 else ""
    rows = (
        ("tensors now", file_size(found.float_bytes)),
        ("tensors then (format quark)", file_size(needs.written)),
        ("against now", f"{found.float_bytes / max(needs.written, 1):.1f}×"),
        (f"memory of quantize-files{at_once}", file_size(needs.memory)),
        ("disk beside the result meanwhile", file_size(needs.temporary)),
        ("time of quantize-files here", duration(seconds)),
    )
    windows = f"{request.samples} windows of {request.seq_len} tokens, {request.batch_size} at once"
    data = (("with samples (--samples, --seq-len, --batch-size)", windows),) if found.samples else ()
    return Table("Predicted", ("what", "how much"), rows + data if found.by_files else rows[:3])
