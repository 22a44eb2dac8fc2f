"""The tensors of a block draft that predicts the chain, in DeepSpec's form of DSpark.

The mask rows of a block are alike, so a row cannot know which tokens were drafted before it.  The edges, a product of
low rank, give each token the logit that an EAGLE-3 head gives it after the token before it.  The draft's own lm_head
adds what depends on depth: a preference for some tokens, `favour` in the hidden state (fading.py).

A row finds its depth by RoPE.  Query head d attends to the row d positions back and reads whether it is a mask row.  In
row i of the block this is so for all d < i.  Each such head adds a part of `favour`, so deeper rows have more of it.
The heads are those of the first layer, then those of the second.

One more head attends to a context row and reads whether its features come from the right target layers: each target
layer writes a stamp (target.py).  If not, all rows propose tokens that the target never emits.  All other weights are
random and add little.
"""

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from espalier.bench.shapes import Shape
from espalier.errors import EspalierError
from espalier.models.block import read_block
from lab.synthetic.draft import DraftTensors
from lab.synthetic.draft_json import block_json
from lab.synthetic.layer_tensors import layer_shapes
from lab.synthetic.target import DISTURBANCE, GATED_STD, STAMP_LENGTH, TargetTensors

# Logit of a candidate with probability 1.  At rank 256 the logits of other tokens have a standard deviation of 3.5.
CANDIDATE_LOGIT = 24.0
# A hidden state that holds this share of its length in `favour` has one nat more for a token that is preferred with 1.
FAVOUR_PER_NAT = 1 / 40
# If one target layer is wrong: the share of a row's length that signals this, and about the nats that cold tokens gain.
MISREAD_LENGTH, MISREAD_NATS = 0.5, 60.0
# Nats that the random part of the lm_head adds.
HEAD_NOISE = 0.05


class BlockTensors(DraftTensors):
    """Raises EspalierError for a block size for which the draft has too few heads."""

    def __init__(self, shape: Shape, target: TargetTensors, block_size: int) -> None:
        self.block = read_block(Path(f"{shape.name} draft"), block_json(shape, block_size), shape.target)
        super().__init__(self.block.layer, target)
        assert target.chain.fading is not None
        self.nats_by_depth = target.chain.fading.nats_by_depth
        self.favoured = target.chain.fading.favoured
        if block_size > self.config.heads * self.config.num_layers:
            raise EspalierError(
                f"a block draft of {shape.name} has {self.config.heads * self.config.num_layers} heads; lower "
                f"block_size={block_size} to as many"
            )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, rank = c.hidden_size, self.block.markov_rank
        found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(self.block.spec.captured_layers) * hidden)}
        found |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        for i in range(c.num_layers):
            found |= {f"layers.{i}.{name}": size for name, size in layer_shapes(c, i).items()}
        edges = {f"markov_head.markov_w{i}.weight": (c.vocab_size, rank) for i in (1, 2)}
        return {**found, "lm_head.weight": (c.vocab_size, hidden), **edges}

    def tensor(self, name: str) -> Tensor:
        """Make a tensor, in the checkpoint's dtype."""
        size, part = self.shapes[name], name.removesuffix(".weight").rpartition(".")[2]
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if len(size) == 1:
            is_sharp = part in ("q_norm", "k_norm") and self._distances(layer)
            return torch.full(
                size, self.lag_code.norm_weight if is_sharp else 1.0, dtype=self.dtype, device=self.device
            )
        match part:
            case "fc":
                weight = self._mean_of_features(name)
            case "q_proj" | "k_proj" | "v_proj" | "o_proj" if self._distances(layer):
                weight = self._plant_depth(name, part, layer)
            case "o_proj":
                weight = self.random_without_planted(name, DISTURBANCE / 4)
            case "down_proj":
                weight = self.random_without_planted(name, DISTURBANCE / 4 / GATED_STD)
            case "lm_head":
                return self._head(name)
            case "markov_w1":
                return self._before
            case "markov_w2":
                return self._edges(name)
            case _:
                weight = self.random(name, 1.0)
        return weight.to(self.dtype)

    def _mean_of_features(self, name: str) -> Tensor:
        """[H, F]: the captured features hold the token's embedding, and so does their mean.

        The input of layer c should have the stamp of layer c - 1, and not that of layer c."""
        hidden, count, planted = self.config.hidden_size, len(self.block.spec.captured_layers), self.target.planted
        mean = torch.eye(hidden, device=self.device).repeat(1, count) / count
        weight = mean + self.random_without_planted(name, DISTURBANCE / 2)
        if self.target.writes_stamps:
            mark = planted.direction("mark") / planted.length["mark"]
            written = planted.direction("misread") * (MISREAD_LENGTH * math.sqrt(hidden))
            for i, layer in enumerate(self.block.spec.captured_layers):
                stamps = planted.direction("stamp", layer) - planted.direction("stamp", layer - 1)
                misread = mark + stamps / (STAMP_LENGTH * math.sqrt(hidden))
                weight[:, i * hidden : (i + 1) * hidden] += torch.outer(written, misread)
        return weight

    def _distances(self, layer: int) -> range:
        """Returns the distances at which a layer's query heads look, from head 0 on.

        Later layers have fewer distances than heads, or none.  All distances but the last are between the block's rows.
        """
        heads, count = self.config.heads, len(self.nats_by_depth)
        return range(min(layer * heads, count), min((layer + 1) * heads, count)) if layer >= 0 else range(0)

    def _plant_depth(self, name: str, part: str, layer: int) -> Tensor:
        planted, size, hidden = self.target.planted, self.config.head_size, self.config.hidden_size
        mark = planted.direction("mark") / planted.length["mark"]
        weight = self.random_without_planted(name, DISTURBANCE / 4) if part == "o_proj" else self.random(name, 1.0)
        if part == "k_proj":
            key = self.lag_code.key().to(self.device).repeat(self.config.kv_heads)
            weight = torch.outer(key, mark)
        elif part == "v_proj":
            mask = self.target.random_part_of(torch.tensor(self.block.spec.mask_token_id))
            weight[::size] = mask / mask.square().sum()
            weight[1::size] = planted.direction("misread") / (MISREAD_LENGTH * math.sqrt(hidden))
        for head, distance in enumerate(self._distances(layer)):
            is_last = distance == len(self.nats_by_depth) - 1
            if part == "q_proj":
                # The last row of the block is that far from the root.
                lag = distance + is_last
                weight[head * size : (head + 1) * size] = torch.outer(self.lag_code.query(lag).to(self.device), mark)
            elif part == "o_proj" and is_last:
                weight[:, head * size + 1] = planted.direction("misread") * (MISREAD_LENGTH * math.sqrt(hidden))
            elif part == "o_proj":
                nats = float(self.nats_by_depth[distance + 1] - self.nats_by_depth[distance])
                weight[:, head * size] = planted.direction("favour") * (nats * FAVOUR_PER_NAT * math.sqrt(hidden))
        return weight

    def _head(self, name: str) -> Tensor:
        """[V, H].  The rows of preferred tokens read `favour`, those of cold tokens `misread`."""
        vocab, hidden = self.shapes[name]
        out = torch.empty(vocab, hidden, dtype=self.dtype, device=self.device)
        favour = self.target.planted.direction("favour") / (FAVOUR_PER_NAT * math.sqrt(hidden))
        favoured = torch.zeros(vocab, device=self.device)
        misread = self.target.planted.direction("misread") * (MISREAD_NATS / MISREAD_LENGTH / math.sqrt(hidden))
        chain = self.target.chain
        is_cold = (~chain.is_hot).to(self.device)
        favoured[chain.token_at(torch.arange(chain.size)).to(self.device)] = self.favoured.to(self.device)
        for chunk, drawn in self.target.draw.normal_chunks(f"draft/{name}", vocab, hidden):
            random = self.target.planted.remove_planted(drawn) * (HEAD_NOISE / math.sqrt(hidden))
            planted = favoured[chunk, None] * favour + is_cold[chunk, None] * misread
            out[chunk] = (random + planted).to(self.dtype)
        return out

    @cached_property
    def _before(self) -> Tensor:
        """[V, rank]: rows of length sqrt(rank), which identify the previous token."""
        vocab, rank = self.shapes["markov_head.markov_w1.weight"]
        drawn = self.target.draw.normal("draft/markov_w1", vocab, rank, 1.0, torch.float32)
        return (drawn * (math.sqrt(rank) / drawn.norm(dim=1, keepdim=True))).to(self.dtype)

    def _edges(self, name: str) -> Tensor:
        """[V, rank]: a place's candidates get exactly CANDIDATE_LOGIT + log-probability, and cold tokens get little."""
        chain, (vocab, rank) = self.target.chain, self.shapes[name]
        out = self.target.draw.normal(f"draft/{name}", vocab, rank, 1 / rank, self.dtype)
        before = self._before.float()[chain.token_at(torch.arange(chain.size)).to(self.device)]
        for places, rows in self.rows_of_places(before, CANDIDATE_LOGIT):
            out[chain.token_at(places).to(self.device)] = rows.to(self.dtype)
        return out
