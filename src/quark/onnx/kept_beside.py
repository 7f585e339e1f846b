"""What quantized models carry that is read back: the decisions in them, the preprocessing beside them."""

from __future__ import annotations

from pydantic import Field

from quark.files.schema import Schema


class StoredDecisions(Schema):
    """The decisions in the metadata of a model."""

    version: int
    tensors: dict[str, str] = Field(default_factory=dict)
    nodes: dict[str, str] = Field(default_factory=dict)
    floats: dict[str, str] = Field(default_factory=dict)


class PreprocessingFields(Schema):
    """A section of ``preprocess.yaml``."""

    mean: list[float | int] | None = None
    std: list[float | int] | None = None
    scale: float | int | None = None
    size: list[int] | None = None
    resize: str | None = None
    bgr: bool | None = None
    function: str | None = None
    float_model: str | None = None
