"""Block drafts in training: the module computes what the engine's draft computes, a text and its edges are learnt, and
a run goes on where it was interrupted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from espalier.models import load_target, read_config
from espalier.speculate.drafters.registry import load_draft, read_draft
from espalier.train.block import (
    TREES,
    accept_lengths,
    load_block,
    mask_embedding,
    measure_block,
    train_block,
)
from espalier.train.block_head import BlockHead, BlockShape, block_loss
from espalier.train.command import make_parser
from espalier.train.draft_run import backward
from espalier.train.llama import Llama, LlamaShape, save_llama
from espalier.train.settings import BlockConfig
from espalier.train.target import Eagle3Target, FrozenTarget
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
    num_tokens=70 * 8 * 24,
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


def make_target(directory: Path, text: np.ndarray) -> Path:
    """A small target that has learnt a text."""
    torch.manual_seed(0)
    model = Llama(TARGET)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(80):
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
        patch.setattr(FrozenTarget, "trimmed", lambda self, row, length: row)
        patch.setattr("espalier.train.block.HELDOUT_PROMPTS", 2)
        train_block(ring_target, ring(8000), out, out / "work", CONFIG)
    return out


def test_a_trained_draft_predicts_a_ring_at_every_depth(ring_target, trained):
    head, target = load_block(trained).float().eval(), Eagle3Target(ring_target, CPU)
    tokens = torch.from_numpy(ring(24, start=3).astype(np.int64))
    assert accept_lengths(head, target, tokens, 4, topk=1, num_draft_tokens=0).tolist() == [4] * 17
    reports = measure_block(head, target, [ring(24, start=3)], [4])
    assert {name: found.every_root for name, found in reports.items()} == dict.fromkeys(TREES, 4.0)


def test_the_module_computes_what_the_engine_computes(ring_target, trained):
    """The file is read as any block draft is: context rows, block, head and edges."""
    capture = read_draft(trained, read_config(ring_target)).spec.capture
    loading = {"dtype": torch.float32, "device": "cpu", "position_rows": 64}
    target = load_target(ring_target, capture=capture, **loading)
    draft = load_draft(trained, target, **loading)
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
        attend = OverContext(draft.layer_specs, context, draft.spec.causal)
        torch.testing.assert_close(
            draft(ids, anchor + torch.arange(3)[None], attend)[0], outputs[0, block], rtol=1e-4, atol=1e-4
        )
    every = torch.arange(16)[None]
    hidden = outputs[:, :1, 0]
    logits = draft.block_logits(hidden)
    edges = draft.edges.of_block(logits, hidden).logits(0, draft.edges.before[every]) - logits[:, :1]
    torch.testing.assert_close(edges, head.markov_head(head.markov_head.markov_w1(every)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("edge_rank", [pytest.param(0, marks=pytest.mark.full), 8])
def test_edges_learn_what_the_token_before_decides(edge_rank, tmp_path):
    """Behind an odd root, depth 1 is any even token, and depth 2 follows from it alone."""
    target_dir = make_target(tmp_path / "target", pairs(6000))
    config = replace(CONFIG, edge_rank=edge_rank, block_size=2, matrix_lr=5e-3, other_lr=3e-2)
    train_block(target_dir, pairs(9000, seed=2), tmp_path / "draft", tmp_path / "work", config)
    head, target = load_block(tmp_path / "draft").float().eval(), Eagle3Target(target_dir, CPU)
    texts = [torch.from_numpy(pairs(24, seed=seed).astype(np.int64)) for seed in range(20, 30)]
    # Odd roots.  Eight pairs of nodes hold every continuation, if the draft knows which tokens belong together.
    lengths = torch.cat([accept_lengths(head, target, t, 5, topk=8, num_draft_tokens=17)[::2] for t in texts])
    assert lengths.float().mean() > 2.9 if edge_rank else lengths.float().mean() < 2.5


def test_the_loss_is_that_of_each_depth(ring_target):
    """A draft whose every row is certain of the target's pick has agreement 1; one depth off, none."""
    target = Eagle3Target(ring_target, CPU)
    tokens = torch.from_numpy(ring(26).astype(np.int64))[None]
    features, logits = target(tokens)
    shape = BlockShape(18, 32, 32, 1, 4, 2, 8, block_size=3, num_features=3, edge_rank=0, mask_token_id=16)

    class Told(BlockHead):
        def forward(self, roots: Tensor, mask_embed: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
            at = anchors[:, None] + torch.arange(3) + self.late
            return torch.nn.functional.one_hot(tokens[0, 1:][at], 18).float()[None]

    anchors = torch.tensor([1, 9, 20])
    for late, expected in ((0, 1.0), (1, 0.0)):
        head = Told(shape)
        head.late = late
        embeds = target.embed(tokens[:, 1:]), torch.zeros(32)
        found = block_loss(
            head, 9 * torch.eye(18), embeds, tokens[:, 1:], features[:, :-1], logits[:, 1:], anchors, 0.5
        )
        assert found[1].tolist() == [expected] * 3
    assert found[0] > 0


def test_an_interrupted_run_goes_on(ring_target, tmp_path, monkeypatch, capsys):
    calls = 0

    def interrupted(run, batch):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return backward(run, batch)

    config = replace(CONFIG, num_tokens=6 * 8 * 24, log_every=1)
    monkeypatch.setattr("espalier.train.draft_run.backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_block(ring_target, ring(8000), tmp_path / "draft", tmp_path / "work", config)
    assert (tmp_path / "draft" / "model.safetensors").exists()
    figures = train_block(ring_target, ring(8000), tmp_path / "draft", tmp_path / "work", config)
    said = capsys.readouterr().out
    assert "resumed at step 3" in said and "held out: nothing" in said and calls == 4 + 3
    assert figures["seen_tokens"] == 6 * 8 * 24


def test_settings_that_do_not_fit_are_refused(ring_target, tmp_path):
    with pytest.raises(ValueError, match="--block-size=24 does not fit into --length 24"):
        replace(CONFIG, block_size=24)
    with pytest.raises(ValueError, match="--anchors=0 is not supported; use a whole number, 1 or more"):
        replace(CONFIG, anchors=0)
    with pytest.raises(ValueError, match="give at least 4096"):
        train_block(ring_target, ring(300), tmp_path / "draft", tmp_path / "work", CONFIG)


def test_the_command_has_a_flag_for_each_setting():
    flags = ["block", "--target", "t", "--data", "d", "--out", "o", "--edge-rank", "0", "--block-size", "16"]
    arguments = make_parser().parse_args(flags)
    assert (arguments.edge_rank, arguments.block_size, arguments.layers) == (0, 16, 3)
