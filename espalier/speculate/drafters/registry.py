"""The checkpoint formats of drafts, and the drafters that need no files.  config.json decides which format applies."""

from importlib.metadata import entry_points
from pathlib import Path

import torch

from espalier.attention import ModelCache
from espalier.errors import EspalierError, shown
from espalier.layout import RoundLayout
from espalier.model_files import add_path_to_errors, is_gguf, read_json
from espalier.models import block, dflash2, eagle3, gemma4_assistant, mtp
from espalier.models.base import CausalLM
from espalier.models.config import Json, ModelConfig, architecture_of
from espalier.models.declared_weights import ranks_can_divide
from espalier.models.draft import DraftConfig, DraftModel, DraftSpec
from espalier.models.families import FAMILIES
from espalier.models.loading import is_multimodal, read_raw_config
from espalier.models.weight_files import safetensors_files
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, Shards
from espalier.speculate.drafters.assistant import AssistantDrafter
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter
from espalier.speculate.drafters.base import Drafter, DrafterWithoutFiles, DraftFormat, NoDrafter
from espalier.speculate.drafters.ngram import NgramDrafter
from espalier.speculate.drafters.one_pass import OnePassDrafter
from espalier.speculate.drafters.peagle import PEagleDrafter
from espalier.speculate.tree import RootTrees

# A weight in the first layer of every target.
FIRST_LAYER_WEIGHT = "model.layers.0.input_layernorm.weight"
EAGLE_CHECKS = (
    "eagle_aux_hidden_state_layer_ids (top-level ids name layers' inputs, those in eagle_config their outputs)"
)
# With layer ids that are off by one, or the wrong row for depth 1, the accept length is near 1.
BLOCK_CHECKS = (
    "the target layers that it reads (target_layer_ids name their outputs, aux_hidden_state_layer_ids their "
    "inputs), mask_token_id and sample_from_anchor"
)
BUILT_IN_FORMATS = (
    DraftFormat(
        algorithm="eagle3",
        title="EAGLE-3 heads",
        architectures=eagle3.ARCHITECTURES,
        excluding_fields=eagle3.MASK_TOKEN_FIELDS,
        speculators_types=("eagle3",),
        read=eagle3.read_eagle3,
        make=eagle3.make_eagle3,
        drafter=AutoregressiveDrafter,
        sharding="if divisible",
        checks=EAGLE_CHECKS,
    ),
    DraftFormat(
        algorithm="peagle",
        title="P-EAGLE heads",
        architectures=eagle3.PEAGLE_ARCHITECTURES,
        marked_architectures=eagle3.EAGLE3_ARCHITECTURES,
        marker_fields=eagle3.MASK_TOKEN_FIELDS,
        speculators_types=("peagle",),
        read=eagle3.read_peagle,
        make=eagle3.make_peagle,
        drafter=PEagleDrafter,
        sharding="if divisible",
        checks=f"{EAGLE_CHECKS} and the mask token ({', '.join(eagle3.MASK_TOKEN_FIELDS)})",
    ),
    DraftFormat(
        algorithm="mtp",
        title="multi-token prediction layers",
        architectures=mtp.ARCHITECTURES,
        speculators_types=("mtp",),
        read=mtp.read_mtp,
        make=mtp.make_mtp,
        drafter=AutoregressiveDrafter,
        is_in_target=mtp.holds_mtp_layers,
        sharding="as target",
        checks="mtp_form and num_nextn_predict_layers",
    ),
    DraftFormat(
        algorithm="block",
        title="block drafts",
        architectures=block.ARCHITECTURES,
        speculators_types=block.SPECULATORS_TYPES,
        read=block.read_block,
        make=block.make_block,
        drafter=OnePassDrafter,
        sharding="if divisible",
        checks=BLOCK_CHECKS,
    ),
    DraftFormat(
        algorithm="dflash2",
        title="DFlash 2 drafts",
        architectures=dflash2.ARCHITECTURES,
        speculators_types=dflash2.SPECULATORS_TYPES,
        read=dflash2.read_dflash2,
        make=dflash2.make_dflash2,
        drafter=OnePassDrafter,
        sharding="if divisible",
        checks=BLOCK_CHECKS,
    ),
    DraftFormat(
        algorithm="assistant",
        title="Gemma 4's assistants",
        architectures=gemma4_assistant.ARCHITECTURES,
        speculators_types=(),
        read=gemma4_assistant.read_assistant,
        make=gemma4_assistant.make_assistant,
        drafter=AssistantDrafter,
        sharding="as target",
    ),
)
# The formats, by algorithm.  Code outside this package adds a format by DRAFT_FORMATS[FORMAT.algorithm] = FORMAT.
DRAFT_FORMATS: dict[str, DraftFormat] = {draft_format.algorithm: draft_format for draft_format in BUILT_IN_FORMATS}
# Names of unsupported drafts, by architecture or speculators_model_type.
UNSUPPORTED_DRAFTS = {
    "xpress": "XPress",
    "Gemma4DSparkModel": "DSpark with Gemma 4's layers",
    **dict.fromkeys(("eagle", *eagle3.EAGLE_1_2_ARCHITECTURES), "EAGLE-1/2 heads"),
}
UNSUPPORTED_MTP = {
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2MTP"), "MiMo-V2"),
    **dict.fromkeys(("Step3p5ForCausalLM", "Step3p5MTP"), "Step-3.5"),
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3NextMTP"), "Qwen3-Next"),
}
# Drafters that need no files, by algorithm.  Code outside this package adds a drafter by WITHOUT_FILES["name"] = CLASS.
# Child processes do not see such an addition.  They find drafters only by the entry points (in the group ENTRY_POINTS)
# of installed packages.
WITHOUT_FILES: dict[str, type[DrafterWithoutFiles]] = {
    drafter.spec.algorithm: drafter for drafter in (NgramDrafter, NoDrafter)
}
ENTRY_POINTS = "espalier.drafters"


def algorithms() -> tuple[str, ...]:
    """Returns the algorithm names that users may give."""
    return (*DRAFT_FORMATS, *WITHOUT_FILES, *sorted(entry_points(group=ENTRY_POINTS).names))


def drafter_without_files(algorithm: str) -> type[DrafterWithoutFiles] | None:
    """Returns the drafter class of an algorithm that needs no files; None for other algorithms.

    Raises EspalierError if the class's `spec` declares files."""
    drafter = WITHOUT_FILES.get(algorithm)
    if drafter is None and algorithm not in DRAFT_FORMATS:
        for point in entry_points(group=ENTRY_POINTS, name=algorithm):
            drafter = point.load()
    if drafter is not None and drafter.spec != DraftSpec(algorithm):
        raise EspalierError(
            f"algorithm={algorithm!r} is registered without files, but its drafter declares {drafter.spec}; give it "
            f"spec = DraftSpec({algorithm!r}), or register a DraftFormat for a draft with a model"
        )
    return drafter


def low_acceptance_advice(algorithm: str) -> str:
    """Returns what a user should check if almost no draft token of this algorithm is accepted."""
    if algorithm == NgramDrafter.spec.algorithm:
        return "this text has few repetitions: use a trained draft"
    if algorithm not in DRAFT_FORMATS:
        return f"{algorithm!r} rarely proposes what this model says: use another algorithm or a trained draft"
    checks = DRAFT_FORMATS[algorithm].checks
    return (
        "the draft may be for another target, or for another revision of it: compare its README with this target, "
        f"{f'check {checks} in its config.json, ' if checks else ''}"
        "and measure it with `python -m lab round --acceptance`"
    )


def format_of(config_json: Json, path: Path) -> DraftFormat:
    """Returns the format of the draft at `path`, by its config.json.  Raises EspalierError for an unknown format."""
    for draft_format in DRAFT_FORMATS.values():
        if draft_format.matches(config_json):
            return draft_format
    by_speculators = config_json.get("speculators_model_type") is not None
    names = {draft_format.title: draft_format.format_names(by_speculators) for draft_format in DRAFT_FORMATS.values()}
    supported = "; ".join(f"{title} ({format_names})" for title, format_names in names.items() if format_names)
    raise EspalierError(f"{path}: {_why_unknown(config_json, path)}; supported are {supported}")


def _why_unknown(config_json: Json, path: Path) -> str:
    """Returns the part of an error text that says why no draft format matches.  path: the draft's directory."""
    speculators_type = config_json.get("speculators_model_type")
    name = architecture_of(config_json) if speculators_type is None else str(speculators_type)
    if name in eagle3.EAGLE_1_2_ARCHITECTURES:
        eagle3.refuse_eagle3_called_eagle(name, path)
    if name in UNSUPPORTED_DRAFTS:
        return f"{name!r} ({UNSUPPORTED_DRAFTS[name]}) is not supported yet"
    if name in UNSUPPORTED_MTP:
        return f"{name!r} (the MTP layers of {UNSUPPORTED_MTP[name]}) is not supported yet"
    if speculators_type is not None:
        return f"speculators_model_type {shown(speculators_type)} is not supported"
    remedy = " (it is a whole model: pass it as model=)" if name in FAMILIES else ""
    return f"architecture {name!r} is not a known draft{remedy}"


def is_draft(path: Path, is_expected: bool = False) -> bool:
    """Whether the directory holds a draft.

    A target with its own MTP layers is no draft.  A directory with MTP layers alone is a draft: it has the target's
    config.json, but not the target's first layer.
    is_expected: raise EspalierError, as format_of does, if the directory holds neither a target nor a known draft."""
    if is_gguf(path):
        return False
    config_json = read_json(path / "config.json")
    if is_multimodal(config_json):
        return False
    is_family = config_json.get("speculators_model_type") is None and architecture_of(config_json) in FAMILIES
    # Without safetensors files, the weights are in files that are not read here.
    if is_family and (not safetensors_files(path) or FIRST_LAYER_WEIGHT in Weights(path, torch.float32, "cpu")):
        return False
    if is_expected:
        format_of(config_json, path)
    return any(draft_format.matches(config_json) for draft_format in DRAFT_FORMATS.values())


def draft_algorithm(path: Path) -> str:
    """Returns the algorithm that runs the draft in this directory.  Raises EspalierError for an unknown format."""
    return format_of(read_json(path / "config.json"), path).algorithm


def draft_of_target(path: Path, target: ModelConfig, algorithm: str) -> Path | None:
    """Returns the directory of the target at `path`, if it holds a draft beside the target; else None.

    algorithm: the algorithm that must be able to run the draft, or "auto" for any."""
    formats = (draft_format for draft_format in DRAFT_FORMATS.values() if algorithm in ("auto", draft_format.algorithm))
    return (
        path
        if any(draft_format.is_in_target and draft_format.is_in_target(path, target) for draft_format in formats)
        else None
    )


def read_draft(path: Path | str, target: ModelConfig) -> DraftConfig:
    """Parses a draft's config.json and checks it against its target's config.  Loads no weights.

    Raises EspalierError for an unknown format, and for a draft that does not fit this target."""
    path = Path(path)
    config_json = read_raw_config(path)
    with add_path_to_errors(path):
        return format_of(config_json, path).read(path, config_json, target)


def draft_shards(config: DraftConfig | None, shards: Shards) -> Shards:
    """Returns the part of a draft that a rank holds; SINGLE_RANK if the rank holds the whole draft.

    config: None for a drafter without a model.  shards: the part of the target that the rank holds."""
    if config is None or shards.count == 1:
        return SINGLE_RANK
    sharding = DRAFT_FORMATS[config.spec.algorithm].sharding
    if sharding == "as target" or (sharding == "if divisible" and ranks_can_divide(config.layer, shards.count)):
        return shards
    return SINGLE_RANK


def load_draft(
    path: Path | str,
    target: CausalLM,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    position_rows: int,
    shards: Shards = SINGLE_RANK,
) -> DraftModel:
    """Loads a draft.  Raises EspalierError, which names the part that does not fit the target.

    target: loaded with captured_layers=read_draft(path, target.config).spec.captured_layers.
    position_rows: the number of rows of position tables.  shards: the part of the target that this rank holds."""
    path = Path(path)
    config = read_draft(path, target.config)
    if target.captured_layers != config.spec.captured_layers:
        raise EspalierError(
            f"{path} reads the inputs of target layers {config.spec.captured_layers}, but the target was "
            f"loaded to capture {target.captured_layers}; load the target with captured_layers="
            f"{config.spec.captured_layers}"
        )
    own_shards = draft_shards(config, shards)
    weights = Weights(path, dtype, device, config.layer.formats, allow_bin=True, shards=own_shards)
    return DRAFT_FORMATS[config.spec.algorithm].make(weights, config, target, position_rows)


def make_drafter(algorithm: str, draft: DraftModel | None, layout: RoundLayout, cache: ModelCache) -> Drafter:
    """Makes the drafter of an algorithm.  cache: the cache of the draft's layers; without a draft, it has no layers.

    Raises EspalierError if the algorithm needs a draft and `draft` is None."""
    if drafter := drafter_without_files(algorithm):
        return drafter(layout, RootTrees(layout.max_batch, cache.pages.device))
    if draft is None:
        raise EspalierError(f"algorithm={algorithm!r} needs a draft and none is loaded; pass draft=")
    return DRAFT_FORMATS[algorithm].drafter(draft, layout, cache)
