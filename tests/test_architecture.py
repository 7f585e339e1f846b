"""docs/architecture.md, enforced: layer order, no cycles, light imports, sizes, and who may print.

Imports are read from the syntax tree, so those inside functions count, and so do module names written as strings
(the tables of lazily loaded names).
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import onnx
import pytest

SOURCE = Path(__file__).parents[1] / "src"
LAYERS = {  # a module imports from lower numbers only, and from its own package
    "errors": -3,
    "dataclass": -3,
    "deferred": -3,
    "garbage": -3,
    "versions": -3,
    "graphs": -3,
    "reading": -2,
    "parallel": -2,
    "files": -1,
    "migration": 0,
    "numerics": 0,
    "measure": 1,
    "observers": 1,
    "ir": 1,
    "operators": 1,
    "config": 2,
    "algorithms": 3,
    "report": 3,
    "search": 3,
    "onnx": 4,
    "torch": 4,
    "automatic": 5,
    "cli": 5,
    "demo": 5,
    "extension": 5,
    "integrations": 5,
    "shapeshifter": 5,
    "__main__": 6,
}
LONGEST_FILE, LONGEST_FUNCTION = 500, 45
#: Functions that take ``MANY_PARAMETERS`` and more, most of them public: make a value of what belongs together.
MANY_PARAMETERS, WITH_MANY = 7, 15
PUBLIC_NAMES = ("quark.torch.utils",)  # users import from it; it holds names only
PRINTERS = ("quark.cli", "quark.demo", "quark.report", "quark.onnx.tools", "quark.torch.tools")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    paths = sorted((SOURCE / "quark").rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def path_of(module: str) -> Path:
    stem = SOURCE.joinpath(*module.split("."))
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def owner(name: str) -> str | None:
    """The module of this project that ``name`` (a module or a name inside one) lives in."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that ``tree`` imports, at any depth, and string constants that are module names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules():
            yield node.value


def library_names(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported from neither this project nor the standard library."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        yield from (name for name in names if name.split(".")[0] not in {*sys.stdlib_module_names, "quark"})


@cache
def edges(module: str) -> frozenset[str]:
    """Modules of this project that ``module`` imports."""
    found = (owner(name) for name in imported_names(modules()[module]) if name.split(".")[0] == "quark")
    return frozenset(name for name in found if name and name not in ("quark", module))


def package(module: str) -> str:
    return module.split(".")[1]


def layer_faults() -> list[str]:
    return [
        f"{module} imports {target}"
        for module in modules()
        if module != "quark"
        for target in edges(module)
        if package(target) != package(module) and LAYERS[package(target)] >= LAYERS[package(module)]
    ]


def find_cycle(graph: dict[str, frozenset[str]]) -> list[str] | None:
    """One cycle of ``graph`` as the list of its nodes, or None: depth-first search with three colours."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph[node]):
            if cycle := visit(target, [*path, node]):
                return cycle
        done.add(node)
        return None

    return next((cycle for node in graph if (cycle := visit(node, []))), None)


def modules_loaded_by(statement: str) -> set[str]:
    """Libraries that are there after a statement; those that are deferred are not."""
    real = "k for k, m in sys.modules.items() if type(m).__name__ != 'Deferred'"
    code = f"import sys; {statement}; print(' '.join({real}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in run.stdout.split()}


def test_every_package_has_a_layer() -> None:
    assert {package(name) for name in modules() if name != "quark"} <= set(LAYERS)


def test_imports_follow_the_layers() -> None:
    assert not layer_faults()


def test_no_import_cycles() -> None:
    assert find_cycle({name: edges(name) for name in modules()}) is None


def test_cycle_search_finds_a_cycle() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("b"), "d": frozenset()}
    assert find_cycle(graph) == ["b", "c", "b"]


def test_imports_inside_functions_and_lazy_tables_count() -> None:
    tree = ast.parse("LAZY = {'x': 'quark.errors'}\ndef f():\n    from quark.config import TensorSpec\n")
    assert set(imported_names(tree)) == {"quark.errors", "quark.config.TensorSpec"}


def test_import_quark_is_instant() -> None:
    assert not modules_loaded_by("import quark") & {"numpy", "onnx", "onnx_ir", "onnxruntime", "pydantic", "torch"}


def test_import_quark_onnx_is_light() -> None:
    assert not modules_loaded_by("import quark.onnx") & {"onnx_ir", "onnxruntime", "onnxscript", "onnxslim", "torch"}


def test_command_line_help_is_light() -> None:
    heavy = {"numpy", "onnx", "onnx_ir", "onnxruntime", "plotly", "pydantic", "torch"}
    help_of = "import quark.cli as cli, io, contextlib; contextlib.redirect_stdout(io.StringIO()).__enter__(); "
    loaded = modules_loaded_by(help_of + "cli.main(['torch', 'quantize', '--help']); sys.stdout = sys.__stdout__")
    assert "typer" in loaded and not loaded & heavy


def test_a_command_of_onnx_builds_no_options_of_torch() -> None:
    code = "import sys, quark.cli; quark.cli.main(['onnx', 'quantize', '--help']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "quark.cli.onnx_app" in found and not {"quark.cli.torch_app", "quark.cli.torch_request"} & {*found}


#: Modules that a quantization from the command line imports at most; 814 when this was set.
MOST_MODULES = 820
SESSIONS = ("InferenceSession", "SessionOptions")


def test_a_quantization_imports_few_modules(tmp_path: Path) -> None:
    """Nothing is loaded for what was not asked for: no pydantic for words and options that are plainly in order."""
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[1,3,8,8] x) => (float[1,4,8,8] y) '
    proto = onnx.parser.parse_model(text + "{ y = Conv <pads = [1, 1, 1, 1]> (x, w) }")
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).random((1, 3, 8, 8), np.float32))
    words = ["onnx", "quantize", "model.onnx", "-o", "q.onnx", "-p", "XINT8", "--data", "x.npy", "--no-check"]
    code = f"import sys, quark.cli; quark.cli.main({words}); print('modules', *sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = told.rpartition("\nmodules ")[2].split()
    assert (tmp_path / "q.onnx").is_file()
    assert len(found) <= MOST_MODULES, f"{len(found)} modules"
    heavy = ("sympy.", "mpmath", "torch", "onnxslim", "joblib", "pydantic")
    assert not [name for name in found if name.startswith(heavy)]
    seldom = ("layer_runs", "tuned_speed", "algorithms.mixprecision", "algorithms.calibration_search", "search")
    assert not {f"quark.onnx.{name}" for name in seldom} & set(found)


def test_every_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonical(re.match(r"[\w-]+", line)[0]) for lines in wanted for line in lines}
    used = {name.split(".")[0] for tree in modules().values() for name in library_names(tree)}
    homes = packages_distributions()
    assert {name for name in used if not {canonical(home) for home in homes.get(name, [name])} & declared} == set()


def test_the_onnx_flow_imports_only_what_its_extra_installs() -> None:
    """Top-level imports: what is imported inside a function may belong to another extra, and says so when it lacks."""
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["onnx"]]
    installed = {canonical(re.match(r"[\w-]+", line)[0]) for line in lines}
    homes, used = packages_distributions(), set()
    for name, tree in modules().items():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        used |= {one.split(".")[0] for one in library_names(top)} if name.startswith("quark.onnx") else set()
    assert {name for name in used if not {canonical(home) for home in homes.get(name, [name])} & installed} == set()


def canonical(distribution: str) -> str:
    """The name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("module", [name for name in modules() if name != "quark"])
def test_house_style(module: str) -> None:
    tree = modules()[module]
    lines = len(path_of(module).read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{module} has {lines} lines"
    assert ast.get_docstring(tree), f"{module} has no docstring"
    assert not module.endswith(".utils") or module in PUBLIC_NAMES, f"{module}: name the thing, not 'utils'"
    assert long_functions(tree) == []
    assert open_keywords(tree) == []
    if not module.startswith(PRINTERS):
        assert prints(tree) == [], f"{module} prints: use logging"


def test_no_session_takes_more_threads_than_are_lent() -> None:
    """Of a machine that is shared ONNX Runtime takes as many as it has cores, unless the options say how many."""
    found = []
    for module, tree in modules().items():
        for one in functions(tree):
            calls = [node for node in ast.walk(one) if isinstance(node, ast.Call)]
            named = {name: [call for call in calls if ast.unparse(call.func).endswith(f".{name}")] for name in SESSIONS}
            plain = [call for call in named["InferenceSession"] if len(call.args) < 2]
            if plain or (named["SessionOptions"] and ".intra_op_num_threads = " not in ast.unparse(one)):
                found.append(f"{module}.{one.name}")
    assert found == []


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def long_functions(tree: ast.Module) -> list[str]:
    lengths = ((node.name, code_lines(node)) for node in functions(tree))
    return [f"{name}: {length} lines" for name, length in lengths if length > LONGEST_FUNCTION]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """What a caller may hand over."""
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg) if one]
    return named[named[:1] in (["self"], ["cls"]) :]


def test_long_parameter_lists_do_not_become_more() -> None:
    every = ((module, one) for module, tree in modules().items() for one in functions(tree))
    found = [f"{module}.{one.name}" for module, one in every if len(parameters(one)) >= MANY_PARAMETERS]
    assert len(found) <= WITH_MANY, sorted(found)
    assert "quark.automatic.auto" in found


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: those are as long as there is something to say."""
    first = function.body[0]
    told = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if told else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def open_keywords(tree: ast.Module) -> list[str]:
    """A module in the place of a layer takes what the layer takes: ``forward`` may."""
    return [
        node.name
        for node in functions(tree)
        if node.args.kwarg and not node.name.startswith("_") and node.name != "forward"
    ]


def prints(tree: ast.Module) -> list[int]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


#: Public names of AMD Quark's two dialects, and those of one idea that each flow has for its own kind of model.
TWO_DIALECTS = {
    *("ModelQuantizer", "QConfig", "QLayerConfig", "QTensorConfig", "AlgoConfig", "ScaleType"),
    *(
        "AdaQuantConfig",
        "AdaRoundConfig",
        "AutoRoundConfig",
        "AWQConfig",
        "BiasCorrectionConfig",
        "ChannelEqualizationConfig",
        "CLEConfig",
        "GPTAQConfig",
    ),
    *("GPTQConfig", "QronosConfig", "SmoothQuantConfig", "SVDQuantConfig"),
}


def test_a_class_name_means_one_thing() -> None:
    homes = collections.defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not {name: found for name, found in twice.items() if name not in TWO_DIALECTS}
    flows = {name: {module.split(".")[1] for module in twice[name]} for name in TWO_DIALECTS & set(twice)}
    assert all(len(found) > 1 and found <= {"onnx", "torch", "search"} for found in flows.values()), flows


def test_the_source_distribution_has_every_file_of_the_root() -> None:
    """What `make` and the pages name must be there for a reader without a checkout."""
    settings = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    given = set(settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    done = subprocess.run(["git", "ls-files"], cwd=SOURCE.parent, capture_output=True, text=True, check=False)
    root = {name.partition("/")[0] for name in done.stdout.splitlines() if not name.startswith((".", '"'))}
    assert root - given <= {"pyproject.toml"}  # which hatch adds by itself


def test_arrays_are_a_type() -> None:
    """What is no array is told by the type checker: as long as the name stood for anything, nothing was."""
    nodes = (node for node in ast.walk(modules()["quark.numerics.array"]) if isinstance(node, ast.AnnAssign))
    told = {ast.unparse(node.target): ast.unparse(node.value) for node in nodes if node.value is not None}
    assert told["Array"] == "np.ndarray | torch.Tensor" and told["Operand"] == "Array | float | np.number"
