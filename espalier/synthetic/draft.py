"""The tensors of an EAGLE-3 head that knows the chain as its tables say, in SafeAILab's names.

S [H, n] are orthonormal columns, as many as the head has key-value channels, away from the target's planted directions.
fc makes the feature S Sᵀe of the token before; every query head looks at its own row; the values are Sᵀe of the row's
own token minus the normed feature's, so that attention takes the old token out of the residual and puts the new one
in.  What is handed on is then S Sᵀe again, of the same size as what fc makes, at every depth.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.synthetic.rope import LagCode, lag_code
from espalier.synthetic.shapes import Shape
from espalier.synthetic.target import DISTURBANCE, GATED, ROWS, SHARES, TargetTensors, solve_rows

# Logit of a candidate that the draft is sure of; what it does not know has logits of mean 0.
PEAK = 18.0
NUM_CAPTURED = 3
# Random part of query and key, against the 1 that others have.
BACKGROUND = 0.05


class DraftTensors:
    """The weights of a draft by the names of its checkpoint: `shapes` lists them, `tensor` makes one."""

    def __init__(self, shape: Shape, target: TargetTensors) -> None:
        self.config = shape.draft_config.layer
        self.draft_vocab = shape.draft_vocab
        self.target = target
        self.dtype, self.device = target.dtype, target.device
        channels = self.config.kv_heads * self.config.head_size
        if channels + len(target.planted.basis.T) > self.config.hidden_size:
            raise EspalierError(f"{shape.name}: {channels} key-value channels leave no room for what is planted")

    @cached_property
    def columns(self) -> Tensor:
        """S: [H, kv_heads · head_size]."""
        hidden, channels = self.config.hidden_size, self.config.kv_heads * self.config.head_size
        drawn = self.target.draw.orthonormal("draft/columns", hidden, channels)
        return torch.linalg.qr(self.target.planted.clean(drawn.T).T)[0]

    @cached_property
    def feature_size(self) -> float:
        """Root mean square of S Sᵀe: what r_t keeps of its length in these channels."""
        hidden, planted = self.config.hidden_size, self.target.planted
        share = 1 - sum(SHARES[part] for part in planted.first)
        return math.sqrt(share * self.columns.shape[1] / (hidden - planted.basis.shape[1]))

    @cached_property
    def code(self) -> LagCode:
        return lag_code(self.config.rope, self.config.max_position)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, inner, queries, channels = (
            c.hidden_size,
            c.intermediate_size,
            c.heads * c.head_size,
            self.columns.shape[1],
        )
        sizes = {
            "fc": (hidden, NUM_CAPTURED * hidden),
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
        """A fresh tensor; d2t int64 and t2d bool, the others in the checkpoint's dtype."""
        chain, part = self.target.chain, name.removesuffix(".weight").rpartition(".")[2]
        match part:
            case "d2t":
                return chain.hot - torch.arange(chain.size)
            case "t2d":
                return chain.is_hot
            case "lm_head":
                return self._head()
            case "fc":
                own = self.columns @ self.columns.T / NUM_CAPTURED
                return own.repeat(1, NUM_CAPTURED).to(self.dtype)
            case "q_proj" | "k_proj":
                return self._looks_at_itself(name, self.config.heads if part == "q_proj" else self.config.kv_heads)
            case "v_proj":
                return torch.cat((self.columns.T, -self.feature_size * self.columns.T), 1).to(self.dtype)
            case "o_proj":
                return self._output()
            case _:
                return self._ordinary(name, part)

    def _ordinary(self, name: str, part: str) -> Tensor:
        size = self.shapes[name]
        if len(size) == 1:
            return torch.ones(size, dtype=self.dtype, device=self.device)
        std = size[1] ** -0.5
        if part == "down_proj":
            std *= DISTURBANCE / 2 * self.feature_size / GATED
        return self.target.draw.normal(f"draft/{name}", size[0], size[1], std, self.dtype)

    def _looks_at_itself(self, name: str, heads: int) -> Tensor:
        """[heads · head_size, 2H]: the mark in the embedding makes query and key meet at distance 0."""
        rows, hidden = heads * self.config.head_size, self.config.hidden_size
        std = BACKGROUND * (2 * hidden) ** -0.5
        weight = self.target.draw.normal(f"draft/{name}", rows, 2 * hidden, std, torch.float32)
        planted = self.target.planted
        key = (self.code.amplitude * self.code.key()).to(self.device).repeat(heads)
        weight[:, :hidden] += torch.outer(key, planted.direction("mark") / planted.length["mark"])
        return weight.to(self.dtype)

    def _output(self) -> Tensor:
        """[H, heads · head_size]: the query heads of a group each give a part of their key-value head's channels."""
        c = self.config
        group = c.heads // c.kv_heads
        parts = self.columns.unflatten(1, (c.kv_heads, 1, c.head_size)) / group
        return parts.expand(-1, -1, group, -1).flatten(1).to(self.dtype)

    def _head(self) -> Tensor:
        """[draft vocabulary, H]: after the norm, a place's own candidates get PEAK + log-probability, exactly."""
        chain, hidden = self.target.chain, self.config.hidden_size
        known = self._known()
        logits = torch.where(chain.draft_logp.isfinite(), PEAK + chain.draft_logp, 0.0)
        out = torch.empty(self.draft_vocab, hidden, dtype=self.dtype, device=self.device)
        for first in range(0, chain.size, ROWS):
            places = torch.arange(chain.size)[first : first + ROWS]
            before = (places[:, None] - chain.shifts) % chain.size
            wanted = logits[before, torch.arange(len(chain.shifts))].to(self.device)
            row = solve_rows(known[before.to(self.device)], wanted, torch.ones_like(wanted, dtype=torch.bool))
            out[chain.ring[places].to(self.device)] = (row @ self.columns.T).to(self.dtype)
        return out

    def _known(self) -> Tensor:
        """[N, n]: what the head sees of each place's token, in the coordinates of S."""
        chain = self.target.chain
        seen = [
            self.target.own_part(chain.token_at(places)) @ self.columns
            for places in torch.arange(chain.size).split(ROWS)
        ]
        rows = torch.cat(seen)
        return rows * (math.sqrt(self.config.hidden_size) / rows.norm(dim=1, keepdim=True))
