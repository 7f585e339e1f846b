"""What was typed behind ``quark torch quantize``, ``quantize-files`` and ``convert``."""

from __future__ import annotations

from collections.abc import Mapping
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
