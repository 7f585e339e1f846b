"""What each layer takes on a device, for the budget that a file names: energy per multiplication and addition.

    int8/int8: 0.2        # of this type of inputs / of weights: one number, picojoules or whatever the device counts
    int16/int8: 0.5
    float/float: 4.6

The cost of a layer is its multiplications times that number; layers without any take nothing. Not handled: memory
traffic, which the budgets ``bits`` and ``size`` count, and what a compiler fuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quark.errors import ConfigError, nearest
from quark.files.untrusted import read_settings
from quark.search.values import Study

Table = Mapping[str, float]
Types = Callable[[str], str]
SUFFIXES = (".yaml", ".yml", ".json")


def is_table(budget: str) -> bool:
    """Whether ``--budget`` names a file."""
    return budget.endswith(SUFFIXES)


def read_table(budget: str) -> Table:
    """The numbers in a file, by ``inputs/weights``.

    Raises:
        ConfigError: no such file, or something that is no number of 0 or more.
    """
    found = read_settings(Path(budget), "--budget: the file")
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"--budget {budget!r} must hold lines such as 'int8/int8: 0.2'")
    for types, number in found.items():
        told = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not isinstance(types, str) or "/" not in types or not told or not 0 <= number <= sys.float_info.max:
            raise ConfigError(f"--budget {budget!r}: {types!r} is {number!r}; write 'int8/int8: 0.2', 0 or more")
    return {str(types): float(number) for types, number in found.items()}


def with_energy(study: Study, macs: Mapping[str, float], table: Table, types: Types) -> Study:
    """The study with the cost ``energy``.

    Args:
        study: of the layers.
        macs: multiplications of a layer for one sample, by its name; none where it is not there.
        table: has a line for every candidate (``check_table``).
        types: ``inputs/weights`` of a candidate.
    """
    each = {name: table[types(name)] for name in study.candidates}
    trials = (
        replace(one, costs={**one.costs, "energy": macs.get(one.layer, 0) * each[one.candidate]})
        for one in study.trials
    )
    return replace(study, trials=tuple(trials))


def check_table(table: Table, candidates: Sequence[str], types: Types) -> None:
    """Raise where the table has no line for a candidate's types.

    Raises:
        ConfigError: it has none; the types and the candidate are named.
    """
    for name in candidates:
        if (wanted := types(name)) not in table:
            near = nearest(wanted, table)
            raise ConfigError(f"--budget: the file has no line {wanted!r}, for the candidate {name!r}.{near}")
