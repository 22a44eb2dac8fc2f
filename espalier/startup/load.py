"""From a configuration to a running engine: find the files, resolve what is open, load, assemble."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from espalier.cache.kv import bytes_per_token
from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import chip
from espalier.layout import RoundLayout
from espalier.models import (
    CausalLM,
    DraftConfig,
    DraftModel,
    DraftSpec,
    ModelConfig,
    draft_verifier,
    load_target,
    read_config,
)
from espalier.models.loading import geometry_of
from espalier.models.weights import WeightCount, stored_weights
from espalier.speculate.drafters import WITHOUT_FILES, draft_algorithm, load_draft, read_draft
from espalier.speculate.round import ModelRunner
from espalier.startup.build import assemble, make_runner
from espalier.startup.checkpoints import BUNDLED, find_draft, find_target
from espalier.startup.measure_memory import measured_pages
from espalier.startup.resolve import (
    Facts,
    asked_algorithm,
    choose_algorithm,
    choose_device,
    free_memory,
    layout_of,
    resolve,
)
from espalier.startup.threads import thread_facts, use_threads

log = logging.getLogger("espalier")


@dataclass(frozen=True)
class Checkpoint:
    """The files of one engine, found and their configs read; nothing is loaded yet.  spec: what drafts declares."""

    target_path: Path
    target: ModelConfig
    draft_path: Path | None
    draft: DraftConfig | None
    spec: DraftSpec


def find(config: EngineConfig) -> Checkpoint:
    """Raises EspalierError for what is missing, unsupported or does not fit."""
    asked = asked_algorithm(config)  # first, as finding may download
    draft_path = find_draft(config.draft) if config.draft is not None else None
    model = _model_name(config, draft_path)
    target_path = find_target(model)
    target = read_config(target_path, config.model_overrides)
    used = None if asked in WITHOUT_FILES else draft_path or _own_draft(model)
    algorithm = choose_algorithm(config, None if used is None else draft_algorithm(used))
    if used is None:
        if draft_path is not None:
            log.info("draft %s is not loaded: algorithm is %s", draft_path, algorithm)
        return Checkpoint(target_path, target, None, None, WITHOUT_FILES[algorithm].spec)
    draft = read_draft(used, target)
    return Checkpoint(target_path, target, used, draft, draft.spec)


def _own_draft(model: str) -> Path | None:
    """Where the draft stands that a model brings.  The bundled one does."""
    return find_draft(BUNDLED) if model == BUNDLED else None


def _model_name(config: EngineConfig, draft_path: Path | None) -> str:
    """What the user names, else the target that the draft names, else the bundled model."""
    if str(config.model) != "auto":
        return str(config.model)
    if draft_path is None or str(config.draft) == BUNDLED:
        return BUNDLED
    verifier = draft_verifier(draft_path)
    if verifier is None:
        raise EspalierError(
            f"draft={str(config.draft)!r} does not name its target (speculators_config.verifier); give model="
        )
    log.info("model: %s, named by the draft", verifier)
    return verifier


def resolve_config(config: EngineConfig, found: Checkpoint) -> ResolvedConfig:
    """What `config` comes to on this machine with these files."""
    device = choose_device(config)
    facts = Facts(
        free_bytes=free_memory(device),
        weights=_weights_of(found),
        stored_dtype=found.target.raw.get("dtype") or found.target.raw.get("torch_dtype"),
        max_position=found.target.max_position,
        geometry=(*geometry_of(found.target), *found.spec.layers),
        hidden_size=found.target.hidden_size,
        num_layers=found.target.num_layers,
        chip=chip(torch.empty(0, device=device)) if device.type == "cuda" else None,
        threads=thread_facts(),
    )
    draft = str(found.draft_path) if found.draft_path else None
    return resolve(config, str(found.target_path), draft, found.spec, device, facts)


def build_engine(resolved: ResolvedConfig, found: Checkpoint, asked_pages: int | None) -> tuple[Engine, ResolvedConfig]:
    """Load the models and put the engine together.  Raises EspalierError naming what does not fit.

    On a GPU what fits beside the loaded models is measured: so many pages are taken, or asked_pages checked against
    them.  Returns what it came to.
    """
    layout = layout_of(resolved)
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    if device.type == "cpu":
        use_threads(resolved.threads)
    target = load_target(
        found.target_path,
        dtype=dtype,
        device=device,
        position_rows=layout.position_rows,
        capture=found.spec.capture,
        overrides=resolved.model_overrides,
    )
    draft = None
    if found.draft_path is not None:
        draft = load_draft(found.draft_path, target, dtype=dtype, device=device, position_rows=layout.position_rows)
    if device.type == "cuda":
        fitting = _measured(resolved, layout, target, draft, dtype, device, asked_pages)
        resolved = replace(resolved, num_pages=fitting)
    log.info("resolved configuration\n%s", resolved.block())
    engine = assemble(
        layout,
        target,
        draft,
        resolved.algorithm,
        attention=resolved.attention,
        draft_attention=resolved.draft_attention,
        num_pages=resolved.num_pages,
        dtype=dtype,
        device=device,
        overlap=resolved.overlap,
        prefix_cache=resolved.prefix_cache,
        graph_batch=resolved.graph_batch,
    )
    return engine, resolved


def _measured(
    resolved: ResolvedConfig,
    layout: RoundLayout,
    target: CausalLM,
    draft: DraftModel | None,
    dtype: torch.dtype,
    device: torch.device,
    asked_pages: int | None,
) -> int:
    def make(num_pages: int) -> ModelRunner:
        parts = (layout, target, draft, resolved.algorithm)
        return make_runner(*parts, resolved.attention, num_pages, dtype, device, resolved.draft_attention)

    geometry = (*target.geometry, *(draft.geometry if draft is not None else ()))
    page_bytes = layout.tokens_in(bytes_per_token(geometry, dtype))
    return measured_pages(layout, make, page_bytes, device, resolved.graph_batch, asked_pages)


def _weights_of(found: Checkpoint) -> WeightCount:
    target = stored_weights(found.target_path, found.target.formats)
    if found.draft_path is None or found.draft is None:
        return target
    return target + stored_weights(found.draft_path, found.draft.layer.formats)
