"""``--algorithm FILE.py:NAME``: a function of the user's becomes a registered algorithm, under its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import quark
from quark.algorithms.names import parted
from quark.algorithms.own import OWN
from quark.search.function import digest_of, load_function

_LOADED: dict[str, tuple[Path, str]] = {}
"""Those that came from files: name -> the file, and what tells its content from another."""


def with_own(texts: Sequence[str]) -> tuple[str, ...]:
    """The algorithms by name alone; functions in files are registered, unless they are already.

    Args:
        texts: ``gptq``, ``mine.py:descend``; settings behind one more colon stay there.

    Raises:
        ConfigError: no such file or function, the function is none that ``register_algorithm`` takes, or its name is
            taken.
    """
    return tuple(_registered(*parted(text)) for text in texts)


def _registered(file: str, rest: str) -> str:
    name = rest.partition(":")[0]
    if not file:
        return rest
    typed, path = f"{file}:{name}", Path(file).resolve()
    if name in OWN and path.is_file() and _LOADED.get(name) == (path, digest_of(typed)):
        return rest
    function = load_function(typed, "--algorithm")
    if name in OWN and _LOADED.get(name, ("", ""))[0] == path:  # the file has changed
        quark.unregister_algorithm(name)
    quark.register_algorithm(name, function)
    _LOADED[name] = path, digest_of(typed)
    return rest
