"""Random checkpoints with multi-token prediction layers: of a target itself, and heads in the speculators format."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.builders import SHARING, make_target
from tests.folders import new_folder

LAYERS = 3
# The last part of a layer's names, in the two ways of storing them.
NEXTN_LAYERS = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
NAMED = {
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}
# Beside the layer, one each for all modules.
SHARED = {
    "embed_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "project": "fc",
    "norm": "norm",
}
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
OWN = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "mimo", *QWEN)
PER_LAYER = ("layer_types", "mlp_layer_types", "mlp_only_layers", "indexer_types")


@lru_cache
def mtp_directories(
    family: str, modules: int, form: str = "chain", window: int | None = None, vocab: int = 16
) -> tuple[Path, Path]:
    """(target, draft), made once a process: the same directory for a family whose checkpoints have MTP layers, else a
    head.  family: as make_target takes it, or "mimo"."""
    root = new_folder("mtp-")
    slides = {} if window is None else {"sliding_window": window, "use_sliding_window": True}
    fields: dict[str, Any] = {"layers": LAYERS + modules, "seed": 40, "vocab": vocab, **slides}
    fields |= types_of(family, modules)
    target = make_target(root / "target", "qwen2" if family == "mimo" else family, **fields)
    weights, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    own = {name: tensor for name, tensor in weights.items() if layer_of(name) >= LAYERS}
    weights = {name: tensor for name, tensor in weights.items() if name not in own}
    config |= {"num_hidden_layers": LAYERS}
    config |= {name: config[name][:LAYERS] for name in PER_LAYER if isinstance(config.get(name), list)}
    if family == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    has_own = family.removesuffix("_dense").partition("_topk")[0] in OWN
    config["num_nextn_predict_layers"] = modules if has_own else 0
    prefix, names = "mtp_layers.{}.", NAMED
    if has_own:
        prefix, names = ("model.mtp_layers.{}.", NAMED) if family == "mimo" else ("model.layers.{}.", NEXTN_LAYERS)
        prefix, names = ("mtp.layers.{}.", SHARED) if family in QWEN else (prefix, names)
        config["mtp_form"] = form
    first = LAYERS if names is NEXTN_LAYERS else 0
    layers = {f"{prefix.format(first + layer_of(name) - LAYERS)}{after(name)}": value for name, value in own.items()}
    generator, hidden = torch.Generator().manual_seed(41), config["hidden_size"]
    for module in range(modules):
        layers |= joined("mtp." if names is SHARED else prefix.format(first + module), names, hidden, generator)
    if has_own:
        weights |= layers
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors")
    return target, target if has_own else write_head(root / "draft", config, modules, form, layers)


def types_of(family: str, modules: int) -> dict[str, Any]:
    """The types of a target's layers and of its MTP layers, which have attention."""
    linear, full = "linear_attention", "full_attention"
    if family.startswith("glm_moe_dsa"):
        return {"indexer_types": [*SHARING, *["full"] * modules]}
    return {"layer_types": [linear, full, linear, *[full] * modules]} if family in QWEN else {}


def without_target(path: Path, alone: Path, prefix: str) -> Path:
    """A copy of a target's directory with the weights of its MTP layers alone."""
    shutil.copytree(path, alone)
    weights = load_file(path / "model.safetensors")
    save_file({name: each for name, each in weights.items() if name.startswith(prefix)}, alone / "model.safetensors")
    return alone


def write_head(path: Path, target: dict[str, Any], modules: int, form: str, weights: dict[str, Tensor]) -> Path:
    path.mkdir()
    fields = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": None}},
        "transformer_layer_config": target,
        "num_nextn_predict_layers": modules,
        "mtp_form": form,
    }
    (path / "config.json").write_text(json.dumps(fields))
    save_file(weights, path / "model.safetensors")
    return path


def layer_of(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def after(name: str) -> str:
    """The name of a layer's weight behind its number."""
    return name.split(".", 3)[3]


def joined(prefix: str, names: dict[str, str], hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The weights of a module beside its decoder layer's."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    norms = {f"{prefix}{names[n]}.weight": 1 + 0.2 * drawn(hidden) for n in ("embed_norm", "hidden_norm", "norm")}
    return norms | {f"{prefix}{names['project']}.weight": 1.2 * drawn(hidden, 2 * hidden) / (2 * hidden) ** 0.5}
