"""What vLLM's own classes make of checkpoints, on a CPU: ``python vllm_judge.py FOLDER...``, one line of JSON each.

Runs in an environment of its own, that ``vllm_table.py`` makes; nothing of quark is imported. A folder is read in a
process of its own:

    config        its ``config.json``
    parameters    the classes and schemes of every layer
    weights       the files, by the model's own ``load_weights``
    caches        the scales of keys and values, if FOLDER.caches.pt has them: {name: value or values of channels}
    experts       decoded from vLLM's parameters by ``vllm_experts.py`` (int4 after it is processed)
    processed     ``process_weights_after_loading`` of every layer
    run           the linear layers, by vLLM's emulation and by what ``vllm_plain.py`` has: outputs against those of
                  FOLDER.expected.pt: {name in the file: (input [n, in], output [n, out], output [n, out] of activations
                  that are not quantized)}

For types that a CPU has no kernel for, vLLM's emulation kernels are offered; where there is none either, the classes
and the loading are judged and the layer is counted as not run, with the class that was asked for.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import re
import sys
import traceback
from typing import Any

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="CRITICAL", MASTER_ADDR="127.0.0.1")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import vllm_experts  # noqa: E402
import vllm_plain  # noqa: E402
from safetensors import safe_open  # noqa: E402

# vLLM's own: scales without a quantized cache, and zero points that it discards (QuarkW8A8Int8MoEMethod)
DEFAULTS = re.compile(r"\.attn\.([kqv]|prob)_(scale|zero_point)$|\.w(13|2)_input_zero_point$")
INPUTS = re.compile(r"input_scale$")

CAST = 2**-8  # the parameters of scales have the type of the model, bfloat16


class Judged:
    """One folder."""

    def __init__(self, folder: str, port: int) -> None:
        self.folder, self.port, self.stage = folder.rstrip("/"), port, "config"
        self.found: dict[str, Any] = {"folder": "/".join(self.folder.split("/")[-2:]), "ok": False}

    def verdict(self) -> dict[str, Any]:
        """All stages, up to the first that raises."""
        try:
            for self.stage in ("config", "parameters", "weights", "caches", "experts", "processed", "run"):
                getattr(self, self.stage)()
            return self.found
        except Exception as error:  # whatever vLLM raises is what is asked for
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
            at = f"{os.path.basename(last.filename)}:{last.lineno}"
            return {**self.found, "stage": self.stage, "error": text, "at": at}

    def config(self) -> None:
        """vLLM's configuration."""
        from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, VllmConfig

        made = ModelConfig(model=self.folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
        self.settings = VllmConfig(
            model_config=made,
            device_config=DeviceConfig(device="cpu"),
            load_config=LoadConfig(),
            cache_config=CacheConfig(cache_dtype="auto"),
        )

    def parameters(self) -> None:
        """The model with its parameters."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.model_executor.model_loader.utils import initialize_model

        with set_current_vllm_config(self.settings):
            os.environ["MASTER_PORT"] = str(self.port)
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{self.port}", 0, "gloo")
            initialize_model_parallel(1, 1)
            torch.set_default_dtype(torch.bfloat16)
            self.model = initialize_model(vllm_config=self.settings, model_config=self.settings.model_config)
        modules = [one for _, one in self.model.named_modules()]
        schemes = {type(one.scheme).__name__ for one in modules if getattr(one, "scheme", None) is not None}
        experts = {type(one.quant_method).__name__ for one in modules if "RoutedExperts" in type(one).__name__}
        self.found |= {"schemes": sorted(schemes), "experts": sorted(experts)}

    def weights(self) -> None:
        """The files in the parameters."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.settings):
            loaded = set(self.model.load_weights(tensors(self.folder)) or ())
            names = {name for name, _ in self.model.named_parameters()}
            missing = sorted(name for name in names - loaded if not DEFAULTS.search(name))
            loaded |= self.filled(missing) if missing else set()
        missing = [name for name in missing if name not in loaded]
        cache = sum(1 for name in loaded if ".attn." in name and DEFAULTS.search(name))
        self.found |= {"loaded": len(loaded), "cache_scales": cache}
        if missing:
            raise ValueError(f"never loaded: {', '.join(missing[:4])}")

    def filled(self, names: list[str]) -> set[str]:
        """Those of ``names`` that the files fill whole, though the loader does not say so (granitemoehybrid's experts).

        The files are loaded over zeros, and again over other bytes: what was filled is the same both times. Scales of
        inputs stay one, of which vLLM asks that it is there, until they are filled.
        """
        known, made = dict(self.model.named_parameters()), []
        for byte in (0, 0x55):
            for name in names:
                known[name].data.fill_(1) if INPUTS.search(name) else bytes_of(known[name]).fill_(byte)
            self.model.load_weights(tensors(self.folder))
            made.append([bytes_of(known[name]).clone() for name in names])
        same = {name for name, *values in zip(names, *made, strict=True) if torch.equal(*values)}
        return {name for name in same if not INPUTS.search(name) or bool((known[name] != 1).all())}

    def caches(self) -> None:
        """The scales of keys and values are those that were evaluated, layer by layer."""
        path = f"{self.folder}.caches.pt"
        if not os.path.exists(path):
            return
        wanted, loaded = torch.load(path), dict(self.model.named_parameters())
        for role in "kv":
            ours = [wanted[name] for name in sorted(wanted, key=vllm_experts.natural) if f".{role}_proj." in name]
            scales = {name: value for name, value in loaded.items() if name.endswith(f".{role}_scale")}
            theirs = [scales[name] for name in sorted(scales, key=vllm_experts.natural)]
            if len(ours) != len(theirs):
                raise ValueError(f"{len(ours)} scales of {role} were written, and {len(theirs)} layers have one")
            for place, (channels, heads) in enumerate(zip(ours, theirs, strict=True)):
                if channels.dim() and heads.numel() == 1:
                    raise ValueError(f"scale of {role} of attention layer {place}: one, and one per head was evaluated")
                repeated = heads.flatten().repeat_interleave(max(channels.numel() // heads.numel(), 1))
                for a, b in zip(channels.flatten().tolist(), repeated.tolist(), strict=True):
                    if not math.isclose(a, b, rel_tol=CAST):
                        raise ValueError(
                            f"scale of {role} of attention layer {place}: {b:.6g}, and {a:.6g} was evaluated"
                        )
        self.found["cache_values"] = len(wanted)

    def experts(self) -> None:
        """Each expert is what was evaluated."""
        compared, left = vllm_experts.compare(self.model, self.expected())
        self.found |= {"experts_right": compared, **({"experts_left": left} if left else {})}

    def expected(self) -> dict[str, Any]:
        """What was evaluated, by names in the file."""
        path = f"{self.folder}.expected.pt"
        return torch.load(path) if os.path.exists(path) else {}

    def processed(self) -> None:
        """Every layer made ready to run; what needs a kernel that a CPU has not is counted."""
        from vllm.config import set_current_vllm_config

        self.unready: dict[str, str] = {}
        with set_current_vllm_config(self.settings):
            for name, layer in self.model.named_modules():
                method = getattr(layer, "quant_method", None)
                if method is None or not hasattr(method, "process_weights_after_loading"):
                    continue
                try:
                    method.process_weights_after_loading(layer)
                except Exception as error:  # as above
                    self.unready[name] = f"{type(method).__name__}: {type(error).__name__}: {str(error)[:120]}"

    def run(self) -> None:
        """Linear layers against what was evaluated; and experts that could not be decoded before."""
        expected = self.expected()
        if self.found.get("experts_left"):
            self.found.pop("experts_left")
            self.experts()
        apart: dict[str, tuple[float, float]] = {}
        unrun = dict(self.unready)
        for name, layer in self.model.named_modules():
            wanted = self.expected_of(name, expected)
            if wanted is None or name in unrun:
                continue
            try:
                found = layer(wanted[0].to(torch.bfloat16))
            except Exception as error:  # a kernel that is not there says so in many ways
                unrun[name] = f"{type(error).__name__}: {str(error)[:120]}"
                continue
            found = (found[0] if isinstance(found, tuple) else found).float()
            apart[name] = (difference(found, wanted[1]), difference(found, wanted[2]))
        worst = max(apart.items(), key=lambda item: item[1][0], default=("", (0.0, 0.0)))
        plain = max((error for _, error in apart.values()), default=0.0)
        self.found |= {"ok": True, "run": len(apart), "worst": round(worst[1][0], 5), "where": worst[0]}
        self.found["weights"] = round(plain, 5)
        if unrun:
            self.found["unrun"] = {"count": len(unrun), "first": "; ".join(next(iter(unrun.items())))}

    def inside(self, name: str) -> str:
        """The name in vLLM of a layer in a file, whose own part stays: vLLM's tables would join it with others."""
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        head, _, last = name.rpartition(".")
        found = mapper.apply_list([f"{head}.layer"]) if mapper and head else []
        return f"{found[0].removesuffix('.layer')}.{last}" if found else name

    def expected_of(self, name: str, expected: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
        """Input and outputs of a layer; of one that vLLM fused, those of its parts."""
        head, _, last = name.rpartition(".")
        parts = getattr(self.model, "packed_modules_mapping", {}).get(last, [last])
        known = {self.inside(key): key for key in expected}
        found = [expected.get(known.get(f"{head}.{part}", "")) for part in parts]
        if any(one is None for one in found):
            return None
        pairs = list(zip(parts, found, strict=True))
        outputs = ([self.turned(part, one[place]) for part, one in pairs] for place in (1, 2))  # type: ignore[index]
        return found[0][0], *(torch.cat(one, -1) for one in outputs)  # type: ignore[index]

    def turned(self, part: str, output: torch.Tensor) -> torch.Tensor:
        """An output [n, out] in the order of vLLM's own rows (llama4: queries and keys)."""
        turn = getattr(self.model, "permute_qk_weight_for_rotary", None)
        return output if turn is None else turn(f"{part}.weight", output.T.contiguous())[1].T


def bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter, [bytes]."""
    return parameter.data.reshape(-1).view(torch.uint8)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((found - wanted.float()).norm() / wanted.float().norm())


def tensors(folder: str):  # type: ignore[no-untyped-def]
    """(name, value) of everything in the files."""
    for file in sorted(glob.glob(f"{folder}/*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  not a mapping
                yield key, opened.get_tensor(key)


def main() -> None:
    """A process for each folder, made after the imports."""
    vllm_plain.offer()
    import vllm.config  # noqa: F401  once, before the processes part

    for number, folder in enumerate(sys.argv[1:]):
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            print(json.dumps(Judged(folder, 29600 + (os.getpid() + number) % 2000).verdict()), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps({"folder": folder, "ok": False, "stage": "process", "error": "it ended"}), flush=True)


if __name__ == "__main__":
    main()
