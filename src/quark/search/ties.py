"""Layers that have to get one candidate, because a program reads them as one: a constraint of the integer program.

    x[i, j] = x[k, j]   for i, k in one group      ⇔      one row with  loss = Σ loss,  cost = Σ cost

and no option where it does not fit every member.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from quark.search.values import Study, Trial

EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def tied(study: Study, groups: Iterable[Sequence[str]]) -> tuple[Study, dict[str, tuple[str, ...]]]:
    """The study with a row for each group, and the layers behind every row.

    Args:
        study: of single layers.
        groups: names of layers; those that the study does not know are left out.
    """
    known = study.layers
    rows: dict[str, tuple[str, ...]] = {}
    for group in groups:
        members = tuple(name for name in known if name in group)
        rows |= dict.fromkeys(members, members)
    behind = {" + ".join(members): members for members in (rows.get(name, (name,)) for name in known)}
    trials = []
    for row, members in behind.items():
        for candidate in study.candidates:
            found = [one for name in members if (one := study.of(name, candidate)) is not None]
            if len(found) == len(members):
                trials.append(_added(row, found))
    return Study(tuple(trials), study.metric, study.samples, study.seconds), behind


def _added(row: str, found: Sequence[Trial]) -> Trial:
    """One option of several layers."""
    if len(found) == 1:
        return found[0]
    costs = {name: sum(one.costs[name] for one in found) for name in found[0].costs}
    return Trial(row, found[0].kind, found[0].candidate, sum(one.loss for one in found), {}, costs)


def spread(behind: Mapping[str, Sequence[str]], plan: Sequence[str]) -> dict[str, str]:
    """The candidate of every layer, from that of every row."""
    return {name: chosen for members, chosen in zip(behind.values(), plan, strict=True) for name in members}


def fused(layers: Iterable[str], siblings: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Layers that vLLM fuses: siblings whose names fit one group of globs, and all experts of a layer.

    Args:
        layers: dotted names.
        siblings: globs of the last parts of the names of layers that become one, such as queries, keys and values.
    """
    found: dict[tuple[str, int], list[str]] = {}
    groups = [[glob.rpartition(".")[2] for glob in group] for group in siblings]
    for name in layers:
        expert = EXPERT.search(name)
        parent, _, last = name.rpartition(".")
        fits = (k for k, globs in enumerate(groups) if any(fnmatchcase(last, glob) for glob in globs))
        key = (name[: expert.start()], -1) if expert else (parent, next(fits, len(groups)))
        if key[1] < len(groups):
            found.setdefault(key, []).append(name)
    return [tuple(names) for names in found.values() if len(names) > 1]
