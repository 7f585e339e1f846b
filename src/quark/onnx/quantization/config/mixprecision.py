"""Automatic mixed precision: which layers leave the configuration's precision for another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from quark.config.algorithm import COUNT, INDEX, Bounds, one_of
from quark.config.rules import Subgraph
from quark.config.tensor import LayerSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError, unknown
from quark.onnx.quantization.config.algo_base import AlgoConfig
from quark.onnx.quantization.config.candidates import candidate
from quark.onnx.quantization.config.spec import QLayerConfig
from quark.reading import parse_json, read_text

#: Metrics of one output.
METRICS = ("l2", "kl", "cosine", "sqnr", "psnr")
OBJECTS = ("speed", "quality")
SHARED = ("propagate", "unshare")
One = QLayerConfig | LayerSpec | str
Targets = One | Sequence[One] | Mapping[One, Sequence[str]]
Function = Callable[..., Any] | str


@dataclass(frozen=True)
class AutoMixprecisionConfig(AlgoConfig):
    """Give single layers another precision, those that bear it best first, as long as a metric allows.

    Attributes:
        target_layer_config: what a chosen layer becomes: a ``QLayerConfig``, or the name of a candidate ("A8W8",
            "uint8/int4"); several, of which each layer gets the one it bears best; or {config: operator types, layer
            names or ^patterns that may get it}.
        target_op_type: operators that may be chosen.
        subgraph_json: file with subgraphs that are chosen as a whole, in the place of single layers:
            ``{"subgraphs": [{"name": .., "start_nodes": [..], "end_nodes": [..]}]}``.
        include_layers: names or ^patterns of the only layers that may be chosen.
        exclude_layers: names or ^patterns of layers that stay as they are.
        data_size: calibration samples that are measured on; 0: all.
        metric_output_index: the output of the model that is measured.
        metric_distance_fn: (float output, quantized output) -> distance, for ``metric_default``; averaged over samples.
        metric_evaluate_fn: path of a model -> figure of merit; the metric is how far it is from the float model's.
        metric_default: "l2" (norm of the error), "kl" (divergence of the softmax), "cosine" (1 - cosine), or "sqnr" and
            "psnr" in dB, of which more is better.
        metric_threshold: 0: all layers are chosen; ``None``: none, the ranking is only reported; otherwise the value
            that stops the choosing.
        metric_optimize_object: "speed": choose while the metric is no worse than the threshold; "quality": until it is
            at least as good.
        sensitivity_cache_file: JSON file that finished measurements are kept in.
        worker_num: measurements at a time.
        dual_quant_nodes: two pairs of quantization nodes where precisions meet (``EnableDualQuantNodePairs``).
        no_input_qdq_shared: a chosen layer reads through a pair of its own; other readers keep theirs.
        shared_param_mode: layers that share a weight are chosen together ("propagate"), or get copies ("unshare").
    """

    BOUNDS: ClassVar[Bounds] = {
        "data_size": INDEX,
        "metric_output_index": INDEX,
        "worker_num": COUNT,
        "metric_default": one_of(*METRICS),
        "metric_optimize_object": one_of(*OBJECTS),
        "shared_param_mode": one_of(*SHARED),
    }
    name: ClassVar[str] = "auto_mixprecision"
    target_layer_config: Targets = "A8W8"
    target_op_type: Sequence[str] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    subgraph_json: str | Path | None = None
    include_layers: Sequence[str] | None = None
    exclude_layers: Sequence[str] | None = None
    data_size: int = 0
    metric_output_index: int = 0
    metric_distance_fn: Function | None = None
    metric_evaluate_fn: Function | None = None
    metric_default: str = "l2"
    metric_threshold: float | None = 0
    metric_optimize_object: str = "speed"
    sensitivity_cache_file: str | Path | None = None
    worker_num: int = 1
    dual_quant_nodes: bool = False
    no_input_qdq_shared: bool = False
    shared_param_mode: str = "propagate"

    def check(self) -> None:
        """Targets, functions and names."""
        self.targets()
        for field in ("metric_distance_fn", "metric_evaluate_fn"):
            value = getattr(self, field)
            usable = value is None or callable(value) or (isinstance(value, str) and ":" in value)
            self.need(usable, field, "a function, or FILE.py:FUNCTION")
        both = self.metric_distance_fn is not None and self.metric_evaluate_fn is not None
        self.need(not both, "metric_evaluate_fn", "None: metric_distance_fn is given too, and one of them decides")
        self._check_names()
        if self.subgraph_json is not None:
            self.subgraphs()

    def _check_names(self) -> None:
        for field in ("target_op_type", "include_layers", "exclude_layers"):
            value = getattr(self, field)
            listed = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
            self.need(listed or (value is None and field != "target_op_type"), field, "a list of names")
        self.need(bool(self.target_op_type), "target_op_type", "a list of at least one operator type")
        if self.subgraph_json is not None:
            given = self.include_layers is not None or self.exclude_layers is not None
            self.need(not given, "subgraph_json", "None beside include_layers and exclude_layers: it names its own")

    def targets(self) -> list[tuple[QLayerConfig | LayerSpec | None, tuple[str, ...] | None]]:
        """(specs, the layers that may get them or ``None`` for all) of every target.

        Raises:
            ConfigError: no target, or one that is not a layer configuration.
        """
        given = self.target_layer_config
        if isinstance(given, One):
            return [(self._layer(given), None)]
        if isinstance(given, Mapping) and given:
            return [(self._layer(one), tuple(names)) for one, names in given.items()]
        if isinstance(given, (list, tuple)) and given:
            return [(self._layer(one), None) for one in given]
        what = "it is a QLayerConfig, the name of a preset or pair of data types, a list of them, or {config: names}"
        raise ConfigError(f"AutoMixprecisionConfig: the field target_layer_config cannot be {given!r}; {what}")

    def _layer(self, one: Any) -> QLayerConfig | LayerSpec | None:
        if isinstance(one, (QLayerConfig, LayerSpec)):
            return one
        if not isinstance(one, str):
            raise ConfigError(f"AutoMixprecisionConfig: target_layer_config: {one!r} is not a QLayerConfig")
        try:
            return candidate(one)
        except ConfigError as error:
            raise ConfigError(f"AutoMixprecisionConfig: target_layer_config: {error}") from error

    def subgraphs(self) -> list[tuple[str, Subgraph]]:
        """Name and nodes of every subgraph of ``subgraph_json``.

        Raises:
            ConfigError: the file cannot be read, or is written otherwise.
        """
        where = f"AutoMixprecisionConfig: subgraph_json {str(self.subgraph_json)!r}"
        try:
            data = parse_json(read_text(str(self.subgraph_json), ConfigError, "subgraph_json"), where, ConfigError)
            listed = [(o["name"], tuple(o["start_nodes"]), tuple(o["end_nodes"])) for o in data["subgraphs"]]
            if not all(_are_names(o["name"], o["start_nodes"], o["end_nodes"]) for o in data["subgraphs"]):
                raise TypeError("name is text, start_nodes and end_nodes are lists of names")
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f'{where} must hold {{"subgraphs": [{{name, start_nodes, end_nodes}}]}}: {error}'
            ) from error
        extra = set(data) - {"quantized", "num_subgraphs", "subgraphs"}
        if extra:
            raise ConfigError(f"{where}: {unknown('key', min(extra), ['quantized', 'num_subgraphs', 'subgraphs'])}")
        if not listed or data.get("num_subgraphs", len(listed)) != len(listed):
            raise ConfigError(f"{where}: it lists {len(listed)} subgraphs and num_subgraphs is another number")
        if data.get("quantized"):
            raise ConfigError(f"{where}: quantized is true; name the nodes of the float model, and set it to false")
        return [(name, Subgraph(start, end)) for name, start, end in listed]


def _are_names(name: object, *lists: object) -> bool:
    """A text, and lists of texts."""
    return isinstance(name, str) and all(
        isinstance(one, list) and all(isinstance(node, str) for node in one) for one in lists
    )
