"""Creates, saves, loads and measures block drafts for a frozen target, and makes their loss function.

A draft is saved in the `dspark` format of vLLM's speculators.  `edge_rank` is the rank of the draft's Markov head; 0 if
the draft has no Markov head.  The draft has no confidence head, and uses the target's embedding and lm_head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from espalier.kernels.ops.drafts import Candidates, select_paths
from espalier.kernels.tree.edges import DepthRows, choose_next_rows
from espalier.speculate.drafters.one_pass import edge_candidates, plain_candidates
from espalier.train.block_head import BlockHead, BlockShape, block_loss
from espalier.train.checkpoint import layer_fields, read_shape, write_checkpoint
from espalier.train.configs import read_config
from espalier.train.draft_run import LossFunction
from espalier.train.settings import BlockConfig
from espalier.train.target import Eagle3Target, FrozenTarget

# (topk, num_draft_tokens) of the trees to measure.  num_draft_tokens 0 stands for block_size + 1.
MEASURED_TREES = {"chain": (1, 0), "tree of 16": (8, 16), "tree of 64": (8, 64)}


def new_head(target: Eagle3Target, config: BlockConfig) -> BlockHead:
    """Returns an untrained block draft that fits the target."""
    torch.manual_seed(config.seed)
    sizes: dict[str, Any] = layer_fields(target.config, config.intermediate_size)
    mask = config.mask_token if config.mask_token >= 0 else sizes["vocab_size"] - 1
    shape = BlockShape(
        num_hidden_layers=config.layers,
        block_size=config.block_size,
        num_features=len(target.captured_layers),
        edge_rank=config.edge_rank,
        edge_kind=config.edge_kind,
        mask_token_id=mask,
        **sizes,
    )
    head = BlockHead(shape).to(target.device)
    head.norm.weight.data.copy_(target.final_norm)
    return head


def make_loss(
    head: BlockHead, target: FrozenTarget, config: BlockConfig, loss: Callable[..., tuple[Tensor, Tensor]] = block_loss
) -> LossFunction:
    """Returns a function for the loss of a batch, which trains blocks at random positions.  loss: block_loss, or its
    compiled form."""
    generator = torch.Generator().manual_seed(config.seed)

    def loss_of(tokens: Tensor, features: Tensor, logits: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of blocks at random positions.  tokens: [B, R].  Other arguments: see LossFunction."""
        roots = torch.randperm(tokens.shape[1] - config.block_size + 1, generator=generator)[: config.anchors] + 1
        embeds = target.embed(tokens), mask_embedding(target, head)
        anchors = roots.sort().values.to(tokens.device)
        return loss(head, target.lm_head, embeds, tokens, features, logits, loss_mask, anchors, config.decay)

    return loss_of


def token_rows(target: FrozenTarget, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the inputs of a block draft's loss for tokens [B, R + 1]: (token ids at positions 1 .. R, the target's
    features at 0 .. R - 1, the target's logits at 1 .. R).  The Markov head needs token ids instead of embeddings."""
    features, logits = target(tokens)
    return tokens[:, 1:], features[:, :-1], logits[:, 1:]


def mask_embedding(target: FrozenTarget, head: BlockHead) -> Tensor:
    """Returns the embedding [H] of the token that a block has in place of unknown tokens."""
    return target.embed(torch.tensor([head.shape.mask_token_id], device=target.device))[0]


def save_block(head: BlockHead, target: Eagle3Target, target_dir: Path, out: Path) -> None:
    """Writes a draft to the directory `out`, in the format of speculators."""
    shape = head.shape
    layer = {name: value for name, value in vars(shape).items() if name not in BLOCK_FIELDS}
    verifier = {"architectures": target.config["architectures"], "name_or_path": str(target_dir)}
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dspark", "verifier": verifier},
        "transformer_layer_config": {**layer, "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu"},
        "draft_vocab_size": shape.vocab_size,
        "aux_hidden_state_layer_ids": list(target.captured_layers),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": shape.edge_rank,
        "markov_head_type": shape.edge_kind,
        "enable_confidence_head": False,
        "dtype": "bfloat16",
    }
    write_checkpoint(config, head, out)


# The fields of BlockShape that are outside transformer_layer_config in a config.json.
BLOCK_FIELDS = ("block_size", "num_features", "edge_rank", "edge_kind", "mask_token_id")


def load_block(directory: Path) -> BlockHead:
    """Loads a draft that `save_block` wrote."""
    config = read_config(directory)
    shape = read_shape(
        *(config["transformer_layer_config"], BlockShape),
        block_size=config["block_size"],
        num_features=len(config["aux_hidden_state_layer_ids"]),
        edge_rank=config["markov_rank"],
        edge_kind=config["markov_head_type"],
        mask_token_id=config["mask_token_id"],
    )
    head = BlockHead(shape)
    head.load_state_dict(load_file(directory / "model.safetensors"))
    return head


def trees_to_measure(head: BlockHead) -> dict[str, tuple[int, int, int]]:
    """Returns the trees to measure: (steps, topk, num_draft_tokens) by name."""
    steps, vocab_size = head.shape.block_size, head.shape.vocab_size
    return {name: (steps, min(topk, vocab_size), nodes or steps + 1) for name, (topk, nodes) in MEASURED_TREES.items()}


@torch.no_grad()
def accept_lengths(
    head: BlockHead, target: FrozenTarget, tokens: Tensor, first_root: int, topk: int, num_draft_tokens: int
) -> Tensor:
    """Returns the accept length of a round with its root at position n, for max(first_root, 1) <= n < T - block_size.
    tokens: [T], greedy text of the target.  num_draft_tokens: 0 for block_size + 1, the nodes of a chain."""
    steps, dtype = head.shape.block_size, head.fc.weight.dtype
    roots = torch.arange(max(first_root, 1), len(tokens) - steps, device=tokens.device)
    features = target(tokens[None])[0].to(dtype)
    embeds = target.embed(tokens[roots])[None].to(dtype)
    outputs = head(embeds, mask_embedding(target, head).to(dtype), features, roots)[0]
    logits = F.linear(outputs, target.lm_head.to(dtype)).float()
    edges = None if head.markov_head is None else head.markov_head.edges(logits, outputs)

    def topk_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (ids, log-probabilities) of the `topk` likeliest tokens, [..., topk] each."""
        scores, ids = logits.log_softmax(-1).topk(topk, dim=-1)
        return ids, scores

    def next_depth(depth: int, rows: DepthRows, out: Candidates) -> DepthRows:
        """Writes the candidates of `depth` to `out`, and returns the rows of the next depth."""
        assert edges is not None
        factors, states = edges.factors(depth, rows)
        ids_and_scores = topk_tokens(edges.logits(depth, factors))
        return choose_next_rows(*ids_and_scores, rows, out, edges.is_recurrent)._replace(states=states)

    if edges is None:
        candidates = plain_candidates(*topk_tokens(logits))
    else:
        candidates = edge_candidates(DepthRows.for_roots(tokens[roots]), steps, topk, next_depth)
    tree = select_paths(tokens[roots], candidates, num_draft_tokens or steps + 1)
    matches_text = tree.tokens == tokens[roots[:, None] + tree.depths]
    on_path = matches_text.clone()
    on_path[:, 0] = True
    for node in range(1, tree.tokens.shape[1]):
        on_path[:, node] &= on_path.gather(1, tree.parents[:, node : node + 1])[:, 0]
    return 1 + (tree.depths * on_path).amax(1)
