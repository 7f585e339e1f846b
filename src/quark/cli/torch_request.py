"""What was typed behind ``quark torch quantize``, ``quantize-files`` and ``convert``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where samples come from."""

    data: Path | None
    samples: int
    seq_len: int


@dataclass(frozen=True)
class Request:
    """What was typed."""

    model: Path
    output: Path
    scheme: str | None
    kv_cache: str | None
    algorithms: tuple[str, ...]
    layers: tuple[str, ...]
    exclude: Mapping[str, list[str]]
    source: Source
    device: str
    trust_remote_code: bool
    config: Path | None = None
    format: str | None = None
    program: str | None = None
    dtype: str | None = None
    max_shard_size: str = "5GB"
    verify: bool = True
    plan_from: Path | None = None

    @property
    def named(self) -> str:
        """The configuration in a word."""
        return self.scheme or str(self.config)


def left_float(exclude: Sequence[str] | None, exclude_only: Sequence[str] | None) -> dict[str, list[str]]:
    """What stays float, as keys of a configuration file: beside the usual layers, and in their place."""
    given = {"also_exclude": list(exclude or ()), "exclude": list(exclude_only or ())}
    return {key: globs for key, globs in given.items() if globs}
