"""The known draft formats, chosen by config.json, and the drafters that need no files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from espalier.attention import GroupedBackend
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.config import ModelConfig, Raw, read_json
from espalier.models.draft import DraftConfig, DraftModel
from espalier.models.loading import FAMILIES
from espalier.models.weights import Weights
from espalier.speculate.drafters import block, dflash2, eagle3, mtp, peagle
from espalier.speculate.drafters.base import Drafter, DraftFormat, NoDrafter, architecture_of
from espalier.speculate.drafters.ngram import NgramDrafter

# By algorithm.  To add a format from outside this package: DRAFT_FORMATS[FORMAT.algorithm] = FORMAT.
DRAFT_FORMATS: dict[str, DraftFormat] = {
    module.FORMAT.algorithm: module.FORMAT for module in (eagle3, peagle, mtp, block, dflash2)
}
WITHOUT_FILES: Mapping[str, type[NgramDrafter] | type[NoDrafter]] = MappingProxyType(
    {drafter.spec.algorithm: drafter for drafter in (NgramDrafter, NoDrafter)}
)


def algorithms() -> tuple[str, ...]:
    """The algorithm names that users may give."""
    return (*DRAFT_FORMATS, *WITHOUT_FILES)


def what_to_check(algorithm: str) -> str:
    """What a user should check or do where almost no draft token of this algorithm is accepted."""
    if algorithm not in DRAFT_FORMATS:
        return "this text has few repetitions: use a trained draft"
    checks = DRAFT_FORMATS[algorithm].checks
    return (
        "the draft may be for another target, or for another revision of it: compare its README with this target, "
        f"{f'check {checks} in its config.json, ' if checks else ''}"
        "and measure it with `espalier bench round --acceptance`"
    )


def format_of(raw: Raw, path: Path) -> DraftFormat:
    """The format of the draft at `path`, by its config.json.  Raises EspalierError, listing the known formats."""
    for known in DRAFT_FORMATS.values():
        if known.takes(raw):
            return known
    supported = "; ".join(f"{known.title} ({known.names})" for known in DRAFT_FORMATS.values())
    raise EspalierError(f"{path}: {_why_unknown(raw, path)}; supported are {supported}")


def _why_unknown(raw: Raw, path: Path) -> str:
    declared = raw.get("speculators_model_type")
    asked = raw if declared is None else {"speculators_model_type": declared}
    for known in DRAFT_FORMATS.values():
        if (reason := known.explain(asked, path)) is not None:
            return reason
    if declared is not None:
        return f"speculators_model_type {declared!r} is not supported"
    architecture = architecture_of(raw)
    remedy = " (it is a whole model: pass it as model=)" if architecture in FAMILIES else ""
    return f"architecture {architecture!r} is not a known draft{remedy}"


def draft_algorithm(path: Path) -> str:
    """The algorithm that runs the draft in this directory.  Raises EspalierError."""
    return format_of(read_json(path / "config.json"), path).algorithm


def own_draft(path: Path, target: ModelConfig, algorithm: str) -> Path | None:
    """The directory of the target at `path`, if it holds a draft beside the target; else None.

    algorithm: the one that the draft must run under, or "auto".
    """
    formats = (known for known in DRAFT_FORMATS.values() if algorithm in ("auto", known.algorithm))
    return path if any(known.in_target(path, target) for known in formats) else None


def read_draft(path: Path | str, target: ModelConfig) -> DraftConfig:
    """Parse a draft's config.json and check it against its target's config.  Loads no weights.

    Raises EspalierError for an unknown format, and for a draft that does not fit this target.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    return format_of(raw, path).read(path, raw, target)


def load_draft(
    path: Path | str, target: CausalLM, *, dtype: torch.dtype, device: torch.device | str, position_rows: int
) -> DraftModel:
    """Load a draft.  `target` must have been loaded with the `capture` of `read_draft(path, target.config).spec`.

    Raises EspalierError naming what does not fit.
    """
    path = Path(path)
    config = read_draft(path, target.config)
    if target.capture != config.spec.capture:
        raise EspalierError(
            f"{path} reads the inputs of target layers {config.spec.capture}, but the target was loaded to capture "
            f"{target.capture}; load the target with capture={config.spec.capture}"
        )
    weights = Weights(path, dtype, device, config.layer.formats, allow_bin=True)
    return DRAFT_FORMATS[config.spec.algorithm].make(weights, config, target, position_rows)


def make_drafter(
    algorithm: str,
    draft: DraftModel | None,
    layout: RoundLayout,
    pages: PagedKV,
    backend: GroupedBackend,
    layer_specs: Sequence[LayerSpec],
) -> Drafter:
    """The drafter of an algorithm.  layer_specs: specs of all layers, the target's first, the draft's last.

    Raises EspalierError if the algorithm needs a draft and `draft` is None.
    """
    if algorithm in WITHOUT_FILES:
        return WITHOUT_FILES[algorithm](layout)
    if draft is None:
        raise EspalierError(f"algorithm={algorithm!r} needs a draft and none is loaded; pass draft=")
    return DRAFT_FORMATS[algorithm].drafter(draft, layout, pages, backend, layer_specs)
