"""Synthetic models with experts and with latent attention: the chain survives both, and routing is as planted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import route
from espalier.models.families.gemma4 import ParallelMLP
from espalier.models.layers.mlp import MixtureMLP, RoutedRows
from espalier.models.rope import RopeTables
from lab.synthetic.chain import predicted_accept_length
from lab.synthetic.checkpoint import Recipe, build_models
from lab.synthetic.quantised import QuantisedTensors
from tests.harness import CPU
from tests.lab.shapes import greedy_continuation
from tests.lab.synthetic.mixtures import HYBRIDS, SUPPORTED, WITH_EXPERTS, mixture
from tests.lab.synthetic.test_checkpoint import POSITIONS, REACH, an_engine, followed_rule, generate, prompts, tiny
from tests.oracles.dense import DensePass

TREE = (5, 4, 16)
TYPICAL = ("qwen3-moe", "v3")


@pytest.mark.parametrize("name", [*SUPPORTED, *HYBRIDS])
def test_transformers_and_espalier_follow_the_rule(name: str, tmp_path: Path) -> None:
    followed_rule(Recipe(mixture(name), routing_correlation=0.5 if name in WITH_EXPERTS else 0.0), tmp_path)


@pytest.mark.parametrize("weights", ["dense", "fp8"])
@pytest.mark.parametrize("name", [name for name in (*SUPPORTED, *HYBRIDS) if name != "gpt-oss"])
def test_layers_hold_each_weight_once_and_as_it_is_stored(name: str, weights: str) -> None:
    """Scales of rows and blocks may be held in a finer division."""
    recipe = Recipe(mixture(name), weights=weights)
    tensors, _ = recipe.tensors(torch.bfloat16, CPU)
    layers = [each for each in tensors.shapes if ".layers." in each]
    stored = sum(torch.Size(tensors.shapes[each]).numel() * itemsize(tensors, each) for each in layers)
    target, _ = build_models(recipe, torch.bfloat16, CPU, POSITIONS)
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors_in(target.layers)}
    # FP8's share is that of matrices: embeddings of position and small vectors stay as they are.
    assert stored * 0.9 < sum(held.values()) < stored * 1.15


def itemsize(tensors: Any, name: str) -> int:
    return tensors.itemsize(name) if isinstance(tensors, QuantisedTensors) else tensors.dtype.itemsize


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif type(value).__module__.startswith("espalier.") and not isinstance(value, RopeTables):
        own = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {*own, *getattr(value, "__dict__", ())}:
            yield from tensors_in(getattr(value, name, None))


@pytest.mark.parametrize("name", [pytest.param("qwen3.6", marks=pytest.mark.full), "qwen3.6-moe", "nemotron"])
def test_states_and_an_mtp_head_follow_the_rule(name: str) -> None:
    recipe = Recipe(mixture(name, hot=1024), skill=0.75, mtp_layers=1)
    engine = an_engine(recipe, (3, 4, 16), torch.float32, batch=4)
    starts = prompts(recipe, 4)
    assert generate(engine, starts, 40) == [greedy_continuation(recipe.chain(), start, 40) for start in starts]
    assert engine.totals.accept_length > 1.8


# Plain K/V and latent.  What each family's layers compute is compared above.
@pytest.mark.parametrize(
    "name", [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.full) for name in SUPPORTED]
)
def test_text_and_acceptance_are_as_planted(name: str) -> None:
    """Through the whole engine, with an EAGLE-3 head, against the prediction from tables alone."""
    # Without a shared topic the rounds of a text touch other experts all the time.
    correlation = 1.0 if name == "qwen3-moe" else 0.0
    recipe = Recipe(mixture(name, hot=1024), skill=0.75, routing_correlation=correlation)
    engine = an_engine(recipe, TREE, torch.float32, batch=8)
    starts = prompts(recipe, 8)
    assert generate(engine, starts, 100) == [greedy_continuation(recipe.chain(), start, 100) for start in starts]
    # About 210 rounds of deviation 1.7: within 0.12 of the mean, mostly.
    predicted = predicted_accept_length(recipe.chain(), *TREE)
    assert engine.totals.accept_length == pytest.approx(predicted, abs=0.35)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        name if "qwen3" in name else pytest.param(name, marks=pytest.mark.full)
        for name in WITH_EXPERTS
        if "qwen" in name
    ],
)
def test_copied_text_passes_through_experts(name: str) -> None:
    recipe = Recipe(mixture(name), mode="copy", reach=REACH, routing_correlation=0.5)
    [start] = prompts(recipe, 1)
    assert generate(an_engine(recipe, TREE, torch.float64, batch=1), [start], 60) == [
        greedy_continuation(recipe.chain(), start, 60)
    ]


def routed(recipe: Recipe, text: list[int]) -> list[torch.Tensor]:
    """The experts [tokens, K] of a text in each layer with experts."""
    target, _ = build_models(recipe, torch.float32, CPU, POSITIONS)
    seen: list[torch.Tensor] = []

    class Noting:
        def __init__(self, mlp: MixtureMLP) -> None:
            self.mlp, self.norm_input, self.router = mlp, mlp.norm_input, mlp.router

        def __call__(self, rows: RoutedRows, live: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(route(rows.logits, self.mlp.router_bias, self.mlp.routing)[0])
            return self.mlp(rows, live)

    for layer in target.layers:
        if isinstance(layer.mlp, MixtureMLP):
            layer.mlp = Noting(layer.mlp)
        elif isinstance(layer.mlp, ParallelMLP):
            layer.mlp.mixture = Noting(layer.mlp.mixture)
    target(DensePass(torch.tensor([text]), target.layer_specs, torch.arange(len(text))[None]))
    return seen


def test_a_tree_stays_in_its_topic() -> None:
    """All that the draft proposes after a token is in the token's topic, except near a topic's end."""
    share = {}
    for correlation in (0.0, 1.0):
        chain = Recipe(mixture("qwen3-moe", hot=1024), routing_correlation=correlation).chain()
        places = torch.arange(chain.size)
        after = chain.topic[chain.token_at(places[:, None] + chain.shifts)]
        share[correlation] = float((after == chain.topic[chain.token_at(places)][:, None]).float().mean())
    assert share[0.0] < 0.5 and share[1.0] > 0.95


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_routing_is_uniform_at_0_and_shared_at_1(name: str) -> None:
    shape = mixture(name, hot=1024)
    routing = shape.target.experts.routing
    shared = {}
    for correlation in (0.0, 0.5, 1.0):
        recipe = Recipe(shape, routing_correlation=correlation)
        chain = recipe.chain()
        steps = torch.arange(256) * chain.shifts[0]
        places = (2 * 256 * chain.shifts[0] + steps) % chain.size  # a topic, from its first token
        layers = routed(recipe, chain.token_at(places).tolist())
        assert len(layers) == len(shape.target.experts.layers)
        # The first tokens of a text attend to few others and are disturbed more.
        in_common = [(a[:-1, :, None] == a[1:, None]).sum().item() / a[1:].numel() for a in layers]
        shared[correlation] = sum(in_common) / len(in_common)
        if not correlation:
            # No expert is left out, and none is preferred: each has 64 of 1024 pairs, give or take 8.
            counts = torch.stack([a.flatten().bincount(minlength=routing.num_experts) for a in layers])
            assert counts.min() > 20 and counts.max() < 120
    uniform = routing.top_k / routing.num_experts
    assert shared[0.0] == pytest.approx(uniform, abs=0.08) and shared[1.0] > 0.97
    assert shared[0.0] + 0.1 < shared[0.5] < shared[1.0] - 0.1


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (Recipe(tiny(), routing_correlation=0.5), "routing_correlation=0.5 is for mixtures of experts"),
        (Recipe(mixture("qwen3-moe"), routing_correlation=1.5), "routing_correlation=1.5"),
        (Recipe(mixture("v3-dense"), mode="copy", reach=REACH), "copy mode is not for latent attention"),
    ],
    ids=["dense", "above", "latent"],
)
def test_what_cannot_be_planted_is_refused(recipe: Recipe, says: str) -> None:
    with pytest.raises(EspalierError, match=says):
        recipe.tensors(torch.float32, CPU)
