"""Block drafts in training: the module computes what the engine's draft computes, a text and its edges are learnt, and
a run goes on where it was interrupted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from espalier.kernels.tree.edges import DepthRows
from espalier.models import DraftModel
from espalier.train.block import (
    MEASURED_TREES,
    accept_lengths,
    load_block,
    mask_embedding,
    new_head,
    save_block,
    trees_to_measure,
)
from espalier.train.block_head import BlockHead, BlockShape, block_loss
from espalier.train.command import make_parser
from espalier.train.data import UserText
from espalier.train.draft_run import backward
from espalier.train.kinds import BLOCK, measure, train
from espalier.train.llama import LlamaShape
from espalier.train.optim import make_optimizers
from espalier.train.settings import EDGE_KINDS, BlockConfig
from espalier.train.target import Eagle3Target
from lab.bundle.llama import Llama, save_llama
from tests.checkpoints import load_pair
from tests.models.test_block_format import OverContext, context_planes

CPU = torch.device("cpu")
# Tokens 0 to 15 are text, 16 is the mask, 17 ends a text.
TARGET = LlamaShape(
    vocab_size=18,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
CONFIG = BlockConfig(
    length=24,
    batch=8,
    num_tokens=55 * 8 * 24,
    own_share=0.0,
    continuations=4,
    continuation_tokens=4,
    generate_batch=4,
    log_every=100,
    layers=2,
    block_size=3,
    edge_rank=8,
    anchors=8,
    mask_token=16,
    matrix_lr=0.02,
)


def ring(length: int, start: int = 0) -> np.ndarray:
    """Text in which t is followed by t + 5: a ring through all 16 tokens."""
    return ((np.arange(length) * 5 + start) % 16).astype(np.uint16)


def pairs(length: int, seed: int = 0) -> np.ndarray:
    """Pairs of a random even token t and t + 1: what follows an odd token is open, what follows an even one is not."""
    first = np.random.default_rng(seed).integers(0, 8, length // 2) * 2
    return np.stack((first, first + 1), 1).reshape(-1).astype(np.uint16)


def triples(length: int, seed: int = 0) -> np.ndarray:
    """Triples of a random token t in 0 .. 3, token 8, and t + 9: what follows 8 depends on the token before it."""
    first = np.random.default_rng(seed).integers(0, 4, length // 3)
    return np.stack((first, np.full_like(first, 8), first + 9), 1).reshape(-1).astype(np.uint16)


def make_target(directory: Path, text: np.ndarray, steps: int = 50) -> Path:
    """A small target that has learnt a text."""
    torch.manual_seed(0)
    model = Llama(TARGET)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        batch = torch.from_numpy(np.roll(text, -97 * step)[: 33 * 8].astype(np.int64)).view(8, 33)
        model(batch[:, :-1], batch[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_llama(model, directory, [17])
    return directory


@pytest.fixture(scope="module")
def ring_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("block") / "target", ring(5000))


@pytest.fixture(scope="module")
def trained(ring_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("block") / "draft"
    # A ring repeats at once: untrimmed, so that there is held-out text to measure.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("espalier.train.writer.cut_before_loop", lambda text, _: text)
        patch.setattr("espalier.train.data.HELDOUT_PROMPTS", 2)
        train("block", ring_target, UserText(ring(8000)), out, out / "work", CONFIG)
    return out


def test_held_out_text_that_ends_within_a_block_is_not_measured(ring_target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("espalier.train.writer.cut_before_loop", lambda text, _: text)
    config = replace(CONFIG, block_size=10, continuation_tokens=9, num_tokens=8 * 24)
    train("block", ring_target, UserText(ring(8000)), tmp_path / "out", tmp_path / "work", config)
    assert "held out: nothing" in capsys.readouterr().out


def test_a_trained_draft_predicts_a_ring_at_every_depth(ring_target, trained):
    head, target = load_block(trained).float().eval(), Eagle3Target(ring_target, CPU)
    tokens = torch.from_numpy(ring(24, start=3).astype(np.int64))
    assert accept_lengths(head, target, tokens, 4, topk=1, num_draft_tokens=0).tolist() == [4] * 17
    trees = trees_to_measure(head)
    reports = [measure(BLOCK, head, target, [ring(24, start=3)], [4], tree) for tree in trees.values()]
    assert list(trees) == list(MEASURED_TREES) and [found.every_root for found in reports] == [4.0] * 3


def engines_draft(directory: Path, target_dir: Path) -> DraftModel:
    """The draft as the engine reads it."""
    return load_pair(target_dir, directory, dtype=torch.float32, device="cpu", position_rows=64)[1]


def test_the_module_computes_what_the_engine_computes(ring_target, trained):
    """The file is read as any block draft is: context rows and block."""
    draft = engines_draft(trained, ring_target)
    assert (draft.spec.max_steps, draft.spec.block_rows) == (3, 3)
    head, frozen = load_block(trained).float().eval(), Eagle3Target(ring_target, CPU)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 16, 20))[None]
    features, _ = frozen(tokens)
    anchors = torch.tensor([1, 7, 15])
    with torch.no_grad():
        outputs = head(frozen.embed(tokens[:, anchors]), mask_embedding(frozen, head), features, anchors)
    for block, anchor in enumerate(anchors.tolist()):
        context = context_planes(draft, features[:, :anchor], 0)
        ids = torch.tensor([[int(tokens[0, anchor]), *[head.shape.mask_token_id] * 2]])
        torch.testing.assert_close(
            draft(OverContext(draft, ids, anchor + torch.arange(3)[None], context))[0],
            outputs[0, block],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("kind", EDGE_KINDS)
def test_edges_in_a_text_are_the_engines_edges_of_its_path(kind, ring_target, tmp_path):
    """Those of the engine's draft, which reads the trainer's file, and those by which the trainer measures a draft."""
    frozen, generator = Eagle3Target(ring_target, CPU), torch.Generator().manual_seed(0)
    saved = new_head(frozen, replace(CONFIG, edge_kind=kind))
    for parameter in saved.markov_head.parameters():
        parameter.data.normal_(generator=generator)
    save_block(saved, frozen, ring_target, tmp_path)
    markov, draft = load_block(tmp_path).float().markov_head, engines_draft(tmp_path, ring_target)
    hidden = torch.randn(2, 3, 32, generator=generator)
    logits = draft.block_logits(hidden)
    # 5 paths from each of 2 roots.
    paths = torch.randint(0, 18, (2, 5, 3), generator=generator)
    with torch.no_grad():
        factors = markov.factors(paths, hidden[:, None].expand(-1, 5, -1, -1))
        wanted = logits[:, None] + markov(factors)
        for edges in (draft.edge_scorer.score_edges(logits, hidden), markov.edges(logits, hidden)):
            assert edges.is_recurrent == (kind == "rnn")
            states, parents, order = None, None, torch.arange(5)
            for depth in range(3):
                rows = DepthRows(paths[:, order, depth], torch.zeros(2, 5), parents, states)
                found, states = edges.factors(depth, rows)
                torch.testing.assert_close(edges.logits(depth, found), wanted[:, order, depth], rtol=1e-4, atol=1e-4)
                # The next depth has these paths in another order.
                turn = torch.tensor([2, 0, 4, 1, 3])
                parents, order = turn.expand(2, 5), order[turn]


FULL = {"marks": pytest.mark.full}


@pytest.mark.parametrize(
    ("edge_rank", "kind"), [pytest.param(0, "vanilla", **FULL), (8, "vanilla"), pytest.param(8, "gated", **FULL)]
)
def test_edges_learn_what_the_token_before_decides(edge_rank, kind, tmp_path):
    """Behind an odd root, depth 1 is any even token, and depth 2 follows from it alone."""
    target_dir = make_target(tmp_path / "target", pairs(6000))
    config = replace(CONFIG, edge_rank=edge_rank, edge_kind=kind, block_size=2, matrix_lr=5e-3, other_lr=3e-2)
    train("block", target_dir, UserText(pairs(9000, seed=2)), tmp_path / "draft", tmp_path / "work", config)
    head, target = load_block(tmp_path / "draft").float().eval(), Eagle3Target(target_dir, CPU)
    texts = [torch.from_numpy(pairs(24, seed=seed).astype(np.int64)) for seed in range(20, 30)]
    # Odd roots.  Eight pairs of nodes hold every continuation, if the draft knows which tokens belong together.
    lengths = torch.cat([accept_lengths(head, target, t, 5, topk=8, num_draft_tokens=17)[::2] for t in texts])
    assert lengths.float().mean() > 2.9 if edge_rank else lengths.float().mean() < 2.5


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_recurrent_edges_learn_what_the_token_two_before_decides(kind, tmp_path):
    """Behind the end of a triple, depth 1 is one of 4 tokens, depth 2 is token 8, and depth 3 follows from depth 1."""
    target_dir = make_target(tmp_path / "target", triples(6000), steps=200)
    settings = {"edge_rank": 16, "anchors": 16, "num_tokens": 140 * 8 * 24, "matrix_lr": 0.04, "other_lr": 0.05}
    config = replace(CONFIG, edge_kind=kind, **settings)
    train("block", target_dir, UserText(triples(9000, seed=2)), tmp_path / "draft", tmp_path / "work", config)
    head, target = load_block(tmp_path / "draft").float().eval(), Eagle3Target(target_dir, CPU)
    texts = [torch.from_numpy(triples(33, seed=seed).astype(np.int64)) for seed in range(20, 30)]
    # Ends of triples.  Four triples of nodes hold every continuation, if the draft knows which tokens belong together.
    lengths = torch.cat([accept_lengths(head, target, t, 5, topk=8, num_draft_tokens=13)[::3] for t in texts])
    assert lengths.float().mean() > 3.9 if kind == "rnn" else lengths.float().mean() < 3.5


@pytest.mark.parametrize(("kind", "projection"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_muon_trains_the_projection_of_a_markov_head(kind, projection, ring_target):
    head = new_head(Eagle3Target(ring_target, CPU), replace(CONFIG, edge_kind=kind))
    names = {parameter: name.removeprefix("markov_head.") for name, parameter in head.named_parameters()}
    muon, adam = (
        {names[p] for group in each.param_groups for p in group["params"]}
        for each in make_optimizers(head, 1e-3, 1e-3, 0.0)
    )
    assert {f"{projection}.weight", "fc.weight"} < muon
    assert {f"{projection}.bias", "markov_w1.weight", "markov_w2.weight", "norm.weight"} < adam


def test_the_loss_is_that_of_each_depth(ring_target):
    """A draft whose every row is certain of the target's pick has agreement 1; one depth off, none."""
    target = Eagle3Target(ring_target, CPU)
    tokens = torch.from_numpy(ring(26).astype(np.int64))[None]
    features, logits = target(tokens)
    sizes = {**vars(TARGET), "num_hidden_layers": 1}
    shape = BlockShape(**sizes, block_size=3, num_features=3, edge_rank=0, mask_token_id=16)

    class Told(BlockHead):
        def forward(self, roots: Tensor, mask_embed: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
            at = anchors[:, None] + torch.arange(3) + self.late
            return torch.nn.functional.one_hot(tokens[0, 1:][at], 18).float()[None]

    anchors, every = torch.tensor([1, 9, 20]), torch.ones(logits.shape[0], logits.shape[1] - 1, dtype=torch.bool)
    for late, expected in ((0, 1.0), (1, 0.0)):
        head = Told(shape)
        head.late = late
        embeds = target.embed(tokens[:, 1:]), torch.zeros(32)
        found = block_loss(
            head, 9 * torch.eye(18), embeds, tokens[:, 1:], features[:, :-1], logits[:, 1:], every, anchors, 0.5
        )
        assert found[1].tolist() == [expected] * 3
    assert found[0] > 0


@pytest.mark.parametrize("kind", EDGE_KINDS)
def test_the_loss_is_that_of_the_engines_edges_of_the_text(kind, ring_target):
    target = Eagle3Target(ring_target, CPU)
    head = new_head(target, replace(CONFIG, edge_kind=kind))
    for parameter in head.markov_head.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 16, (2, 21)))
    features, wanted = target(tokens)
    learned = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) > 0.4
    anchors, embeds = torch.tensor([1, 7, 15]), (target.embed(tokens[:, 1:]), mask_embedding(target, head))
    with torch.no_grad():
        found, _ = block_loss(
            *(head, target.lm_head, embeds, tokens[:, 1:], features[:, :-1], wanted[:, 1:], learned, anchors, 0.5)
        )
        outputs = head(target.embed(tokens[:, anchors]), embeds[1], features[:, :-1], anchors).flatten(0, 1)
        edges, states, expected = head.markov_head.edges(outputs @ target.lm_head.T, outputs), None, 0.0
        for depth in range(3):
            before = tokens[:, anchors + depth].flatten()
            rows = DepthRows.for_roots(before)._replace(parents=torch.zeros(6, 1, dtype=torch.int64), states=states)
            factors, states = edges.factors(depth, rows)
            told, counts = (
                wanted[:, anchors + depth].flatten(0, 1).softmax(-1),
                learned[:, anchors + depth - 1].flatten(),
            )
            logits = edges.logits(depth, factors)[:, 0]
            expected += 0.5**depth * torch.nn.functional.cross_entropy(logits[counts], told[counts])
    torch.testing.assert_close(found, expected)


def test_an_interrupted_run_goes_on(ring_target, tmp_path, monkeypatch, capsys):
    calls = 0

    def interrupted(run, *batch):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return backward(run, *batch)

    config = replace(CONFIG, num_tokens=6 * 8 * 24, log_every=1)
    monkeypatch.setattr("espalier.train.draft_run.backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train("block", ring_target, UserText(ring(8000)), tmp_path / "draft", tmp_path / "work", config)
    assert (tmp_path / "draft" / "model.safetensors").exists()
    figures = train("block", ring_target, UserText(ring(8000)), tmp_path / "draft", tmp_path / "work", config)
    said = capsys.readouterr().out
    assert "resumed at step 3" in said and "held out: nothing" in said and calls == 4 + 3
    assert figures["seen_tokens"] == 6 * 8 * 24


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--block-size=24 does not fit into --length 24"):
        replace(CONFIG, block_size=24)
    with pytest.raises(ValueError, match="--anchors=0 is not supported; use a whole number, 1 or more"):
        replace(CONFIG, anchors=0)
    with pytest.raises(ValueError, match="--edge-kind='lstm' is not supported; use vanilla, gated or rnn"):
        replace(CONFIG, edge_kind="lstm")
    with pytest.raises(ValueError, match="--edge-kind=rnn needs a Markov head; use --edge-rank 1 or more"):
        replace(CONFIG, edge_kind="rnn", edge_rank=0)


def test_the_command_has_a_flag_for_each_setting():
    flags = ["block", "--target", "t", "--data", "d", "--out", "o"]
    arguments = make_parser().parse_args([*flags, "--edge-rank", "0", "--block-size", "16"])
    assert (arguments.edge_rank, arguments.block_size, arguments.layers) == (0, 16, 3)
    kinds = [make_parser().parse_args([*flags, "--edge-kind", kind]).edge_kind for kind in EDGE_KINDS]
    assert tuple(kinds) == EDGE_KINDS and arguments.edge_kind == "vanilla"
