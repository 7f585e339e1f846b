"""A machine or a device without enough memory, or threads: one sentence, with what needs less."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quark.errors import QuarkError, short_of_memory

#: First words of a command -> what needs less memory; the first row that fits counts.
LESS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("torch", "quantize-files"),
        "shorter windows (--seq-len), --batch-size 1 and one worker need less; `quark torch plan` tells how much",
    ),
    (
        ("torch", "quantize"),
        "`quark torch quantize-files` holds one block of the model at a time; shorter windows (--seq-len) need less",
    ),
    (("torch",), "shorter windows (--seq-len) and one worker need less, and so does --device cpu of a GPU"),
    (("onnx", "quantize"), "one worker (--set CalibWorkerNum=1), samples of fewer values and --no-check need less"),
    ((), "fewer workers and samples of fewer values need less"),
)
#: What Python and libraries of C++ say where the system starts no thread.
THREADS = ("start new thread", "thread constructor failed")


@contextmanager
def memory_told(words: Sequence[str]) -> Iterator[None]:
    """Whatever a library raises where memory or threads are short becomes an error of the command's input.

    Raises:
        QuarkError: they were.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, QuarkError) and any(sign in str(error) for sign in THREADS):
            raise QuarkError(
                "this machine starts no more threads for the command: limits of processes or memory (ulimit -u, -v; "
                "pids of a container) are reached; one worker and OMP_NUM_THREADS=1 need less"
            ) from error
        if isinstance(error, QuarkError) or not short_of_memory(error):
            raise
        less = next(told for first, told in LESS if tuple(words[: len(first)]) == first)
        raise QuarkError(f"{where(error)} has not enough memory{asked(error)}: {less}") from error


def where(error: Exception) -> str:
    """What ran out of memory."""
    text = str(error)
    device = re.search(r"\b(GPU|XPU) (\d+)", text)
    if device:
        return f"{device[1]} {device[2]}"
    return "the GPU" if re.search(r"\b(CUDA|HIP|XPU|MPS)\b", text) else "this machine"


def asked(error: Exception) -> str:
    """How much was asked for, where it is told."""
    found = re.search(r"(?:allocate|of size|allocation of) (\d+(?:\.\d+)?)\.? ?([KMGTPE]i?B)?", str(error))
    return f" (asked for {found[1]} {found[2] or 'bytes'})" if found else ""
