"""Quantised targets are lossless against themselves: speculation, batch, pages and trees change no request's tokens."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from espalier.kernels.layers import quantised as kernels
from espalier.models import CausalLM, DraftModel
from espalier.models.weight_formats import quantised
from espalier.request import Request, SamplingParams
from tests.builders import make_eagle3, make_target
from tests.checkpoints import load_pair
from tests.folders import new_folder
from tests.harness import CPU, DTYPE, MAX_POSITIONS, Ran, Setup, prompts, request, run
from tests.pairwise import fewer
from tests.quantised import KINDS, ORDERED, STATIC, WEIGHTS_ONLY, quantise

STYLES: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.2}, {"temperature": 3.0, "top_k": 9})
# (kind, family): dense targets in each format, and each format's experts.
DENSE_TARGETS = tuple((kind, "llama") for kind in KINDS)
EXPERTS = tuple((kind, "qwen3_moe") for kind in KINDS if kind not in (*STATIC, *ORDERED))
# Experts are a stack of the matrices that dense targets have: here codes whose inputs are rounded.
FEW_EXPERTS = (("fp8-channel-token", "qwen3_moe"),)
# Without rounded inputs a matrix is a dense one to the tree; one stands for the others.
LIKE_AWQ = tuple((kind, "llama") for kind in WEIGHTS_ONLY if kind != "awq")
# Inputs are rounded by tensor, by token and by block; these differ in how scales are stored.
LIKE_OTHERS = tuple((kind, "llama") for kind in ("fp8-mistral", "fp8-block-32", "fp8-tensor"))
# Rounded as the inputs of a target with experts and dense layers are, which stays.
LIKE_EXPERTS = (("fp8-channel-token", "llama"), ("fp8-block", "llama"))
# Whole numbers and floats; tests/models/test_quantised.py has every format's matrices.
FEW_WEIGHTS_ONLY = ("fp8-channel-weights", "gptq", "nvfp4")
TARGETS = (*DENSE_TARGETS, *EXPERTS, ("mxfp4", "gpt_oss"), ("fp8-block", "deepseek_v3"))
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 32},
    "deepseek_v3": {"num_nextn_predict_layers": 0},
}


@pytest.fixture(autouse=True)
def rounded_inputs_on_a_cpu(monkeypatch):
    """Inputs are rounded where a checkpoint asks for it, as on a GPU."""
    monkeypatch.setattr(quantised, "adapt_to_device", lambda matrix: matrix)


@cache
def quantised_directories(kind: str, family: str, is_dense: bool) -> tuple[Path, Path]:
    """A quantised target, or the dense weights that it means, and a draft."""
    root = new_folder("quantised-")
    target = make_target(root / "target", family, layers=4, **FAMILY_FIELDS.get(family, {}))
    draft = make_eagle3(root / "draft", target, seed=1)
    unquantised = (target / "config.json").read_bytes()
    meant = quantise(target, kind)
    if is_dense:
        save_file(meant, target / "model.safetensors")
        (target / "config.json").write_bytes(unquantised)
    return target, draft


@cache
def quantised_models(kind: str, family: str, is_dense: bool) -> tuple[CausalLM, DraftModel]:
    target_path, draft_path = quantised_directories(kind, family, is_dense)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": MAX_POSITIONS}
    return load_pair(target_path, draft_path, **how)


@dataclass(frozen=True)
class QuantisedSetup(Setup):
    kind: str = "awq"
    is_dense: bool = False

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        target, draft = quantised_models(self.kind, self.family, self.is_dense)
        return target, draft if self.algorithm == "eagle3" else None


def setup_of(kind: str, family: str, **fields: Any) -> QuantisedSetup:
    return QuantisedSetup(kind=kind, family=family, steps=4, max_context=64, **fields)


def traffic(count: int = 3) -> list[Request]:
    return [
        request(i, prompt, SamplingParams(max_tokens=8, **STYLES[i % len(STYLES)]), seed=70 + i)
        for i, prompt in enumerate(prompts(5, [3, 14, 6, 9][:count]))
    ]


@cache
def alone(kind: str, family: str) -> list[list[int]]:
    """The tokens of plain decoding, each request alone."""
    setup = setup_of(kind, family).plain()
    return [run(setup.engine(), [one]).tokens[0] for one in traffic()]


def same(kind: str, family: str, **fields: Any) -> Ran:
    ran = run(setup_of(kind, family, **fields).engine(), traffic())
    assert ran.tokens == alone(kind, family)
    return ran


TREES = ({"topk": 1, "num_draft_tokens": 5}, {"topk": 4, "num_draft_tokens": 16})


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(
            *target,
            marks=pytest.mark.full
            if target in (*EXPERTS, *LIKE_AWQ, *LIKE_OTHERS, *LIKE_EXPERTS) and target not in FEW_EXPERTS
            else (),
        )
        for target in TARGETS
    ],
)
def test_a_tree_in_a_batch_gives_the_tokens_of_plain_decoding_alone(kind, family):
    ran = same(kind, family, page_size=16, **TREES[1])
    assert ran.stats.emitted > ran.stats.rounds


@pytest.mark.full
@pytest.mark.parametrize(("kind", "family"), TARGETS)
@pytest.mark.parametrize(
    ("page_size", "tree", "attention", "overlap"),
    [*product((1, 16), TREES, ("sdpa", "reference"), (False, True))],
)
def test_layouts(kind, family, page_size, tree, attention, overlap):
    same(kind, family, page_size=page_size, attention=attention, overlap=overlap, **tree)


@pytest.mark.parametrize("kind", fewer(WEIGHTS_ONLY, lambda kind: kind in FEW_WEIGHTS_ONLY))
def test_formats_that_do_not_round_inputs_give_the_tokens_of_their_dense_weights(kind):
    dense = run(setup_of(kind, "llama", is_dense=True, page_size=1, **TREES[0]).engine(), traffic())
    assert dense.tokens == alone(kind, "llama")


def test_scales_over_the_batch_are_noticed(monkeypatch):
    """Inputs rounded with one scale for all rows: neighbours and siblings change a request's tokens."""
    quantise_inputs = kernels.quantise_inputs

    def over_the_batch(x, inputs):
        widest = x.abs().amax().expand(len(x), 1)
        values, scales = quantise_inputs(torch.cat((x, widest), 1), inputs)
        return values[:, :-1], scales

    monkeypatch.setattr(kernels, "quantise_inputs", over_the_batch)
    with pytest.raises(AssertionError):
        same("fp8-channel-token", "llama", page_size=16, **TREES[1])
