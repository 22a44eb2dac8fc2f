"""From a configuration to a running engine: find the files, resolve what is open, load, assemble."""

import logging
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from espalier.cache.kv import bytes_per_token
from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.build import assemble, make_round
from espalier.engine.checkpoints import BUNDLED, find_draft, find_target
from espalier.engine.engine import Engine
from espalier.engine.measure import measured_pages
from espalier.engine.resolve import Facts, choose_algorithm, choose_device, free_memory, layout_of, resolve
from espalier.errors import EspalierError
from espalier.kernels.launch import chip
from espalier.layout import RoundLayout
from espalier.models import (
    CausalLM,
    Eagle3Config,
    Eagle3Draft,
    ModelConfig,
    draft_verifier,
    load_eagle3,
    load_target,
    read_config,
    read_eagle3,
)
from espalier.models.loading import geometry_of
from espalier.speculate.round import Round

log = logging.getLogger("espalier")


@dataclass(frozen=True)
class Checkpoint:
    """The files of one engine, found and their configs read; nothing is loaded yet."""

    target_path: Path
    target: ModelConfig
    draft_path: Path | None
    draft: Eagle3Config | None
    algorithm: str


def find(config: EngineConfig) -> Checkpoint:
    """Raises EspalierError for what is missing, unsupported or does not fit."""
    draft_path = find_draft(config.draft) if config.draft is not None else None
    model = _model_name(config, draft_path)
    target_path = find_target(model)
    target = read_config(target_path, config.model_overrides)
    has_draft = draft_path is not None or model == BUNDLED
    algorithm = choose_algorithm(config, has_draft)
    if algorithm != "eagle3":
        if draft_path is not None:
            log.info("draft %s is not loaded: algorithm is %s", draft_path, algorithm)
        return Checkpoint(target_path, target, None, None, algorithm)
    draft_path = draft_path or find_draft(BUNDLED)
    return Checkpoint(target_path, target, draft_path, read_eagle3(draft_path, target), algorithm)


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
    draft_geometry = geometry_of(found.draft.layer)[:1] if found.draft else ()
    facts = Facts(
        free_bytes=free_memory(device),
        num_weights=_num_weights(found.target_path) + (_num_weights(found.draft_path) if found.draft_path else 0),
        stored_dtype=found.target.raw.get("dtype") or found.target.raw.get("torch_dtype"),
        max_position=found.target.max_position,
        geometry=(*geometry_of(found.target), *draft_geometry),
        hidden_size=found.target.hidden_size,
        num_layers=found.target.num_layers,
        chip=chip(torch.empty(0, device=device)) if device.type == "cuda" else None,
    )
    draft = str(found.draft_path) if found.draft_path else None
    return resolve(config, str(found.target_path), draft, found.algorithm, device, facts)


def build_engine(resolved: ResolvedConfig, found: Checkpoint, asked_pages: int | None) -> tuple[Engine, ResolvedConfig]:
    """Load the models and put the engine together.  Raises EspalierError naming what does not fit.

    On a GPU what fits beside the loaded models is measured: so many pages are taken, or asked_pages checked against
    them.  Returns what it came to.
    """
    layout = layout_of(resolved)
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    capture = found.draft.capture if found.draft else ()
    target = load_target(
        found.target_path,
        dtype=dtype,
        device=device,
        position_rows=layout.position_rows,
        capture=capture,
        overrides=resolved.model_overrides,
    )
    draft = None
    if found.draft_path is not None:
        draft = load_eagle3(found.draft_path, target, dtype=dtype, device=device, position_rows=layout.position_rows)
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
    draft: Eagle3Draft | None,
    dtype: torch.dtype,
    device: torch.device,
    asked_pages: int | None,
) -> int:
    def make(num_pages: int) -> Round:
        parts = (layout, target, draft, resolved.algorithm)
        return make_round(*parts, resolved.attention, num_pages, dtype, device, resolved.draft_attention)

    geometry = (*target.geometry, *(draft.geometry if draft is not None else ()))
    page_bytes = layout.tokens_in(bytes_per_token(geometry, dtype))
    return measured_pages(layout, make, page_bytes, device, resolved.graph_batch, asked_pages)


def _num_weights(path: Path) -> int:
    """Parameters in a directory's safetensors headers.  An unreadable file counts 0: loading names it."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            continue
    return total
