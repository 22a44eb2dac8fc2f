"""Planted MTP heads: the file that is written, run by the trainer's module, is accepted as the tables say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.bench.shapes import Shape
from espalier.errors import EspalierError
from espalier.train.kinds import MTP, measure
from espalier.train.llama import LlamaShape
from espalier.train.mtp import agreement_by_depth
from espalier.train.mtp_checkpoint import load_mtp
from espalier.train.mtp_head import MtpHead
from espalier.train.target import FrozenTarget
from lab.synthetic.chain import PROBABILITIES, Chain, predicted_accept_length
from lab.synthetic.checkpoint import Recipe, write_checkpoint
from lab.synthetic.draft_json import mtp_json
from tests.harness import CPU
from tests.lab.shapes import greedy_continuation
from tests.lab.synthetic.mixtures import SUPPORTED, mixture
from tests.lab.synthetic.test_checkpoint import a_recipe, prompts, tiny

LONG = tiny(hot=512)


def planted(recipe: Recipe, path: Path) -> tuple[FrozenTarget, MtpHead, Chain]:
    target, draft = write_checkpoint(recipe, path, torch.float32)
    return FrozenTarget(target, CPU), load_mtp(draft), recipe.chain()


def greedy_text(recipe: Recipe, count: int) -> np.ndarray:
    [start] = prompts(recipe, 1)
    return np.array(start + greedy_continuation(recipe.chain(), start, count))


@pytest.mark.parametrize(
    ("layers", "form", "steps", "skill"),
    [
        (1, "chain", 3, 0.75),
        pytest.param(3, "chain", 3, 0.6, marks=pytest.mark.full),
        (3, "target", 3, 0.9),
        (3, "chain", 5, 0.75),
    ],
)
def test_the_head_is_accepted_as_the_tables_say(
    layers: int, form: str, steps: int, skill: float, tmp_path: Path
) -> None:
    recipe = a_recipe(shape=LONG, skill=skill, mtp_layers=layers, mtp_form=form)
    target, head, chain = planted(recipe, tmp_path)
    assert (len(head.layers), head.form) == (layers, form)
    # Every place of the ring once, as a root.
    text = greedy_text(recipe, 512 + steps)
    firsts = [len(text) - steps - 512]
    agreement = agreement_by_depth(head, target, [text], firsts, steps)
    by_depth = [float((chain.draft_logp.argmax(1) == 0).double().mean())] * steps
    assert agreement == pytest.approx(by_depth, abs=0.01)
    predicted = predicted_accept_length(chain, steps, 1, steps + 1, samples=8192)
    accept = measure(MTP, head, target, [text], firsts, (steps, 1, steps + 1))
    assert accept.every_root == pytest.approx(predicted, abs=0.05)


def test_log_probabilities_are_those_of_the_tables(tmp_path: Path) -> None:
    recipe = a_recipe(shape=LONG, skill=0.5, mtp_layers=2)
    target, head, chain = planted(recipe, tmp_path)
    tokens = torch.from_numpy(greedy_text(recipe, 300))
    hidden, logits = target(tokens[None])
    outputs = head.unroll(target.embed(tokens[None, 1:]), hidden[:, :-1], 2)
    for depth, output in enumerate(outputs, 1):
        last = tokens[depth:][40:]
        given = (output[0, 40:] @ target.lm_head.T).log_softmax(-1).gather(1, chain.successors(last))
        table = chain.draft_logp[chain.place[last], : len(PROBABILITIES)]
        buried = table.isinf()
        assert 30 < buried.any(1).sum() < 100 and given[buried].max() < -15
        torch.testing.assert_close((given - table)[~buried].mean(), torch.tensor(0.0), rtol=0, atol=0.05)
        assert (given - table)[~buried].abs().max() < 1.5
    # The target does not see the nudges.
    given = logits[0, 40:].softmax(-1).gather(1, chain.successors(tokens[40:]))
    torch.testing.assert_close(given.mean(0), torch.tensor(PROBABILITIES), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["tiny", *SUPPORTED])
def test_any_shape_takes_a_head_of_llama_layers(name: str, tmp_path: Path) -> None:
    shape = tiny() if name == "tiny" else mixture(name)
    target, draft = Recipe(shape, mtp_layers=3, skill=0.9).tensors(torch.float32, CPU)
    head = MtpHead(layer_shape(shape), "chain")
    assert {n: tuple(p.shape) for n, p in head.named_parameters()} == draft.shapes
    head.load_state_dict({n: draft.tensor(n) for n in draft.shapes})
    embedding = target.tensor("model.embed_tokens.weight")
    chain = Recipe(shape, mtp_layers=3, skill=0.9).chain()
    tokens = chain.token_at(torch.arange(60) * chain.shifts[0])
    outputs = head.unroll(embedding[tokens[None, 1:]], embedding[tokens[None, :-1]], 3)
    for depth, output in enumerate(outputs, 1):
        picks = (output[0] @ target.tensor("lm_head.weight").T).argmax(-1)
        last = tokens[depth:]
        best = chain.draft_logp[chain.place[last]].argmax(1)
        assert (picks == chain.token_at(chain.place[last] + chain.shifts[best])).float().mean() > 0.95


def layer_shape(shape: Shape) -> LlamaShape:
    layer = mtp_json(shape, 3, "chain")["transformer_layer_config"]
    return LlamaShape(**{name: layer[name] for name in LlamaShape.__dataclass_fields__ if name in layer})


def test_what_cannot_be_planted_is_refused() -> None:
    for changes in ({"mtp_layers": -1}, {"mtp_layers": 1, "mtp_form": "tree"}):
        with pytest.raises(EspalierError, match="use 1 or more layers and the form chain or target"):
            a_recipe(**changes).tensors(torch.float32, CPU)
