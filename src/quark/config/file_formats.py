"""The formats that a quantized model can be written in, the programs that read them, and who reads what.

``format_table.tsv`` has a row for each scheme, format and program: whether it works, and the class or the error of
that program that shows it. ``benchmarks/format_table.py`` writes it by exporting every scheme in every format and
letting the programs read what came out. The checks of the command line, ``quark torch formats`` and the page of
documents are made of it. ``*`` stands for every scheme.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from io import StringIO

from quark.dataclass import dataclass
from quark.errors import ConfigError, check_name

EXPORT = "export"  # in the place of a program: whether we can write it at all
ANY = "*"
CACHE = "kv_cache_"  # before the scheme of keys and values, in the place of a scheme


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: on the command line.
        title: in sentences.
        mode: ``custom_mode`` of ``export_safetensors``, where that writes it.
        behind_rope: whoever reads it quantizes keys where they enter the cache, behind the rotary embedding.
    """

    name: str
    title: str
    mode: str | None = None
    behind_rope: bool = False


@dataclass(frozen=True)
class Program:
    """A program that reads models.

    Attributes:
        name: on the command line.
        title: in sentences.
        format: that it is for, where a command names none.
    """

    name: str
    title: str
    format: str


#: The class of our own error, before what it says.
CLASS = re.compile(r"^\w+Error: ")


@dataclass(frozen=True)
class Row:
    """Whether one program reads one scheme in one format.

    Attributes:
        scheme, format, program: which.
        works: whether it does.
        shown_by: the class that reads it, or the error that refuses it.
    """

    scheme: str
    format: str
    program: str
    works: bool
    shown_by: str


FORMATS = {
    row.name: row
    for row in (
        Format("quark", "quark", "quark"),
        Format("compressed-tensors", "compressed-tensors", behind_rope=True),
        Format("awq", "AWQ", "awq"),
        Format("gptq", "GPTQ", "gptq"),
        Format("gptq_v2", "GPTQ (version 2)", "gptq_v2"),
        Format("fp8", "fp8", "fp8", behind_rope=True),
        Format("modelopt", "ModelOpt", "modelopt", behind_rope=True),
        Format("mxfp4", "MXFP4 (gpt_oss)", "mxfp4"),
        Format("gguf", "GGUF"),
        Format("onnx", "ONNX"),
    )
}
PROGRAMS = {
    row.name: row
    for row in (
        Program("vllm", "vLLM", "quark"),
        Program("transformers", "transformers", "quark"),
        Program("llama.cpp", "llama.cpp", "gguf"),
        Program("onnxruntime-genai", "onnxruntime-genai", "onnx"),
    )
}


@cache
def table() -> tuple[Row, ...]:
    """All rows of ``format_table.tsv``."""
    text = files("quark.config").joinpath("format_table.tsv").read_text(encoding="utf-8")
    rows = csv.reader(StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
    next(rows)
    return tuple(Row(scheme, format, program, works == "yes", shown) for scheme, format, program, works, shown in rows)


@cache
def tried() -> frozenset[str]:
    """The schemes of the table: all of ours, and none that a user registered."""
    return frozenset(row.scheme for row in table())


def row_of(scheme: str, format: str, program: str) -> Row | None:
    """The row of a scheme, or of every scheme, in a format for a program; None: nobody has tried it."""
    found = {row.scheme: row for row in table() if (row.format, row.program) == (format, program)}
    return found.get(scheme) or found.get(ANY)


def chosen_format(format: str | None, program: str | None) -> str:
    """The format that is meant.

    Raises:
        ConfigError: a name that is not a format or no program.
    """
    if format is not None:
        check_name("format", format, FORMATS)
    if program is not None:
        check_name("program", program, PROGRAMS)
    return format or (PROGRAMS[program].format if program else "quark")


def format_for(schemes: Iterable[str], program: str) -> str:
    """The format in which a program reads all of the schemes: its own, or the first that does.

    Raises:
        ConfigError: an unknown program, or no format does; the message names a scheme that is not read.
    """
    wanted, own = list(schemes), chosen_format(None, program)
    for format in dict.fromkeys((own, *FORMATS)):
        if all(works(scheme, format, program) for scheme in wanted if scheme in tried()):
            return format
    check_formats(wanted, own, program)
    return own


def check_formats(schemes: Iterable[str], format: str, program: str | None) -> None:
    """The format has every scheme, and the program reads it there.

    Schemes of the user's own are not in the table; the export itself refuses what it cannot write.

    Raises:
        ConfigError: it does not; the message names the formats that do.
    """
    for scheme in dict.fromkeys(schemes):
        for reader in (EXPORT, *([program] if program else [])):
            row = row_of(scheme, format, reader) if scheme in tried() else None
            if row is not None and not row.works:
                raise ConfigError(sentence(row, scheme, program))


def check_caches(scheme: str | None, format: str, program: str | None) -> None:
    """The program reads keys and values of a scheme in the format; the rows of caches are those of ``CACHE``.

    Raises:
        ConfigError: it does not; the message names the scheme of caches that it reads.
    """
    row = row_of(f"{CACHE}{scheme}", format, program) if scheme and program else None
    if row is not None and not row.works:
        known = [one for one in table() if (one.format, one.program, one.works) == (format, program, True)]
        names = [one.scheme.removeprefix(CACHE) for one in known if one.scheme.startswith(CACHE)]
        rows = {name: row_of(row.scheme, name, row.program) for name in FORMATS}
        ways = [f"--kv-cache {' or '.join(names)} is read"]
        ways += [f"--format {name} has it" for name, one in rows.items() if one is not None and one.works]
        raise ConfigError(
            f"{PROGRAMS[row.program].title} has no {scheme} cache in the {FORMATS[format].title} format "
            f"({row.shown_by}); {', '.join(ways)}"
        )


def quantizes_behind_rope(format: str, program: str | None) -> bool:
    """Whether what reads a format, or one program, quantizes keys behind the rotary embedding."""
    return program == "vllm" or (format in FORMATS and FORMATS[format].behind_rope)


def sentence(row: Row, scheme: str, program: str | None) -> str:
    """What a row that does not work means for a scheme, and what does."""
    title, why = FORMATS[row.format].title, row.shown_by
    if row.program == EXPORT:
        why = CLASS.sub("", why)
        what = f"the {title} format has no {row.scheme} layer"
    elif row.scheme == ANY:
        what = f"{PROGRAMS[row.program].title} does not read the {title} format"
    else:
        what = f"{PROGRAMS[row.program].title} has no {row.scheme} layer in the {title} format"
    return f"{what} ({why}); {remedy(scheme, row.format, program)}"


def remedy(scheme: str, format: str, program: str | None) -> str:
    """The formats that have a scheme, for a program or for any."""
    names = [name for name in FORMATS if name != format and works(scheme, name, program)]
    wanted = PROGRAMS[program].title if program else "any program"
    if not names:
        return f"no format that quark writes has it for {wanted}"
    first, *others = (f"--format {name}" for name in names)
    return f"{first} has one" if not others else f"{', '.join([first, *others[:-1]])} and {others[-1]} have one"


def works(scheme: str, format: str, program: str | None) -> bool:
    """Whether a scheme can be written in a format, and a program (or any) reads it."""
    written = row_of(scheme, format, EXPORT)
    if written is None or not written.works:
        return False
    rows = [row_of(scheme, format, name) for name in ([program] if program else PROGRAMS)]
    return any(row is not None and row.works for row in rows)
