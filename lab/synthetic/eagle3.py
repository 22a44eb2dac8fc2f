"""The tensors of an EAGLE-3 head that predicts the chain with the draft's log-probabilities, in SafeAILab's names.

S [H, n] has orthonormal columns, one for each key-value channel.  They are orthogonal to the target's planted
directions.  fc computes the feature S Sᵀe of the token before.  Every query head attends to its own row.  Its value is
Sᵀe of the row's token minus Sᵀe of the feature, so attention replaces the old token in the residual by the new one.
The hidden state that is passed on is again S Sᵀe, with the same size as fc's output, at every depth.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from espalier.bench.shapes import Shape
from espalier.errors import EspalierError
from lab.synthetic.draft import DraftTensors
from lab.synthetic.target import CHUNK_ROWS, DISTURBANCE, EMBEDDING_SHARES, GATED_STD, TargetTensors

# Logit of a candidate with probability 1.  The other tokens have logits of mean 0.
CANDIDATE_LOGIT = 18.0
NUM_CAPTURED_LAYERS = 3


class Eagle3Tensors(DraftTensors):
    """Raises EspalierError for a shape whose hidden size has no room for S."""

    def __init__(self, shape: Shape, target: TargetTensors) -> None:
        super().__init__(shape.draft_config.layer, target)
        self.draft_vocab = shape.draft_vocab_size
        channels = self.config.kv_heads * self.config.head_size
        if channels + len(target.planted.basis.T) > self.config.hidden_size:
            raise EspalierError(f"{shape.name}: {channels} key-value channels leave no room for the planted directions")

    @cached_property
    def columns(self) -> Tensor:
        """S: [H, kv_heads · head_size]."""
        hidden, channels = self.config.hidden_size, self.config.kv_heads * self.config.head_size
        drawn = self.target.draw.orthonormal("draft/columns", hidden, channels)
        return torch.linalg.qr(self.target.planted.remove_planted(drawn.T).T)[0]

    @cached_property
    def feature_size(self) -> float:
        """Root mean square of S Sᵀe: the part of r_t that lies in these channels."""
        hidden, planted = self.config.hidden_size, self.target.planted
        share = 1 - sum(EMBEDDING_SHARES[part] for part in planted.length)
        return math.sqrt(share * self.columns.shape[1] / (hidden - planted.basis.shape[1]))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, inner, queries = c.hidden_size, c.intermediate_size, c.heads * c.head_size
        channels = self.columns.shape[1]
        sizes = {
            "fc": (hidden, NUM_CAPTURED_LAYERS * hidden),
            "midlayer.self_attn.q_proj": (queries, 2 * hidden),
            "midlayer.self_attn.k_proj": (channels, 2 * hidden),
            "midlayer.self_attn.v_proj": (channels, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, queries),
            "midlayer.mlp.gate_proj": (inner, hidden),
            "midlayer.mlp.up_proj": (inner, hidden),
            "midlayer.mlp.down_proj": (hidden, inner),
            "midlayer.input_layernorm": (hidden,),
            "midlayer.hidden_norm": (hidden,),
            "midlayer.post_attention_layernorm": (hidden,),
            "norm": (hidden,),
            "lm_head": (self.draft_vocab, hidden),
        }
        vocabulary = {"d2t": (self.draft_vocab,), "t2d": (c.vocab_size,)}
        return {**{f"{name}.weight": size for name, size in sizes.items()}, **vocabulary}

    def tensor(self, name: str) -> Tensor:
        """Make a tensor.  d2t is int64 and t2d is bool; other tensors have the checkpoint's dtype."""
        chain, part = self.target.chain, name.removesuffix(".weight").rpartition(".")[2]
        match part:
            case "d2t":
                return chain.hot - torch.arange(chain.size)
            case "t2d":
                return chain.is_hot
            case "lm_head":
                return self._head()
            case "fc":
                projection = self.columns @ self.columns.T / NUM_CAPTURED_LAYERS
                return projection.repeat(1, NUM_CAPTURED_LAYERS).to(self.dtype)
            case "q_proj" | "k_proj":
                return self.attending_to_itself(name).to(self.dtype)
            case "v_proj":
                return torch.cat((self.columns.T, -self.feature_size * self.columns.T), 1).to(self.dtype)
            case "o_proj":
                return self._output()
            case _ if len(self.shapes[name]) == 1:
                return torch.ones(self.shapes[name], dtype=self.dtype, device=self.device)
            case "down_proj":
                return self.random(name, DISTURBANCE / 2 * self.feature_size / GATED_STD, self.dtype)
            case _:
                return self.random(name, 1.0, self.dtype)

    def _output(self) -> Tensor:
        """[H, heads · head_size]: each query head of a group adds an equal share of its key-value head's channels."""
        c = self.config
        group = c.heads // c.kv_heads
        parts = self.columns.unflatten(1, (c.kv_heads, 1, c.head_size)) / group
        return parts.expand(-1, -1, group, -1).flatten(1).to(self.dtype)

    def _head(self) -> Tensor:
        """[draft vocabulary, H]: after the norm, a place's candidates get exactly CANDIDATE_LOGIT + log-probability."""
        chain = self.target.chain
        out = torch.empty(self.draft_vocab, self.config.hidden_size, dtype=self.dtype, device=self.device)
        for places, rows in self.rows_of_places(self._known(), CANDIDATE_LOGIT):
            out[chain.ring[places].to(self.device)] = (rows @ self.columns.T).to(self.dtype)
        return out

    def _known(self) -> Tensor:
        """[N, n]: the normed hidden state of the token at each place, in the coordinates of S."""
        chain = self.target.chain
        seen = [
            self.target.random_part_of(chain.token_at(places)) @ self.columns
            for places in torch.arange(chain.size).split(CHUNK_ROWS)
        ]
        rows = torch.cat(seen)
        return rows * (math.sqrt(self.config.hidden_size) / rows.norm(dim=1, keepdim=True))
