"""From a configuration to a running engine: find the files, resolve each "auto", load the models, build the engine."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.config import FP8_KV, EngineConfig, ResolvedConfig, is_open
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.models import (
    DraftConfig,
    DraftSpec,
    ModelConfig,
    draft_verifier,
    load_target,
    read_config,
)
from espalier.models.layer_loading import layer_specs_of
from espalier.models.loading import mtp_prefixes
from espalier.models.weight_count import WeightCount, stored_weights
from espalier.speculate.drafters.registry import (
    draft_algorithm,
    drafter_without_files,
    load_draft,
    own_draft,
    read_draft,
)
from espalier.startup.build import Loaded, assemble, cache_size
from espalier.startup.checkpoints import BUNDLED, find_draft, find_target
from espalier.startup.measure_chip import measure_chip
from espalier.startup.measure_memory import measure_pages
from espalier.startup.resolve import (
    Facts,
    choose_algorithm,
    choose_device,
    free_memory,
    requested_algorithm,
    resolve,
)
from espalier.startup.threads import thread_facts, use_threads
from espalier.startup.tree_cost import pass_weights

log = logging.getLogger("espalier")


@dataclass(frozen=True)
class Checkpoint:
    """The model files of one engine and their parsed configs.  No weights are loaded yet.  spec: of the drafter."""

    target_path: Path
    target: ModelConfig
    draft_path: Path | None
    draft: DraftConfig | None
    spec: DraftSpec


def find(config: EngineConfig) -> Checkpoint:
    """Find the files of target and draft, and read their configs.

    Raises EspalierError for files that are missing, a model that is not supported, or a draft that does not fit.
    """
    requested = requested_algorithm(config)  # before the search, which may download
    draft_path = find_draft(config.draft, requested) if config.draft is not None else None
    model = _model_name(config, draft_path)
    target_path = find_target(model)
    target = read_config(target_path, config.model_overrides)
    used_draft = None
    if not drafter_without_files(requested):
        used_draft = draft_path or _bundled_draft(model, requested) or own_draft(target_path, target, requested)
    algorithm = choose_algorithm(config, None if used_draft is None else draft_algorithm(used_draft))
    if used_draft is None:
        if draft_path is not None:
            log.info("draft %s is not loaded: algorithm is %s", draft_path, algorithm)
        return Checkpoint(target_path, target, None, None, DraftSpec(algorithm))
    draft = read_draft(used_draft, target)
    return Checkpoint(target_path, target, used_draft, draft, draft.spec)


def _bundled_draft(model: str, algorithm: str) -> Path | None:
    """The draft of the bundled model; None for other models."""
    return find_draft(BUNDLED, algorithm) if model == BUNDLED else None


def _model_name(config: EngineConfig, draft_path: Path | None) -> str:
    """The model that the user names, else the target that the draft names, else the bundled model."""
    if str(config.model) != "auto":
        return str(config.model)
    if draft_path is None or str(config.draft) == BUNDLED:
        return BUNDLED
    verifier = draft_verifier(draft_path)
    if verifier is None:
        raise EspalierError(
            f"draft={str(config.draft)!r} does not name its target (speculators_config.verifier); "
            "give the target too, as model (--model)"
        )
    log.info("model: %s, named by the draft", verifier)
    return verifier


def resolve_config(config: EngineConfig, checkpoint: Checkpoint) -> ResolvedConfig:
    """Resolve each "auto" of `config` for this machine and these files."""
    device = choose_device(config)
    facts = Facts(
        free_bytes=free_memory(device),
        weights=_weights_of(checkpoint),
        stored_dtype=checkpoint.target.raw.get("dtype") or checkpoint.target.raw.get("torch_dtype"),
        max_position=checkpoint.target.max_position,
        layer_specs=(*layer_specs_of(checkpoint.target), *checkpoint.spec.layers),
        hidden_size=checkpoint.target.hidden_size,
        num_layers=checkpoint.target.num_layers,
        chip=measure_chip(device) if device.type == "cuda" else None,
        threads=thread_facts(),
        pass_weights=pass_weights(checkpoint.target, checkpoint.draft),
        declared_kv_dtype=checkpoint.target.declared_kv_dtype if is_open(config.kv_dtype) else None,
    )
    draft = str(checkpoint.draft_path) if checkpoint.draft_path else None
    return resolve(config, str(checkpoint.target_path), draft, checkpoint.spec, device, facts)


def build_engine(
    resolved: ResolvedConfig, checkpoint: Checkpoint, requested_pages: int | None
) -> tuple[Engine, ResolvedConfig]:
    """Load the models and build the engine.  Returns the engine and its final configuration.

    On a GPU, the number of pages that fit in addition to the loaded models is measured.
    requested_pages: the user's num_pages, checked against that number; None: use as many pages as fit.
    Raises EspalierError naming what does not fit.
    """
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    if device.type == "cpu":
        use_threads(resolved.threads)
    how = {"dtype": dtype, "device": device, "position_rows": resolved.layout.position_rows}
    target = load_target(
        checkpoint.target_path, capture=checkpoint.spec.capture, overrides=resolved.model_overrides, **how
    )
    draft = None if checkpoint.draft_path is None else load_draft(checkpoint.draft_path, target, **how)
    return build_engine_of_models(Loaded(resolved, target, draft), requested_pages)


def build_engine_of_models(
    loaded: Loaded, requested_pages: int | None, keep_graphs: bool = False
) -> tuple[Engine, ResolvedConfig]:
    """The part of `build_engine` after the models are loaded.  keep_graphs: see CudaExecutor."""
    if loaded.device.type == "cuda":
        loaded = loaded.with_pages(measure_pages(loaded, requested_pages))
    config = loaded.config
    log.info("resolved configuration\n%s", config.block())
    log.info("%s", cache_size(loaded.specs, config.num_pages, config.layout.page_size, loaded.dtype))
    if config.kv_dtype == FP8_KV and not any(loaded.target.kv_scales):
        log.warning("kv_dtype=%s: the checkpoint has no K/V scales; 1 is used, so values above 448 are clamped", FP8_KV)
    return assemble(loaded, keep_graphs, capture_stages=True), config


def _weights_of(checkpoint: Checkpoint) -> WeightCount:
    # The target's own MTP layers are read if they are the draft, and then counted with it.
    is_own = checkpoint.draft_path == checkpoint.target_path
    unread = () if is_own else mtp_prefixes(checkpoint.target)
    target = stored_weights(checkpoint.target_path, checkpoint.target.formats, unread)
    if is_own or checkpoint.draft is None or checkpoint.draft_path is None:
        return target
    return target + stored_weights(checkpoint.draft_path, checkpoint.draft.layer.formats)
