"""Python's search for cycles is left as it was found, and does not look through what imports have made."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import gc
from quark.garbage import rare_collections
{before}
found = gc.get_threshold(), gc.get_freeze_count()
with rare_collections():
    kept = [[] for _ in range(5_000)]
    inside = gc.get_threshold()
old = {{id(one) for one in gc.get_objects(generation=2)}}
print(found == (gc.get_threshold(), gc.get_freeze_count()), inside[0], sum(id(one) in old for one in kept))
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "True 200000 5000"),
        ("gc.set_threshold(0)", "True 0 5000"),
        ("gc.set_threshold(300_000, 5, 5)", "True 300000 5000"),
        ("gc.freeze()", "True 200000 0"),  # nothing of a caller's is thawed
    ],
)
def test_it_is_left_as_it_was_and_what_is_new_counts_as_old(before: str, said: str) -> None:
    words = [sys.executable, "-c", CODE.format(before=before)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == said


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["onnx", "inspect", "nowhere.onnx"], 1)])
def test_a_process_ends_with_the_code_of_its_command_and_its_last_words(words: list[str], code: int) -> None:
    """Nor do handlers of ``atexit`` get lost, or what is still in a buffer."""
    start = "import atexit, sys; atexit.register(print, 'bye'); sys.argv[1:] = {words}\n"
    start += "from quark.__main__ import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", start.format(words=words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code and done.stdout.splitlines()[-1] == "bye"
