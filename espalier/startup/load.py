"""Creates an engine from a configuration: finds files, resolves each "auto", loads models and builds the engine.

On a CPU, a warning is logged for quantised weights, which take more time, and for 16-bit weights, which take more
memory.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from espalier.cache.layer_spec import specs_of_rank
from espalier.config import FP8_KV, EngineConfig, ResolvedConfig, is_unresolved
from espalier.engine.engine import Engine
from espalier.engine.lead import LeadExecutor, replace_by_rank_failure
from espalier.engine.ranks import OtherRanks
from espalier.errors import EspalierError
from espalier.models import (
    DraftConfig,
    DraftSpec,
    ModelConfig,
    draft_verifier,
    load_target,
    read_config,
)
from espalier.models.declared_weights import num_dense_values, require_shards
from espalier.models.layer_loading import layer_specs_of
from espalier.models.loading import unread_prefixes
from espalier.models.weight_files import WeightSize, count_weights_in
from espalier.models.weight_formats.dense import DENSE_FORMAT
from espalier.shards import SINGLE_RANK, Shards
from espalier.speculate.drafters.registry import (
    draft_algorithm,
    draft_of_target,
    draft_shards,
    drafter_without_files,
    load_draft,
    read_draft,
)
from espalier.startup.build import LoadedModels, assemble_engine, describe_cache_size, make_tree_chooser
from espalier.startup.checkpoints import BUNDLED, BUNDLED_FILES, find_draft, find_target
from espalier.startup.measure_memory import measure_pages
from espalier.startup.ranks import LoadRankModels, RankStartup, starting_ranks
from espalier.startup.resolve import (
    StartupInfo,
    choose_algorithm,
    choose_device,
    free_memory,
    requested_algorithm,
    resolve,
)
from espalier.startup.threads import cpu_thread_info, set_num_threads
from espalier.startup.tree_cost import measure_chip, pass_weights

log = logging.getLogger("espalier")


@dataclass(frozen=True)
class Checkpoint:
    """The paths and parsed configs of an engine's models, before weights are loaded.  spec: the layers and inputs of
    the drafter; it is also set for a drafter without a model, such as n-gram lookup."""

    target_path: Path
    target: ModelConfig
    draft_path: Path | None
    draft: DraftConfig | None
    spec: DraftSpec


def find_checkpoint(config: EngineConfig) -> Checkpoint:
    """Finds the files of target and draft, and reads the configs.
    Raises EspalierError if files are missing, a model is not supported, or the draft does not fit the target."""
    requested = requested_algorithm(config)  # this check comes first, because find_draft may download files
    draft_path = find_draft(config.draft, requested) if config.draft is not None else None
    model = _model_name(config, draft_path)
    target_path = find_target(model)
    target = read_config(target_path, config.model_overrides, config.model_impl)
    used_draft = None
    if not drafter_without_files(requested):
        bundled = find_draft(BUNDLED, requested) if model == BUNDLED else None
        used_draft = draft_path or bundled or draft_of_target(target_path, target, requested)
    algorithm = choose_algorithm(config, None if used_draft is None else draft_algorithm(used_draft))
    if used_draft is None:
        if draft_path is not None:
            # With speculation=None, the user asked for plain decoding, so this is no warning.
            level = logging.INFO if config.speculation is None else logging.WARNING
            log.log(level, "draft %s is not loaded: algorithm is %s", draft_path, algorithm)
        return Checkpoint(target_path, target, None, None, DraftSpec(algorithm))
    draft = read_draft(used_draft, target)
    return Checkpoint(target_path, target, used_draft, draft, draft.spec)


def _model_name(config: EngineConfig, draft_path: Path | None) -> str:
    """Returns the user's model, else the target named in the draft's config, else the bundled model."""
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
    """Resolves each "auto" of `config` for this machine and these model files."""
    device, shards = choose_device(config), Shards(0, config.tensor_parallel)
    draft_part = draft_shards(checkpoint.draft, shards)
    require_shards(checkpoint.target, shards.count)
    if checkpoint.draft is not None:
        require_shards(checkpoint.draft.layer, draft_part.count)
    info = StartupInfo(
        # On a CPU, all ranks share the memory.
        free_bytes=free_memory(device) // (shards.count if device.type == "cpu" else 1),
        weights=count_weights(checkpoint, shards.count),
        stored_dtype=checkpoint.target.raw.get("dtype") or checkpoint.target.raw.get("torch_dtype"),
        max_position=checkpoint.target.max_position,
        layer_specs=(
            *specs_of_rank(layer_specs_of(checkpoint.target), shards),
            *specs_of_rank(checkpoint.spec.layer_specs, draft_part),
        ),
        hidden_size=checkpoint.target.hidden_size,
        num_layers=checkpoint.target.num_layers,
        chip=measure_chip(device) if device.type == "cuda" else None,
        threads=cpu_thread_info(),
        pass_weights=pass_weights(
            checkpoint.target, checkpoint.draft, count_weights(checkpoint).nbytes(torch.bfloat16)
        ).of_rank(shards.count, draft_part.count),
        model_impl="native" if checkpoint.target.probe_result is None else "transformers",
        declared_kv_dtype=checkpoint.target.declared_kv_dtype if is_unresolved(config.kv_dtype) else None,
    )
    draft = str(checkpoint.draft_path) if checkpoint.draft_path else None
    return resolve(config, str(checkpoint.target_path), draft, checkpoint.spec, device, info)


def build_engine(
    resolved: ResolvedConfig, checkpoint: Checkpoint, requested_pages: int | None
) -> tuple[Engine, ResolvedConfig]:
    """Loads the models and builds the engine.  Returns the engine and its final configuration.

    On a GPU, the number of pages that fit beside the loaded models is measured.  requested_pages: the user's num_pages,
    which must not exceed that number; None to use as many pages as fit.  Raises EspalierError if memory is too small.
    """
    if resolved.tensor_parallel == 1:
        return build_engine_of_models(load_models(resolved, checkpoint), requested_pages)
    with starting_ranks(resolved.tensor_parallel) as ranks:
        return build_engine_of_ranks(ranks, resolved, requested_pages)


def load_models(resolved: ResolvedConfig, checkpoint: Checkpoint, shards: Shards = SINGLE_RANK) -> LoadedModels:
    """Loads target and draft, or one rank's part of them."""
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    if device.type == "cpu":
        set_num_threads(resolved.threads)
    load_arguments = {"dtype": dtype, "device": device, "shards": shards}
    load_arguments["position_rows"] = resolved.layout.position_rows
    target_arguments: dict[str, Any] = {"overrides": resolved.model_overrides, "model_impl": resolved.model_impl}
    target = load_target(
        checkpoint.target_path,
        captured_layers=checkpoint.spec.captured_layers,
        max_context=resolved.layout.max_context,
        **target_arguments,
        **load_arguments,
    )
    draft = None if checkpoint.draft_path is None else load_draft(checkpoint.draft_path, target, **load_arguments)
    return LoadedModels(resolved, target, draft, shards)


def build_engine_of_ranks(
    ranks: OtherRanks,
    resolved: ResolvedConfig,
    requested_pages: int | None,
    load_rank_models: LoadRankModels | None = None,
) -> tuple[Engine, ResolvedConfig]:
    """Builds an engine on this rank and on `ranks`, whose processes are already running.  See build_engine.
    load_rank_models: the function that loads the models of a rank; None to load them from files.  Raises the errors of
    build_engine, and RankFailed."""
    ranks.wait_until_loaded()
    joined_file = Path(ranks.rendezvous_folder.name) / f"joined-{ranks.num_loads_sent}"
    startup = RankStartup(load_rank_models or load_rank_models_from_files, resolved, requested_pages, str(joined_file))
    with replace_by_rank_failure(ranks):
        ranks.load(startup)
        loaded = startup.load_rank_models(0, ranks.join)
        executor, loaded = startup.make_executor(loaded)
    ranks.wait_until_loaded()
    _log_resolved_config(loaded)
    config = loaded.config
    return Engine(LeadExecutor(executor, ranks), config.overlap, config.prefix_cache, make_tree_chooser(config)), config


def load_rank_models_from_files(resolved: ResolvedConfig, shards: Shards) -> LoadedModels:
    """Loads one rank's part of the models from the files that `resolved` names.  Can run in any process."""
    target_path = Path(resolved.model)
    target = read_config(target_path, resolved.model_overrides, resolved.model_impl)
    draft_path = None if resolved.draft is None else Path(resolved.draft)
    draft = None if draft_path is None else read_draft(draft_path, target)
    spec = DraftSpec(resolved.algorithm) if draft is None else draft.spec
    return load_models(resolved, Checkpoint(target_path, target, draft_path, draft, spec), shards)


def build_engine_of_models(
    loaded: LoadedModels, requested_pages: int | None, keep_graphs: bool = False
) -> tuple[Engine, ResolvedConfig]:
    """Builds an engine from models that are loaded already.  See build_engine.  keep_graphs: see CudaExecutor."""
    if loaded.config.tensor_parallel > 1:
        raise EspalierError("models that are loaded already are on one rank; use tensor_parallel=1")
    if loaded.device.type == "cuda":
        loaded = loaded.with_num_pages(measure_pages(loaded, requested_pages))
    _log_resolved_config(loaded)
    return assemble_engine(loaded, keep_graphs, capture_stages=True), loaded.config


def _log_resolved_config(loaded: LoadedModels) -> None:
    config = loaded.config
    log.info("resolved configuration\n%s", config.as_text())
    log.info("%s", describe_cache_size(config, loaded.layer_specs, loaded.dtype))
    if config.kv_dtype == FP8_KV and not any(loaded.target.kv_scales):
        log.warning("kv_dtype=%s: the checkpoint has no K/V scales; 1 is used, so values above 448 are clamped", FP8_KV)


def count_weights(checkpoint: Checkpoint, num_ranks: int = 1) -> WeightSize:
    """Returns the size of the weights on each rank.  A rank has a part of the target, and the whole draft or a part of
    it (draft_shards).  With a draft, a rank has the target's whole embedding."""
    # MTP layers in the target's own directory are counted with the target.
    has_own_draft = checkpoint.draft_path == checkpoint.target_path
    unread = tuple(checkpoint.target.family.ignored_weights) if has_own_draft else unread_prefixes(checkpoint.target)
    target = count_weights_in(checkpoint.target_path, checkpoint.target.formats, unread, checkpoint.target.stored_names)
    if num_ranks > 1:
        embedding = checkpoint.target.vocab_size * checkpoint.target.hidden_size
        target = target.of_rank(num_ranks, 0 if checkpoint.draft is None else embedding)
    if has_own_draft or checkpoint.draft is None or checkpoint.draft_path is None:
        return target
    draft = count_weights_in(checkpoint.draft_path, checkpoint.draft.layer.formats)
    if draft_shards(checkpoint.draft, Shards(0, num_ranks)).count > 1:
        num_divided = num_dense_values(replace(checkpoint.draft.layer, vocab_size=checkpoint.spec.vocab_size))
        draft = draft.of_rank(num_ranks, max(draft.num_cast_values - num_divided, 0))
    return target + draft


# Every quantised model quantises at least one of these matrices.
TYPICAL_MATRICES = ("self_attn.o_proj", "mlp.down_proj", "mlp.experts", "mlp.experts.0.down_proj")
HALF_DTYPES = ("bfloat16", "float16")


def warn_of_cpu_costs(config: EngineConfig, resolved: ResolvedConfig, checkpoint: Checkpoint) -> None:
    """On a CPU, warns of quantised weights and of weights whose dtype needs more memory than the checkpoint's dtype.
    config: the user's configuration."""
    if resolved.device != "cpu":
        return
    models = {"model": checkpoint.target} | ({} if checkpoint.draft is None else {"draft": checkpoint.draft.layer})
    for role, model in models.items():
        if stored_as := _quantised_format_name(model):
            log.warning(
                "the %s's weights are stored as %s, which saves memory and gains no speed on a CPU: each use converts "
                "them, and a pass may take several times as long as with the unquantised model",
                role,
                stored_as,
            )
            break
    stored_as = checkpoint.target.raw.get("dtype") or checkpoint.target.raw.get("torch_dtype")
    is_bundled = checkpoint.target_path == BUNDLED_FILES / "target"
    if is_unresolved(config.dtype) and stored_as in HALF_DTYPES and not is_bundled:
        log.warning(
            "the model is stored in %s and runs in %s on a CPU, with twice the memory for its weights; set dtype to "
            "choose another",
            stored_as,
            resolved.dtype,
        )


def _quantised_format_name(model: ModelConfig) -> str | None:
    """Returns the name of the format of a model's quantised weights; None if all weights are dense."""
    formats = (model.formats(f"model.layers.0.{name}") for name in TYPICAL_MATRICES)
    return next((each.name for each in formats if each != DENSE_FORMAT), None)
