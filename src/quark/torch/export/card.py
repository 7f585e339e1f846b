"""The model card of a quantized model: ``README.md``, above the card of the model that it was made from.

What is said is what was done and measured: base model, scheme, calibration, perplexity, size, and for each program
that reads the scheme in this format (``format_table.tsv``) how it is loaded. The facts at the head of the source's card
(licence, language, tags) stay at the head of ours; licence files are copied.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from quark import __version__
from quark.config.file_formats import ANY, FORMATS, PROGRAMS, row_of
from quark.dataclass import dataclass
from quark.errors import printable
from quark.files.folder import new_folder
from quark.reading import read_object
from quark.report import file_size
from quark.torch.export.checkpoint import SUFFIX, weight_files
from quark.torch.export.in_turn import is_joined
from quark.torch.export.model_files import is_copied, name_inside
from quark.torch.export.oldest_transformers import OLDEST

CARD = "README.md"
UNJOINED = "gate and up of its experts are one tensor here, as vLLM reads them; `quark torch convert` takes them apart"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
PLAIN = re.compile(r"[A-Za-z][\w./-]*")  # a name that YAML takes for words without quotes
OWN = ("base_model", "library_name", "base_model_relation")  # keys of the head that are ours
LOAD = {
    "vllm": "```sh\nvllm serve {folder}\n```",
    "transformers": (
        "```python\nfrom transformers import {loader}\n\n"
        'model = {loader}.from_pretrained("{folder}"{more}, dtype="auto")\n```'
    ),
    "llama.cpp": "```sh\nllama-server -m {folder}/{file}\n```",
    "onnxruntime-genai": '```python\nimport onnxruntime_genai\n\nmodel = onnxruntime_genai.Model("{folder}")\n```',
}


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        base: name of the model that was quantized.
        scheme: name of the scheme.
        words: what the scheme does to weights and inputs.
        format: a key of ``FORMATS``.
        floats: layers that stay float.
        calibration: the data, or None.
        windows: how many windows of it were used.
        perplexity: before and after, or None.
        bytes: of the tensors before and after.
        not_for: programs that read the scheme in this format, but not this model, and why.
        readers: programs that read it, where the scheme is none of the table of formats.
    """

    base: str
    scheme: str
    words: str
    format: str
    floats: tuple[str, ...]
    calibration: str | None
    windows: int
    perplexity: tuple[float, float] | None
    bytes: tuple[int, int]
    not_for: Mapping[str, str] = field(default_factory=dict)
    readers: tuple[str, ...] = ()


def write_card(folder: Path, source: Path, card: Card) -> None:
    """Write ``README.md`` into ``folder``, and copy the licence files of ``source``; what is there stays."""
    above = source / CARD  # quoted, not read
    original = above.read_text("utf-8", "replace") if above.is_file() and is_copied(above) else ""
    with new_folder(folder, beside=True, begun=True) as draft:
        for path in sorted(path for pattern in LICENCES for path in source.glob(pattern)):
            if path.is_file() and is_copied(path):
                shutil.copyfile(path, draft / path.name)
        (draft / CARD).write_text(text_of(card, original, folder), encoding="utf-8")


def text_of(card: Card, original: str, folder: Path) -> str:
    """The card, and the original one below."""
    found = HEAD.match(original)
    kept = without_own(found[1]) if found else ""
    body = original[found.end() :] if found else original
    base = card.base if PLAIN.fullmatch(card.base) else json.dumps(card.base)
    head = f"---\n{kept}base_model: {base}\nbase_model_relation: quantized\n---\n"
    below = f"\n---\n\nThe card of {in_a_line(card.base)}:\n\n{body.strip()}\n" if body.strip() else ""
    return f"{head}\n# {in_a_line(folder.name)}\n\n{facts(card)}\n## Use\n\n{uses(card, folder)}{below}"


def in_a_line(name: str) -> str:
    """The name of a folder, which may be a stranger's, as words of one line of Markdown."""
    return html.escape(" ".join(printable(name).split()), quote=False).replace("|", "\\|")


def without_own(head: str) -> str:
    """The lines of a head without the keys that are ours and what belongs to them."""
    lines, skipping = [], False
    for line in head.splitlines():
        if not line.startswith((" ", "-")):
            skipping = line.split(":")[0].strip() in OWN
        if not skipping:
            lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def facts(card: Card) -> str:
    """A table of what was done."""
    before, after = card.bytes
    floats = ", ".join(f"`{name}`" for name in card.floats[:12]) + (", …" if len(card.floats) > 12 else "")
    measured = card.perplexity and f"{card.perplexity[0]:.4f} → {card.perplexity[1]:.4f} (of the calibration data)"
    rows: Mapping[str, str | None] = {
        "base model": in_a_line(card.base),
        "scheme": f"`{card.scheme}`: {card.words}",
        "format": FORMATS[card.format].title,
        "stay float": floats,
        "calibration": f"{card.calibration}, {card.windows} window{'s' * (card.windows != 1)}"
        if card.calibration
        else None,
        "perplexity": measured,
        "size": f"{file_size(before)} → {file_size(after)}",
        "made with": f"openquark {__version__}",
    }
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)


def uses(card: Card, folder: Path) -> str:
    """How each program that reads the model loads it; and those that open such files, and do not read this one."""
    file = min((path.name for path in folder.glob("*.gguf")), default="")
    more = f', gguf_file="{file}"' if file else ""
    given = {"folder": folder.name, "file": file, "more": more, "loader": loader_of(folder)}
    made: list[str] = []
    unread: list[str] = []
    not_for = dict(card.not_for)
    if any(folder.glob(f"*{SUFFIX}")) and is_joined(name for names in weight_files(folder).values() for name in names):
        not_for["transformers"] = UNJOINED
    for name, program in PROGRAMS.items():
        row = row_of(card.scheme, card.format, name)
        if name in not_for:
            unread.append(f"Not for {program.title}: {not_for[name]}.")
        elif name in card.readers or (row is not None and row.works):
            since = f" {OLDEST} or newer" if name == "transformers" else ""
            shown = "" if row is None else f" ({row.shown_by})"
            made.append(f"{program.title}{since}{shown}:\n\n" + LOAD[name].format(**given))
        elif row is not None and row.scheme != ANY:
            unread.append(f"Not for {program.title}: {row.shown_by}.")
    if card.format == "quark":
        code = f'model = import_model_from_safetensors(None, "{folder.name}")'
        made.append(f"openquark:\n\n```python\nfrom quark.torch import import_model_from_safetensors\n\n{code}\n```")
    return "\n\n".join(made + unread) + "\n"


def loader_of(folder: Path) -> str:
    """The class of transformers that loads a model: that of its architecture, if it is no plain language model.

    An encoder in ``AutoModelForCausalLM`` would get a head of random numbers.
    """
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    name = name_inside(first) if isinstance(first, str) else "ForCausalLM"
    plain = name.endswith("ForCausalLM") or "auto_map" in config or not name.isidentifier()
    return "AutoModelForCausalLM" if plain else name
