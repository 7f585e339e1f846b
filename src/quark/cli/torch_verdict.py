"""The last lines of ``quark torch quantize``, ``quantize-files`` and ``convert``: is it good, and what to type now.

Accuracy is the perplexity before over the one after, against the limits that answers have elsewhere (``KEPT``); where a
file holds the values less exactly than they were evaluated, that loss counts too. Where nothing was measured, it says
so, with the command that measures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.cli.extensions import command_line
from quark.cli.output import print_json, say, show, write_lines
from quark.cli.torch_request import FolderJob
from quark.config.file_formats import PROGRAMS, row_of
from quark.report import Table, file_size
from quark.report.verdict import KEPT, LEVELS, Line, Verdict, coverage_line, size_line

NOTE = re.compile(r"\((.*)\)$")  # of a row of the table of formats: what is to be known
ARCHITECTURES = "where they have this architecture"
FILE_LOSS = (0.10, 0.01)
"""Of the norm of the evaluated weights, from which a file is lost, and up to which it is good."""
WITH_DATA = "`quark torch quantize` with --data TEXT measures the perplexity before and after"
MEASURES = {  # by the format, where ``quark torch evaluate`` does not load it
    "gguf": "llama-perplexity -m {output}/*.gguf -f TEXT",
    "onnx": WITH_DATA,
    "modelopt": WITH_DATA,
}


def tell(request: FolderJob, facts: dict[str, Any], json: bool) -> None:
    """The facts and the verdict, as a table and lines or as one object."""
    found = verdict(request, facts)
    if json:
        print_json(facts | {"verdict": found.facts()})
        return
    rows = [("output", str(request.output)), ("scheme", facts["scheme"]), ("format", facts["format"])]
    rows += [("source", f"{facts['decoded_from']}, decoded")] if "decoded_from" in facts else []
    rows += carried_rows(facts)
    if "quantized_layers" in facts:
        rows.append(("quantized layers", str(facts["quantized_layers"])))
        rows.append(("stay float", ", ".join(facts["excluded"][:6]) + (", …" if len(facts["excluded"]) > 6 else "")))
    if "file_loss" in facts:
        rows.append(("loss of the file", f"{facts['file_loss']:.2g} of the norm of the evaluated weights"))
    if whole := facts.get("kept_as_f32"):
        named = ", ".join(whole[:3]) + (", …" if len(whole) > 3 else "")
        rows.append(("kept as F32", f"{len(whole)} tensors whose scales float16 does not hold: {named}"))
    rows.append(("seconds", f"{facts['seconds']:.1f}"))
    show(Table("Written", ("fact", "value"), tuple(rows)))
    if facts.get("unreached"):
        say(f"No sample reached {', '.join(facts['unreached'])}; they stay float.")
    write_lines(found.words())


def carried_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of the codes of a source that was quantized before."""
    if "carried_over" not in facts:
        return []
    kept, anew = facts["carried_over"], facts["quantized_again"]
    return [
        ("codes", f"{kept} layers carried over unchanged, {anew} quantized again"),
        ("loss to the source", f"{facts['loss_to_source']:.2g} of the norm of its quantized weights"),
    ]


def verdict(request: FolderJob, facts: Mapping[str, Any]) -> Verdict:
    """What holds for the folder that was written, and the next command."""
    accuracy, size = accuracy_of(facts), size_line(facts["bytes_before"], facts["bytes_after"])
    lines = [accuracy, size]
    if "weights_quantized" in facts:
        left = [f"{name} ({file_size(bytes)})" for name, bytes in facts["largest_in_float"]]
        lines.append(coverage_line(None, facts["weights_quantized"], left))
    lines += [*cache_lines(facts), *reader_lines(facts)]
    return Verdict(tuple(lines), (following(request, facts, accuracy),))


def cache_lines(facts: Mapping[str, Any]) -> list[Line]:
    """That the cache is float again, which was quantized in the source."""
    if "cache_left_float" not in facts:
        return []
    typed = f"quark torch quantize --kv-cache {facts['cache_left_float']} --data TEXT"
    return [Line("cache", "float", f"the source has a quantized KV cache; `{typed}` quantizes it again", bad=True)]


def reader_lines(facts: Mapping[str, Any]) -> list[Line]:
    """Which programs read the file, what is to be known of it, and why others do not; none where nobody has tried."""
    names, others = facts.get("readers", ()), facts.get("not_for", {})
    if not names and not others:
        return []
    schemes = facts["schemes"] if "schemes" in facts else facts["scheme"].split(", ")
    rows = [row_of(scheme, facts["format"], name) for scheme in schemes for name in names]
    notes = {row.program: NOTE.search(row.shown_by) for row in rows if row is not None}
    said = [f"{PROGRAMS[name].title} {found[1]}" for name, found in notes.items() if found]
    for title, why in ((PROGRAMS[name].title, why.partition("; ")[0]) for name, why in others.items()):
        said.append(why if why.startswith(title) else f"{title}: {why}")
    titles = ", ".join(PROGRAMS[name].title for name in names) or "no program"
    return [Line("readers", titles, "; ".join(said) or ARCHITECTURES, bad=not names)]


def accuracy_of(facts: Mapping[str, Any]) -> Line:
    """The worst of what was measured."""
    if "perplexity_before" in facts:
        before, after = facts["perplexity_before"], facts["perplexity_after"]
        level = sum(before >= limit * after for limit in KEPT)
        said = f"perplexity {before:.4f} → {after:.4f}, {100 * (after / before - 1):+.1f} % (the calibration data)"
    elif facts.get("unchanged"):
        level, said = 2, "the codes of the source, unchanged"
    elif facts.get("file_loss", 0.0) <= FILE_LOSS[1]:
        return Line("accuracy", "not measured", "no perplexity was taken", bad=True)
    else:
        level, said = 2, "no perplexity was taken"
    if "file_loss" in facts:
        level = min(level, sum(facts["file_loss"] <= limit for limit in FILE_LOSS))
        said += f"; the file holds the evaluated weights but for {100 * facts['file_loss']:.2g} % of their norm"
    return Line("accuracy", LEVELS[level], said, bad=level < 2)


def following(request: FolderJob, facts: Mapping[str, Any], accuracy: Line) -> str:
    """The command that makes sense now."""
    data = request.source.data
    if accuracy.word == "not measured" or facts.get("unchanged"):
        others, output = MEASURES.get(facts["format"]), str(request.output)
        evaluate = command_line(["quark", "torch", "evaluate", output, "--data", "TEXT"])
        return evaluate if others is None else others.format(output=shlex.quote(output))
    if accuracy.bad and data is not None:
        words = ["quark", "auto", str(request.model), "--data", str(data), "--for", purpose_of(request, facts)]
        return f"try what else this program reads: {command_line([*words, '-o', f'{request.output}-auto'])}"
    return f"{request.output / 'README.md'} says how each program loads it"


def purpose_of(request: FolderJob, facts: Mapping[str, Any]) -> str:
    """The program that the folder is for, in the words of ``quark auto --for``."""
    from quark.torch.auto import PURPOSES

    program = request.program or next((one.name for one in PROGRAMS.values() if one.format == facts["format"]), None)
    return next((purpose for purpose, name in PURPOSES.items() if name == program), "transformers")


def largest(names: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The largest of what stays float, by name and bytes."""
    return sorted(names.items(), key=lambda one: -one[1])[:count]


def coverage_of(quantized: Mapping[str, int], others: Mapping[str, int]) -> dict[str, Any]:
    """Facts from bytes, in the float type, of the tensors that are stored as codes, and of the others."""
    total = sum(quantized.values()) + sum(others.values())
    return {"weights_quantized": sum(quantized.values()) / max(total, 1), "largest_in_float": largest(others)}


def sizes(folders: Sequence[Path], patterns: Sequence[str]) -> tuple[int, ...]:
    """Bytes of the tensor files in each folder."""
    return tuple(sum(path.stat().st_size for one in patterns for path in folder.glob(one)) for folder in folders)
