"""Warns of what costs more on a CPU than the checkpoint suggests: quantised weights, and 16-bit ones."""

import logging

from espalier.config import EngineConfig, ResolvedConfig, is_open
from espalier.models import ModelConfig
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.startup.load import Checkpoint

# Matrices of which a quantised model quantises at least one.
TYPICAL = ("self_attn.o_proj", "mlp.down_proj", "mlp.experts", "mlp.experts.0.down_proj")
HALVES = ("bfloat16", "float16")
log = logging.getLogger("espalier")


def warn_of_cpu_costs(config: EngineConfig, resolved: ResolvedConfig, checkpoint: Checkpoint) -> None:
    """Log at most one warning each of stored formats and of the dtype.  config: as the user gave it."""
    if resolved.device != "cpu":
        return
    models = {"model": checkpoint.target} | ({} if checkpoint.draft is None else {"draft": checkpoint.draft.layer})
    for what, model in models.items():
        if stored := _quantised_as(model):
            log.warning(
                "the %s's weights are stored as %s, which saves memory and gains no speed on a CPU: each use converts "
                "them, and a pass may take several times as long as with the unquantised model",
                what,
                stored,
            )
            break
    stored = checkpoint.target.raw.get("dtype") or checkpoint.target.raw.get("torch_dtype")
    is_bundled = checkpoint.target_path == BUNDLED_FILES / "target"
    if is_open(config.dtype) and stored in HALVES and not is_bundled:
        log.warning(
            "the model is stored in %s and runs in %s on a CPU, with twice the memory for its weights; set dtype to "
            "choose another",
            stored,
            resolved.dtype,
        )


def _quantised_as(model: ModelConfig) -> str | None:
    """The name of the format of a model's quantised weights; None if all are dense."""
    formats = (model.formats(f"model.layers.0.{name}") for name in TYPICAL)
    return next((each.name for each in formats if each != DENSE_FORMAT), None)
