"""Nothing is there for nobody: every module is imported by another or is a public name, every dependency is used."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "quark"
#: What users import or run: the names of AMD Quark, tools that a command loads by name, programs, packages.
PUBLIC = re.compile(
    r"quark\.(onnx\.(quantization|tools\.)|torch\.(quantization|utils|export\.(config|main_export)|files)"
    r"|shapeshifter|integrations|migration)|.*\.__main__$"
)
#: Distributions whose module has another name.
MODULES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "protobuf": "google",
    "openquark": "quark",
}
#: Programs and libraries that what is imported uses, or that read what is written.
BESIDE = {"huggingface-hub", "onnxruntime-genai"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its name; packages by theirs."""
    files = SOURCE.rglob("*.py")
    names = {path: ".".join(path.with_suffix("").relative_to(ROOT / "src").parts) for path in files}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in names.items()}


def mentioned(tree: ast.Module) -> Iterator[str]:
    """What a module imports, or names in a string as what is loaded when it is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value.partition(":")[0]


def test_every_module_is_used() -> None:
    trees = modules()
    used = {name for own, tree in trees.items() for name in mentioned(tree) if name != own}
    packages = {name.rpartition(".")[0] for name in trees}
    idle = [name for name in trees if name not in used | packages and not PUBLIC.match(name)]
    assert not idle, f"nobody imports {idle}: tests may, but then they belong beside the tests"


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: rows for name, rows in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    wanted = {re.split(r"[><=\[;! ]", row)[0] for rows in (project["dependencies"], *extras.values()) for row in rows}
    used = {name.partition(".")[0] for tree in modules().values() for name in mentioned(tree)}
    idle = [name for name in wanted - BESIDE if MODULES.get(name, name.replace("-", "_")) not in used]
    assert not idle, f"nothing imports {idle}"


def test_every_function_is_called() -> None:
    """A function that only tests call belongs beside them; what they then check is what nobody runs."""
    trees = modules()
    called = {"register_pass", "unregister_pass", "exported_scales"}  # by users: docs/passes.md, docs/torch/kv_cache.md
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                called.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                called.update(re.findall(r"\w+", node.value if len(node.value) < 60 else ""))
    idle = {
        f"{name}.{node.name}"
        for name, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name not in called
    }
    assert not {one for one in idle if not one.rpartition(".")[2].startswith("__")}
