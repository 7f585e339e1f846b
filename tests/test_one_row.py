"""A format is one row: outside the lists below no file of the package knows the name of one.

A name that is also a type of NumPy and torch (``int8``, ``float16``) may be written, but not be compared with.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from quark.numerics.elements import ELEMENTS
from quark.numerics.formats import FORMATS

SOURCE = Path(__file__).parents[1] / "src" / "quark"
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
TYPES = {name for name in FORMATS if name in ELEMENTS and ("int" in name or name.endswith("float16"))}
#: Why a file may say names.
ALLOWED = {
    **dict.fromkeys(("numerics/elements.py", "numerics/blocks.py", "numerics/scales.py"), "the rows"),
    "numerics/formats.py": "names that a registered format may not have",
    **dict.fromkeys(("config/presets.py", "torch/config/schemes.py"), "presets"),
    **dict.fromkeys(("config/overrides.py", "onnx/quantization/config/data_type.py"), "names of the ONNX dialect"),
    "torch/export/declared.py": "methods of quantization that config.json names",
    "onnx/shapeshifter.py": "names of the templates of AMD",
    **dict.fromkeys(
        (f"torch/config/{name}.py" for name in ("type", "tensor", "model", "specs", "spec_schemes")),
        "names of the torch dialect",
    ),
    **dict.fromkeys(
        (f"operators/{name}.py" for name in ("mx", "blockquant", "storage", "elementwise")),
        "defaults and values of attributes of operators",
    ),
    **dict.fromkeys(
        (
            *(f"torch/export/{name}.py" for name in ("compressed_tensors",)),
            *(
                "torch/export/gguf_types.py",
                "torch/export/modelopt.py",
                "torch/export/stacked_blocks.py",
                "config/file_formats.py",
                "torch/files/foreign.py",
                "torch/files/methods.py",
                "torch/files/grids.py",
            ),
        ),
        "codecs of files of other programs",
    ),
}


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def named(tree: ast.Module) -> list[str]:
    """Where a file says the name of a format, or compares something called format or name with one that is a type."""
    said = [(node.lineno, node.value) for node in strings(tree) if node.value in set(FORMATS) - TYPES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        asked = any(
            isinstance(part, ast.Attribute) and part.attr in ("format", "name")
            for side in sides
            for part in ast.walk(side)
        )
        said += [(one.lineno, one.value) for side in sides for one in strings(side) if asked and one.value in TYPES]
    return [f"line {line}: {name}" for line, name in sorted(said)]


def test_no_file_asks_which_format_it_holds() -> None:
    found = {file: named(ast.parse((SOURCE / file).read_text(encoding="utf-8"))) for file in FILES}
    knowing = {file: lines for file, lines in found.items() if lines and file not in ALLOWED}
    assert not knowing, f"these files know formats by name; ask the row: {knowing}"
    assert not [file for file in ALLOWED if not found[file]], "a file of ALLOWED names no format any more"


def test_a_comparison_is_found() -> None:
    for code in ("if spec.format == 'int8': pass", "x = row.name in ('uint4', 'int4')", "KINDS = {'mxfp4': 1}"):
        assert named(ast.parse(code))
    assert not named(ast.parse("x = values.astype('int8'); y = dtype == 'int8'"))
