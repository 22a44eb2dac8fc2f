"""Reads the config.json of block drafts: DFlash, JetSpec and DSpark, in their publishers' forms and in speculators'.

Layers and tensors are the same in all forms.  The forms differ in four facts, which this file reads:

| form | named by | layer id k means | row that proposes depth 1 | a block row sees |
| --- | --- | --- | --- | --- |
| DFlash (z-lab) | DFlashDraftModel | output of layer k | the first mask | the whole block |
| JetSpec | DFlashDraftModel with causal_head | output of layer k | the first mask | itself and earlier rows |
| DSpark (DeepSpec) | Qwen3DSparkModel | output of layer k, -1 the embedding | the root | the whole block |
| speculators | speculators_model_type | input of layer k | by sample_from_anchor | by layer |

In speculators' form, layers with a sliding window are causal in the block unless `sliding_window_non_causal`, and every
row of a block sees the W context rows before the root (not W rows before itself).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError
from espalier.models import qwen3
from espalier.models.config import ModelConfig, Raw, parse
from espalier.models.draft import DraftSpec, refuse_sizes
from espalier.models.loading import layer_specs_of

Z_LAB, DEEP_SPEC = "DFlashDraftModel", "Qwen3DSparkModel"
ARCHITECTURES = (Z_LAB, DEEP_SPEC)
SPECULATORS_TYPES = ("dflash", "dspark")
# Fields of dflash_config that are read.
DFLASH_FIELDS = ("target_layer_ids", "mask_token_id", "block_size", "causal_head", "target_hidden_size", "draft_shift")
# z-lab's tensor for a mask that is not a token of the vocabulary.
MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(frozen=True)
class BlockConfig:
    """A block draft's config.json, checked against its target's.

    layer: the config of its decoder layers.
    capture: target layers whose inputs are fused, in concatenation order.
    first_proposing, causal, mask_token: as in BlockModel (espalier/models/draft.py).
    edge_rank: the rank of the Markov head; 0: there is none.
    windows_from_root: as in BlockModel; if true, the windows of `layer` count context rows before the root.
    """

    algorithm: ClassVar[str] = "block"

    layer: ModelConfig
    draft_vocab: int
    capture: tuple[int, ...]
    block_size: int
    mask_token: int
    first_proposing: int
    causal: tuple[bool, ...]
    edge_rank: int = 0
    windows_from_root: bool = True

    @cached_property
    def spec(self) -> DraftSpec:
        return DraftSpec(
            algorithm=self.algorithm,
            layers=tuple(_from_root(spec) if self.windows_from_root else spec for spec in layer_specs_of(self.layer)),
            block_rows=self.block_size,
            max_steps=self.block_size - self.first_proposing,
            reads="captured",
            capture=self.capture,
            hidden_size=self.layer.hidden_size,
            vocab_size=self.draft_vocab,
        )


def _from_root(spec: LayerSpec) -> LayerSpec:
    """The spec whose window, seen from the root's position, holds the W rows before the root, and the root."""
    return spec if spec.window is None else LayerSpec(spec.heads, spec.keeps, spec.window + 1, spec.scale)


def read_block(path: Path, raw: Raw, target: ModelConfig) -> BlockConfig:
    """Read the config.json `raw` of the draft at `path` and check it against its target's config.  Loads no weights.

    Raises EspalierError if the draft does not fit this target, or is of a form that is not built.
    """
    if raw.get("speculators_model_type") is not None:
        config = read_speculators(path, raw, target)
    elif (raw.get("architectures") or [None])[0] == DEEP_SPEC:
        config = _read_deep_spec(path, raw, target)
    else:
        config = _read_z_lab(path, raw, target)
    refuse_misfit(config, target, path)
    return config


def _read_z_lab(path: Path, raw: Raw, target: ModelConfig) -> BlockConfig:
    own: Mapping[str, Any] = raw.get("dflash_config") or {}
    refuse_other_fields(own, DFLASH_FIELDS, path)
    refuse_mask_embedding(path)
    layer = layer_of(raw, target, path)
    _refuse_windows(layer, path)
    ids = own.get("target_layer_ids") or _default_ids(target.num_layers, layer.num_layers)
    hidden = own.get("target_hidden_size")
    return BlockConfig(
        layer=_with_target_hidden(layer, hidden, path),
        draft_vocab=layer.vocab_size,
        capture=tuple(k + 1 for k in ids),
        block_size=count_of({**own, **raw}, "block_size", path),
        mask_token=token_of({**own, **raw}, layer, path),
        first_proposing=1,
        causal=(bool(own.get("causal_head", False)),) * layer.num_layers,
    )


def _read_deep_spec(path: Path, raw: Raw, target: ModelConfig) -> BlockConfig:
    layer = layer_of(raw, target, path)
    _refuse_windows(layer, path)
    return BlockConfig(
        layer=layer,
        draft_vocab=layer.vocab_size,
        capture=tuple(k + 1 for k in ids_of(raw, "target_layer_ids", path)),
        block_size=count_of(raw, "block_size", path),
        mask_token=token_of(raw, layer, path),
        first_proposing=0,
        causal=(False,) * layer.num_layers,
        edge_rank=_edge_rank(raw, path),
    )


def read_speculators(path: Path, raw: Raw, target: ModelConfig) -> BlockConfig:
    """As read_block, of speculators' form; not yet checked against the target."""
    layer = layer_of(raw.get("transformer_layer_config") or {}, target, path)
    is_dspark = raw["speculators_model_type"] == "dspark"
    slides_causally = not raw.get("sliding_window_non_causal", False)
    return BlockConfig(
        layer=_with_target_hidden(layer, raw.get("target_hidden_size"), path),
        draft_vocab=raw.get("draft_vocab_size") or layer.vocab_size,
        capture=ids_of(raw, "aux_hidden_state_layer_ids", path),
        block_size=count_of(raw, "block_size", path),
        mask_token=token_of(raw, layer, path),
        first_proposing=0 if raw.get("sample_from_anchor", is_dspark) else 1,
        causal=tuple(window is not None and slides_causally for window in layer.windows),
        edge_rank=_edge_rank({"markov_rank": 256, **raw}, path) if is_dspark else 0,
    )


def layer_of(raw: Mapping[str, Any], target: ModelConfig, path: Path) -> ModelConfig:
    if raw.get("model_type") != qwen3.FAMILY.model_type:
        raise EspalierError(
            f"{path}: a block draft's layers of model_type {raw.get('model_type')!r} are not supported; supported: "
            f"{qwen3.FAMILY.model_type}"
        )
    return parse({"max_position_embeddings": target.max_position, **raw}, qwen3.FAMILY, path)


def _default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """z-lab's choice: from layer 1 to the fourth from the last, evenly spaced."""
    if num_layers == 1:
        return [num_target_layers // 2]
    last = num_target_layers - 3
    return [round(1 + i * (last - 1) / (num_layers - 1)) for i in range(num_layers)]


def ids_of(raw: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    ids = raw.get(name)
    if not ids or not all(isinstance(i, int) for i in ids):
        raise EspalierError(f"{path}: {name} = {ids!r}; a list of target layers is needed; correct the config")
    return tuple(ids)


def count_of(raw: Mapping[str, Any], name: str, path: Path, least: int = 2) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise EspalierError(f"{path}: {name} = {value!r}; an integer of at least {least} is needed; correct the config")
    return value


def token_of(raw: Mapping[str, Any], layer: ModelConfig, path: Path) -> int:
    token = raw.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < layer.vocab_size:
        raise EspalierError(
            f"{path}: mask_token_id = {token!r}; a token of the vocabulary, 0 .. {layer.vocab_size - 1}, is needed; "
            "correct the config"
        )
    return token


def _edge_rank(raw: Mapping[str, Any], path: Path) -> int:
    rank, kind = raw.get("markov_rank") or 0, raw.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise EspalierError(
            f"{path}: markov_head_type = {kind!r} is not supported, only 'vanilla'; use a draft with such a head"
        )
    return int(rank)


def refuse_other_fields(own: Mapping[str, Any], supported: Sequence[str], path: Path) -> None:
    """Refuse fields of dflash_config that are not read: any of them would change the computation."""
    for name, value in own.items():
        if name not in supported or (name == "draft_shift" and value):
            raise EspalierError(
                f"{path}: dflash_config has {name} = {value!r}, which is not supported; supported fields are "
                f"{', '.join(supported)}; use a draft without it"
            )


def refuse_mask_embedding(path: Path) -> None:
    if (path / MASK_EMBEDDING).exists():
        raise EspalierError(
            f"{path} holds {MASK_EMBEDDING}, a mask that is no token of the vocabulary; this is not supported: use a "
            "draft whose mask_token_id is a token"
        )


def _with_target_hidden(layer: ModelConfig, hidden: int | None, path: Path) -> ModelConfig:
    if hidden not in (None, layer.hidden_size):
        raise EspalierError(
            f"{path}: target_hidden_size = {hidden} differs from the draft's hidden_size = {layer.hidden_size}, which "
            "is not supported; use a draft of the target's hidden size"
        )
    return layer


def _refuse_windows(layer: ModelConfig, path: Path) -> None:
    if any(layer.windows):
        raise EspalierError(
            f"{path}: sliding windows are supported for block drafts in speculators' form only, because public code "
            "disagrees about them in this one; use a draft with full attention, or convert it with speculators"
        )


def refuse_misfit(config: BlockConfig, target: ModelConfig, path: Path) -> None:
    refuse_sizes(path, target, config.layer.hidden_size, config.layer.vocab_size, config.draft_vocab)
    # Public codes disagree: some norm the last hidden state, some do not.
    outside = [layer for layer in config.capture if not 0 <= layer < target.num_layers]
    if outside:
        raise EspalierError(
            f"{path} fuses the input of layer {outside[0]} of its target, whose layers are 0 .. "
            f"{target.num_layers - 1}; use the target that the draft was trained for"
        )
