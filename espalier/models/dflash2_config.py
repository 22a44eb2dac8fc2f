"""Reads the config.json of DFlash 2 drafts, in z-lab's form and in speculators'.

They are DFlash drafts (block_config.py) with convolutions around each sublayer and a candidate selector (dflash2.py).
The two forms differ as DFlash's two forms do, and also here:

- z-lab: fields are in dflash_config or at the top level.  `is_causal` says which layers are causal in the block;
  without that field, those with a sliding window are.  A window counts from each row's own position.  Embeddings and
  logits may be scaled, and logits capped.
- speculators: layers with a sliding window are causal in the block only if sliding_window_non_causal is false.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.models.block_config import (
    BlockConfig,
    block_spec,
    layer_of,
    own_fields,
    read_speculators,
    refuse_misfit,
)
from espalier.models.config import ModelConfig, Raw
from espalier.models.draft_fields import Fields

ARCHITECTURES = ("DFlash2DraftModel",)
SPECULATORS_TYPES = ("dflash2",)
# The package's defaults.
SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SCALES = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
DFLASH_FIELDS = ("target_layer_ids", "mask_token_id", "block_size", *SIZES, *SCALES)
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """A DFlash 2 draft's config.json, checked against its target's.

    conv_taps: rows that a convolution reads, its own included; conv_group: adjacent channels that share a coefficient.
    selector_rank: of the codebooks; selector_topk: tokens of a depth that the selector scores.
    embedding_scale, logit_scale: 1 for none; logit_cap: tanh(logit / cap) · cap, None for none.
    """

    conv_taps: int
    conv_group: int
    selector_rank: int
    selector_topk: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def conv_groups(self) -> int:
        return self.layer.hidden_size // self.conv_group


def read_dflash2(path: Path, raw: Raw, target: ModelConfig) -> DFlash2Config:
    """Read the config.json `raw` of the draft at `path` and check it against its target's config.  Loads no weights.

    Raises EspalierError if the draft does not fit this target, or is of a form that is not built.
    """
    given = Fields(raw, path)
    is_speculators = given.get("speculators_model_type") is not None
    config = (_read_speculators if is_speculators else _read_z_lab)(given, target)
    refuse_misfit(config, target, path)
    _refuse_sizes(config, given)
    return config


def _read_z_lab(top: Fields, target: ModelConfig) -> DFlash2Config:
    given = own_fields(top, DFLASH_FIELDS).over({"block_size": DEFAULT_BLOCK_SIZE, **top.raw})
    of_layer = {name: value for name, value in top.raw.items() if name not in SCALES}
    layer, is_causal = layer_of(Fields(of_layer, top.path), target), top.get("is_causal")
    causal = tuple(window is not None if is_causal is None else bool(is_causal) for window in layer.windows)
    spec = block_spec(
        *(given, layer),
        capture=tuple(k + 1 for k in given.layers("target_layer_ids")),
        first_proposing=1,
        causal=causal,
        algorithm="dflash2",
        windows_from_root=False,
    )
    for window, in_order in zip(layer.windows, causal, strict=True):
        if window is not None and window < spec.block_rows and not in_order:
            raise given.error(
                f"sliding_window = {window} is below block_size = {spec.block_rows} in a layer that is not causal, "
                "which is not supported; use a draft with a wider window"
            )
    scale, cap, embedding_scale = map(given.number, SCALES)
    return DFlash2Config(
        layer=layer,
        spec=spec,
        embedding_scale=1.0 if embedding_scale is None else embedding_scale,
        logit_scale=1.0 if scale is None else scale,
        logit_cap=cap if cap is not None and cap > 0 else None,
        **_sizes(given),
    )


def _read_speculators(given: Fields, target: ModelConfig) -> DFlash2Config:
    base = read_speculators(given.over({"sliding_window_non_causal": True}), target)
    return DFlash2Config(layer=base.layer, spec=replace(base.spec, algorithm="dflash2"), **_sizes(given.over(SIZES)))


def _sizes(given: Fields) -> dict[str, Any]:
    taps, group, rank, topk = (given.count(name, least=1) for name in SIZES)
    return {"conv_taps": taps, "conv_group": group, "selector_rank": rank, "selector_topk": topk}


def _refuse_sizes(config: DFlash2Config, given: Fields) -> None:
    """Raises EspalierError for sizes that do not fit one another."""
    hidden, vocab = config.layer.hidden_size, config.layer.vocab_size
    wrong = {
        f"conv_group_size = {config.conv_group} does not divide the hidden size {hidden}": hidden % config.conv_group,
        f"conv_kernel_size = {config.conv_taps} is above block_size = {config.spec.block_rows}": (
            config.conv_taps > config.spec.block_rows
        ),
        f"selector_top_k = {config.selector_topk} is above the vocabulary of {vocab}": config.selector_topk > vocab,
        f"draft_vocab_size = {config.spec.vocab_size} is not the vocabulary of {vocab}, which a DFlash 2 draft needs": (
            config.spec.vocab_size != vocab
        ),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise given.error(f"{what}; correct the config, or use another draft")
