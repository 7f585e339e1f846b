"""A process of the command line ends at once, and as it should."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["onnx", "inspect", "nowhere.onnx"], 1)])
def test_a_process_ends_with_the_code_of_its_command_and_its_last_words(words: list[str], code: int) -> None:
    """Nor do handlers of ``atexit`` get lost, or what is still in a buffer."""
    start = "import atexit, sys; atexit.register(print, 'bye'); sys.argv[1:] = {words}\n"
    start += "from quark.__main__ import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", start.format(words=words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code and done.stdout.splitlines()[-1] == "bye"


def test_nothing_is_left_to_look_through_at_the_end() -> None:
    start = "import atexit, gc, sys; from quark import __main__ as process\n"
    start += "atexit.register(lambda: print(len(gc.get_objects()))); sys.argv[1:] = ['--version']; process.run()"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 1_000
