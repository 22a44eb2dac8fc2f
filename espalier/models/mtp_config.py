"""Reads the config.json of multi-token prediction layers: a target's own, or a head in vLLM's speculators format.

`num_nextn_predict_layers` is the number of layers.  `mtp_form` is ours: "chain" or "target" (DraftSpec.form); without
it, the form is "chain", as in DeepSeek-V3's paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from espalier.models.config import Family, ModelConfig, Raw, architecture_of, parse
from espalier.models.draft import MAX_MODULES, DraftSpec, Form, refuse_sizes
from espalier.models.draft_fields import Fields
from espalier.models.families import FAMILIES
from espalier.models.index_config import FREQ, FULL, PATTERN, TYPES, indexer_types
from espalier.models.layer_loading import layer_specs_of
from espalier.models.mtp_family import SPECULATORS, MTPFamily
from espalier.models.weight_formats import QUANTISATION_FIELDS, quantisation_of
from espalier.models.weights import Weights

# Targets whose own MTP layers are supported.
OWN = tuple(family.architecture for family in FAMILIES.values() if family.mtp is not None)
HEADS = ("MTPDraftModel",)
ARCHITECTURES = (*HEADS, *OWN)
COUNT, FORM = "num_nextn_predict_layers", "mtp_form"
FORMS: tuple[Form, ...] = get_args(Form)
# Per-layer fields of a config, which the MTP layers continue.
BY_LAYER = ("layer_types", "mlp_layer_types")


@dataclass(frozen=True)
class MTPConfig:
    """The config of MTP layers, checked against their target's.

    layer: of a target with num_layers layers and `spec.modules` more, the MTP layers.
    """

    layer: ModelConfig
    family: MTPFamily
    spec: DraftSpec

    @property
    def num_layers(self) -> int:
        return self.layer.num_layers - self.spec.modules

    def prefix(self, module: int) -> str:
        """The beginning of the names of a module's weights.  module: from 0."""
        return self.family.prefix_of(module, self.num_layers)

    def owned(self, module: int) -> str:
        """The result of MTPFamily.owned for this module.  module: from 0."""
        return self.family.owned(module, self.num_layers)


def read_mtp(path: Path, raw: Raw, target: ModelConfig) -> MTPConfig:
    """Read the config.json `raw` of the layers at `path` and check it against the target's.  Loads no weights.

    If the config is of the target's architecture, the layers are the target's own, and the target's overrides apply.
    Raises EspalierError if the layers do not fit this target.
    """
    is_head = raw.get("speculators_model_type") is not None or architecture_of(raw) in HEADS
    if is_head:
        base = {"max_position_embeddings": target.max_position, **Fields(raw, path).layer()}
        mtp, family = SPECULATORS, _family_of(Fields(base, path))
    else:
        same = raw.get("architectures") == target.raw.get("architectures")
        base = (target.raw if path == target.path else _stored_as(target.raw, raw)) if same else raw
        family = FAMILIES[raw["architectures"][0]]
        assert family.mtp is not None
        mtp = family.mtp
    modules = Fields({**base, **raw}, path).count(COUNT, 1, MAX_MODULES)
    form = Fields(raw, path).choice(FORM, FORMS, " or ".join(map(repr, FORMS)))
    layer = parse(_continued(base, modules, mtp.layer_type), family, path)
    refuse_sizes(path, target, layer.hidden_size, layer.vocab_size)
    num_layers = layer.num_layers - modules
    spec = DraftSpec(
        algorithm="mtp",
        layers=layer_specs_of(layer)[num_layers:],
        modules=modules,
        form=form,
        reads="hidden" if mtp.reads_normed else "captured",
        capture=() if mtp.reads_normed else (num_layers,),
        hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
    )
    return MTPConfig(layer, mtp, spec)


def _stored_as(target: Raw, raw: Raw) -> Raw:
    """The target's config for layers in a directory of their own, whose config, `raw`, says how they are stored."""
    return {name: target[name] for name in target if name not in QUANTISATION_FIELDS} | quantisation_of(raw)


def stores_mtp(path: Path, target: ModelConfig) -> bool:
    """Whether the target's directory holds MTP layers of its own."""
    count, mtp = target.raw.get(COUNT), target.family.mtp
    if mtp is None or not isinstance(count, int) or count < 1:
        return False
    weights = Weights(path, torch.float32, "cpu", stored=target.stored)
    return all(weights.has_matrix(f"{mtp.owned(layer, target.num_layers)}{mtp.project}") for layer in range(count))


def _family_of(base: Fields) -> Family:
    """The family of a head's layers, by model_type."""
    by_type = {family.model_type: family for family in FAMILIES.values() if family.in_drafts}
    declared = base.get("model_type")
    if declared not in by_type:
        raise base.error(
            f"MTP layers of model_type {declared!r} (in transformer_layer_config) are not supported; supported: "
            f"{', '.join(by_type)}"
        )
    return by_type[declared]


def _continued(base: Mapping[str, Any], modules: int, layer_type: str | None) -> Raw:
    """The config of a model that has the MTP layers as its last ones; each is of the kind of the target's last, or has
    the type `layer_type`."""
    longer: Raw = {name: [*base[name], *base[name][-1:] * modules] for name in BY_LAYER if base.get(name)}
    if layer_type is not None and base.get("layer_types"):
        longer["layer_types"][-modules:] = [layer_type] * modules
    if base.get("index_topk") is not None:
        # An MTP layer has an indexer of its own.  Its place in the target's schedule says nothing.
        longer |= {TYPES: [*indexer_types({**base}), *[FULL] * modules], PATTERN: None, FREQ: None}
    return {**base, **longer, "num_hidden_layers": base["num_hidden_layers"] + modules}
