"""The whole table: every model type that builds, in every scheme and format; `make consumers` runs it.

    python tests/consumers/run.py [--types llama,mixtral] [--schemes int4_wo_32,fp8] [--formats quark] [--again]

Results are kept in ``tests/consumers/results.json``; what is right or only imported there is run again with ``--again``
only. The page ``docs/compatibility.md`` is written from them. It ends with 1 where a cell is neither right nor refused,
or was right before and is not now.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "compatibility.md"
SCHEMES, FORMATS = "int4_wo_32,fp8,mxfp4,int8_wo_per_channel", "quark,compressed-tensors"
LIBRARIES = ("transformers", "torch", "compressed-tensors")
DONE = ("right", "import")
SOUND = (*DONE, "refused")
LONG = 160


def main() -> int:
    """Fill the table and write the page."""
    parser = argparse.ArgumentParser()
    for name, default in (("--types", ""), ("--schemes", SCHEMES), ("--formats", FORMATS)):
        parser.add_argument(name, default=default)
    parser.add_argument("--again", action="store_true")
    chosen = parser.parse_args()
    sys.path.insert(0, str(HERE))
    import cell
    import tiny
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before, wanted = dict(results), {name for name in chosen.types.split(",") if name}
    cells = [(scheme, form) for form in chosen.formats.split(",") for scheme in chosen.schemes.split(",")]
    for name, cls in tiny.model_types():
        keys = [key for key in cells if chosen.again or results.get(key_of(name, *key), {}).get("cell") not in DONE]
        if keys and (not wanted or name in wanted):
            results |= filled(cell, tiny, name, cls, keys)
            RESULTS.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    PAGE.write_text(page(results), encoding="utf-8")
    worse = [key for key, value in results.items() if is_worse(value, before.get(key))]
    for key in worse:
        print(f"{key}: {results[key]['cell']}: {reason(results[key])}", file=sys.stderr)
    return int(bool(worse))


def is_worse(now: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Whether a cell is wrong, or no longer right."""
    return now["cell"] not in SOUND or (before is not None and before["cell"] == "right" != now["cell"])


def key_of(name: str, scheme: str, form: str) -> str:
    """The key of a cell."""
    return f"{name}/{scheme}:{form}"


def filled(cell: Any, tiny: Any, name: str, cls: str, keys: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The cells of one architecture; nothing of one that has no small model that answers, which is told."""
    try:
        model = tiny.tiny_model(name, cls, checked=True)
        inputs = tiny.inputs_of(model)
    except Exception as error:
        print(f"{name}: no cells: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
    return {key_of(name, *key): kept(cell.check(model, *key, inputs, tiny.answer)) for key in keys}


def kept(found: dict[str, Any]) -> dict[str, Any]:
    """What a table needs of a cell, and the day."""
    told = {name: found[name] for name in ("cell", "stage", "why", "import", "error", "cost") if name in found}
    return {**told, "run": str(datetime.date.today())}


def page(results: dict[str, Any]) -> str:
    """The page of documents."""
    columns = sorted({key.split("/")[1] for key in results})
    names = sorted({key.split("/")[0] for key in results})
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    lines = [
        "# Compatibility",
        "",
        "Written by `make consumers`. Every model type of transformers that builds a small random model is quantized,",
        "exported, loaded by the program that the format is for, and compared with the model that was evaluated: each",
        "weight, and the logits (relative error, their mean removed). *right* is within 1e-3. *import*: transformers",
        "cannot read this model in this format, so it is refused for it; what is written for vLLM (`--for vllm`) is",
        "right in our own import (`quark torch convert`). *refused* names in one sentence what does not fit, before",
        "anything is written.",
        "",
        f"{len(names)} architectures: those whose float files transformers reads as it wrote them. Read by",
        f"{versions}; the formats are those before the programs: `scheme:format`. Run on {days(results)}.",
        "",
        *table(["cell", *columns], counts(results, columns)),
        "",
        *table(["architecture", *columns], [row(name, results, columns) for name in names]),
        "",
    ]
    reasons = {key: value for key, value in results.items() if value["cell"] != "right"}
    if reasons:
        rows = [[f"`{key}`", value["cell"], reason(value)] for key, value in sorted(reasons.items())]
        lines += ["## What is not right", "", *table(["cell", "is", "because"], rows), ""]
    return "\n".join(lines)


def days(results: dict[str, Any]) -> str:
    """The days on which cells were run last, and which architectures."""
    found: dict[str, set[str]] = {}
    for key, value in results.items():
        found.setdefault(value["run"], set()).add(key.split("/")[0])
    parts = [f"{day} ({len(found[day])} architectures)" for day in sorted(found, reverse=True)]
    return ", ".join(parts)


def row(name: str, results: dict[str, Any], columns: Iterable[str]) -> list[str]:
    """The line of an architecture."""
    return [f"`{name}`", *(text(results.get(f"{name}/{column}")) for column in columns)]


def reason(value: dict[str, Any]) -> str:
    """Why a cell is not right, in one line."""
    return " ".join(str(value.get("why") or f"error {value.get('error', 0):.3g}").split())[:LONG].replace("|", "/")


def counts(results: dict[str, Any], columns: Iterable[str]) -> list[list[str]]:
    """How many cells are what."""
    kinds = ("right", "import", "refused", "differs", "silent", "crash")
    found = {column: Counter(v["cell"] for k, v in results.items() if k.endswith(f"/{column}")) for column in columns}
    return [[kind, *(str(found[column][kind]) for column in columns)] for kind in kinds]


def text(value: dict[str, Any] | None) -> str:
    """A cell in a word."""
    if value is None:
        return "–"
    return f"right ({value['error']:.0e})" if value["cell"] == "right" and value["error"] else str(value["cell"])


def table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
