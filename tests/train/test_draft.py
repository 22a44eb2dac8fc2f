"""The draft's unrolled training form and the trainer's accept lengths, against row-by-row computation from scratch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from espalier.train.checkpoint import load_draft, save_draft
from espalier.train.draft import DraftShape, Eagle3Draft, training_loss
from espalier.train.evaluate import accept_lengths
from espalier.train.llama import rotate

SHAPE = DraftShape(
    vocab_size=24,
    draft_vocab_size=16,
    target_hidden_size=12,
    hidden_size=12,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
LENGTH = 14


@pytest.fixture
def draft() -> Eagle3Draft:
    torch.manual_seed(0)
    draft = Eagle3Draft(SHAPE).double()
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    # Loud enough that one wrong ancestor among the keys changes which paths are kept.
    draft.midlayer.self_attn.o_proj.weight.data *= 8
    draft.set_vocabulary(torch.randperm(24)[:16].sort().values, torch.zeros(24, 1))
    return draft


def plain_rows(draft: Eagle3Draft, embeds: Tensor, features: Tensor, path: Tensor) -> Tensor:
    """Outputs [R + P, H]: R rows fed by the target's features, then P rows each fed by the output before it.

    One row at a time with every key recomputed, written from the format's description alone.
    """
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    inputs = [(e, draft.fc(f)) for e, f in zip(embeds, features, strict=True)]
    outputs: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for position in range(len(embeds) + len(path)):
        embed, feature = inputs[position] if position < len(inputs) else (path[position - len(inputs)], outputs[-1])
        x = torch.cat((layer.input_layernorm(embed), layer.hidden_norm(feature)))
        cos, sin = draft.rope(torch.tensor([position]))
        q = rotate(attention.q_proj(x).view(4, 6), cos, sin)
        keys.append(rotate(attention.k_proj(x).view(2, 6), cos, sin))
        values.append(attention.v_proj(x).view(2, 6))
        heads = []
        for head in range(4):
            k, v = torch.stack(keys)[:, head // 2], torch.stack(values)[:, head // 2]
            heads.append(((k @ q[head]) / 6**0.5).softmax(0) @ v)
        x = feature + attention.o_proj(torch.cat(heads))
        outputs.append(x + layer.mlp(layer.post_attention_layernorm(x)))
    return torch.stack(outputs)


def test_every_chain_of_the_unroll_equals_rows_run_one_by_one(draft: Eagle3Draft) -> None:
    embeds, features = torch.randn(LENGTH, 12).double(), torch.randn(LENGTH, 36).double()
    unrolled = draft.unroll(embeds[None], features[None], 5)
    assert [o.shape[1] for o in unrolled] == [LENGTH - j for j in range(5)]
    for start in range(LENGTH):
        later = embeds[start + 1 : start + 5]
        plain = plain_rows(draft, embeds[: start + 1], features[: start + 1], later)
        for step in range(len(later) + 1):
            torch.testing.assert_close(unrolled[step][0, start], plain[start + step], rtol=1e-4, atol=1e-4)


class RandomTarget:
    """Features and embeddings without a model: the evaluation reads nothing else."""

    def __init__(self, num_tokens: int) -> None:
        self.table = torch.randn(24, 12).double()
        self.features = torch.randn(1, num_tokens, 36).double()

    def __call__(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.features[:, : tokens.shape[1]], None

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@torch.no_grad()
def grown_tree(draft: Eagle3Draft, target: RandomTarget, tokens: Tensor, root: int, steps: int, topk: int, nodes: int):
    """The kept paths of one root's tree, every node's logits from scratch."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    pool: list[tuple[tuple[int, ...], float]] = []
    for _ in range(steps):
        children = []
        for path, score in beams:
            gather_rows = target.table[torch.tensor(path, dtype=torch.int64)]
            rows = plain_rows(draft, target.table[tokens[1 : root + 1]], target.features[0, :root], gather_rows)
            log_probs = draft.logits(rows[-1]).log_softmax(-1)
            best = log_probs.topk(topk)
            children += [((*path, int(draft.target_ids[i])), score + float(v)) for v, i in zip(*best, strict=True)]
        pool += children
        beams = sorted(children, key=lambda c: -c[1])[:topk]
    return [path for path, _ in sorted(pool, key=lambda c: -c[1])[: nodes - 1]]


@pytest.mark.parametrize(("steps", "topk", "nodes"), [(4, 3, 12), (4, 1, 5), (2, 2, 4)])
def test_accept_lengths_equal_a_tree_grown_from_scratch(draft: Eagle3Draft, steps: int, topk: int, nodes: int) -> None:
    torch.manual_seed(1)
    tokens, target = draft.target_ids[torch.randint(16, (12,))], RandomTarget(12)
    reached = set()
    for root in range(2, 12 - steps):
        kept = grown_tree(draft, target, tokens, root, steps, topk, nodes)
        for path in kept:
            followed = tokens.clone()
            followed[root + 1 : root + 1 + len(path)] = torch.tensor(path)
            truth = followed[root + 1 : root + 1 + steps].tolist()
            expected = 1 + max((len(p) for p in kept if list(p) == truth[: len(p)]), default=0)
            lengths = accept_lengths(draft, target, followed, 1, steps, topk, nodes)
            assert int(lengths[root - 1]) == expected
            reached.add(expected)
    assert len(reached) > 1


def test_vocabulary_maps_there_and_back(draft: Eagle3Draft) -> None:
    ids = draft.target_ids
    assert torch.equal(ids, torch.arange(16) + draft.d2t)
    assert torch.equal(draft.t2d.nonzero().flatten(), ids)


def test_targets_outside_the_draft_vocabulary_teach_nothing(draft: Eagle3Draft) -> None:
    embeds, features = torch.randn(1, 6, 12).double(), torch.randn(1, 6, 36).double()
    logits = torch.zeros(1, 6, 24)
    logits[..., int((~draft.t2d).nonzero()[0])] = 9.0
    loss, agreement = training_loss(draft, embeds, features, logits, torch.ones(1, 6).bool(), 3, 1.0)
    assert loss.item() == 0.0
    assert agreement.tolist() == [0.0, 0.0, 0.0]


def test_rows_that_are_not_learned_teach_nothing(draft: Eagle3Draft) -> None:
    """The loss over a mask is that of the other rows alone, at every depth."""
    embeds, features = torch.randn(1, 6, 12).double(), torch.randn(1, 6, 36).double()
    logits, learned = torch.randn(1, 6, 24), torch.tensor([[True, False, True, False, False, True]])
    changed = torch.where(learned[..., None], logits, torch.randn(1, 6, 24))
    found = [training_loss(draft, embeds, features, told, learned, 3, 0.5)[0] for told in (logits, changed)]
    assert found[0] == found[1] > 0
    assert training_loss(draft, embeds, features, logits, torch.zeros(1, 6).bool(), 3, 0.5)[0] == 0


def test_checkpoint_has_exactly_the_names_of_the_format(draft: Eagle3Draft, tmp_path) -> None:
    save_draft(draft.float(), tmp_path)
    layer = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    others = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    expected = {f"midlayer.{name}.weight" for name in layer} | others
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == expected
        assert weights.get_tensor("fc.weight").shape == (12, 36)
        assert weights.get_tensor("midlayer.self_attn.q_proj.weight").shape == (24, 24)
        assert weights.get_tensor("d2t").dtype == torch.int64
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 16 and config["vocab_size"] == 24
    again = load_draft(tmp_path)
    assert torch.equal(again.target_ids, draft.target_ids)
