"""A deferred library is loaded at the first use of a name, by whatever kind of import, and is then the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(folder: Path, code: str) -> str:
    (folder / "slow" / "part").mkdir(parents=True, exist_ok=True)
    (folder / "slow" / "__init__.py").write_text("print('loaded')\nvalue = 7\n")
    (folder / "slow" / "part" / "__init__.py").write_text("from slow import value\ninner = value + 1\n")
    (folder / "user.py").write_text("import slow\ndef seven():\n    return slow.value\n")
    head = f"import sys; sys.path.insert(0, {str(folder)!r}); from quark.deferred import defer; defer('slow', 'gone');"
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import slow, user; import slow", ""),
        ("import user; print(user.seven())", "loaded 7"),
        ("import user; user.seven(); import slow; print(user.seven(), type(slow).__name__)", "loaded 7 module"),
        ("from slow import value; print(value)", "loaded 7"),
        ("import slow.part; print(slow.part.inner)", "loaded 8"),
        ("import importlib; importlib.reload", ""),
        ("import slow; print(hasattr(slow, 'missing'))", "loaded False"),
    ],
)
def test_every_kind_of_import_meets_the_real_library_when_it_uses_it(tmp_path: Path, code: str, printed: str) -> None:
    assert run(tmp_path, code).split() == printed.split()


def test_what_is_loaded_stays_and_what_is_missing_stays_missing(tmp_path: Path) -> None:
    assert run(tmp_path, "import json; before = json; defer('json'); print(sys.modules['json'] is before)") == "True\n"
    code = "print('gone' in sys.modules, importlib.util.find_spec('gone'))"
    assert run(tmp_path, "import importlib.util;" + code) == "False None\n"


def test_symbolic_sizes_still_work_under_the_flow() -> None:
    code = (
        "import sys, quark.onnx, onnx_ir; assert 'sympy.core' not in sys.modules;"
        "print((onnx_ir.SymbolicDim('n') + 1).value, 'sympy.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["n", "+", "1", "True"]


@pytest.mark.parametrize(
    "first", ["import sympy.core", "import sympy.core.symbol", "from sympy.core import Symbol", "import sympy"]
)
def test_a_library_is_loaded_once_whichever_of_its_modules_is_named_first(first: str) -> None:
    code = (
        f"import sys, quark.onnx\n{first}\nimport sympy\n"
        "assert sympy.core.symbol.Symbol is sympy.Symbol is sys.modules['sympy.core'].Symbol\n"
        "assert sys.modules['sympy.core'] is sympy.core and sympy.core.__spec__.submodule_search_locations\n"
        "assert sys.modules['sympy'].core is sympy.core; print('once')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "once", done.stderr[-500:]


def test_a_function_of_a_module_is_loaded_when_it_is_called_or_asked(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text("print('loaded')\ndef add(one: int, more: int = 1) -> int: return one + more\n")
    head = "import inspect; from quark.deferred import Late; add = Late('later').add; print('made'); "
    for use, printed in (("add(2, more=3)", "5"), ("inspect.signature(add)", "(one: int, more: int = 1) -> int")):
        assert run(tmp_path, f"{head}print({use})") == f"made\nloaded\n{printed}\n"
    assert run(tmp_path, f"{head}print(hasattr(add, '__annotations__'), callable(add))") == "made\nFalse True\n"
