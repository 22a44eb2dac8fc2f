"""Quantised drafts of named shapes: their products count as they are stored, and are tuned in their format."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from espalier.bench import tune
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.models.quantisers import quantise
from espalier.startup.checkpoints import BUNDLED_DRAFTS
from lab.bench.floor import RoundSize, round_products
from tests.lab.shapes import shape_named


@pytest.mark.parametrize(
    ("draft", "dense"),
    [({}, set()), ({"mtp_layers": 2}, {"lm_head"}), ({"block_size": 8}, {"draft edges"})],
    ids=["eagle3", "mtp", "block"],
)
def test_a_quantised_draft_counts_as_it_is_stored(draft, dense):
    """With its own head, whatever the target is; not the target's head, which an MTP head shares, nor edges."""
    shape = shape_named("llama-3.1-8b", weights="fp8", draft_weights="int4", **draft)
    size = RoundSize(1, TreeShape(5, 8, 64))
    target, of_draft = round_products(shape, size)
    before_target, before = round_products(shape_named("llama-3.1-8b", weights="fp8", **draft), size)
    assert target == before_target
    assert [replace(run, weight_format="dense") for run in of_draft] == list(before)
    assert {run.name for run in of_draft if run.weight_format == "dense"} == dense
    bytes_of = [sum(run.weight_bytes for run in runs if run.name not in dense) for runs in (of_draft, before)]
    assert bytes_of[0] == pytest.approx(bytes_of[1] * (0.5 + 2 / 128) / 2)
    assert set(shape.matrix_shapes("int4")) == {run.shape for run in of_draft if run.weight_format == "int4"}


def test_a_head_is_quantised_if_it_is_a_drafts_own():
    shape = shape_named("llama-3.1-8b", weights="fp8", draft_weights="int4", mtp_layers=1)
    [shared] = [run.weight_format for run in shape.draft_pass(1) if run.name.endswith("lm_head")]
    apart = replace(shape, mtp=replace(shape.mtp, has_own_heads=True))
    [own] = [run.weight_format for run in apart.draft_pass(1) if run.name.endswith("lm_head")]
    assert (shared, own) == ("dense", "int4")


def test_a_quantised_draft_is_measured_in_its_format_beside_the_target_or_alone():
    """One format at a time."""

    def measured(weights, draft_weights):
        args = Namespace(weights=weights, draft_weights=draft_weights)
        format = tune._weight_format(args)
        model = shape_named("llama-3.1-8b", weights=weights or "dense", draft_weights=draft_weights or "dense")
        return format, set(tune._shapes_to_measure(model, format))

    target, both, draft = (measured(*formats) for formats in (("fp8", None), ("fp8", "fp8"), (None, "fp8")))
    assert {target[0], both[0], draft[0]} == {"fp8"} and both[1] == target[1] | draft[1]
    assert (32000, 4096) in draft[1] and (32000, 4096) not in target[1]
    with pytest.raises(EspalierError, match="are two formats"):
        measured("fp8", "int4")


def untuned(args, **config):
    """What tuning the bundled model is refused with."""
    tuning = {"shapes": None, "choices": None, "tune": "linears", "weights": None, "draft_weights": None}
    with pytest.raises(EspalierError) as refused:
        tune._run(Namespace(**(tuning | {"seconds": None} | args)), EngineConfig(model="bundled", **config))
    return str(refused.value)


@pytest.mark.parametrize("flag", ["--weights", "--draft-weights"])
def test_a_format_for_a_model_is_refused_by_the_flag_that_gave_it(flag):
    assert f"or leave {flag} out" in untuned({flag[2:].replace("-", "_"): "fp8"})


@pytest.mark.parametrize("algorithm", BUNDLED_DRAFTS)
def test_a_quantised_draft_of_a_model_is_not_tuned_as_a_dense_one(tmp_path, algorithm):
    copy = tmp_path / "copy"
    quantise(BUNDLED_DRAFTS[algorithm], copy, "fp8", torch.device("cpu"), lambda: None, is_draft=True)
    assert "copy is fp8; use --shapes llama-3.1-8b --draft-weights fp8" in untuned({}, draft=str(copy))
