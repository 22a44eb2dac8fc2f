"""The tensors of an MTP head that predicts the chain with the draft's log-probabilities, in the form of speculators.

An MTP head shares the target's embedding and lm_head.  The lm_head reads the chain from e_t, the embedding of the last
token, so each layer must pass e_t on: input_proj copies it and adds a little of the hidden state.

The part `nudge` of e_t says which kind of successor the head favours or buries.  Every query head attends to its own
row, reads `nudge` and writes the part `kind`.  Only an MTP head writes that part, and the lm_head adds it to the logits
of the kind's tokens.  All layers do the same, each with its own random background.  So the accept length follows from
the tables of chain.py for any number of layers and steps.
"""

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from espalier.bench.shapes import LLAMA_FIELDS, Shape
from espalier.errors import EspalierError
from espalier.models.config import parse_config
from espalier.models.loading import find_family
from espalier.models.mtp import HIDDEN_SOURCES
from lab.synthetic.chain import BURY_NATS, FAVOUR_NATS, NUM_NUDGES, NUM_SUCCESSORS
from lab.synthetic.draft import DraftTensors
from lab.synthetic.layer_tensors import layer_shapes
from lab.synthetic.target import DISTURBANCE, GATED_STD, KIND_LENGTH_PER_NAT, TargetTensors


class MtpTensors(DraftTensors):
    """Raises EspalierError for a form that does not exist or a shape whose heads are too small."""

    def __init__(self, shape: Shape, target: TargetTensors, num_layers: int, form: str) -> None:
        if form not in HIDDEN_SOURCES or num_layers < 1:
            raise EspalierError(
                f"an MTP head of {num_layers} layers in form {form!r} is not supported; use 1 or more layers and the "
                f"form {' or '.join(HIDDEN_SOURCES)}"
            )
        raw = {**LLAMA_FIELDS, **shape.draft_layer_fields}
        super().__init__(parse_config(raw, find_family(raw, Path(shape.name)), Path(shape.name)), target)
        if self.config.head_size < NUM_NUDGES:
            raise EspalierError(f"{shape.name}: an MTP head needs heads of {NUM_NUDGES} values or more")
        self.num_layers = num_layers

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = self.config.hidden_size
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        layer = {**{f"{name}.weight": (hidden,) for name in norms}, "input_proj.weight": (hidden, 2 * hidden)}
        layer |= layer_shapes(self.config, 0)
        return {f"mtp_layers.{i}.{name}": size for i in range(self.num_layers) for name, size in layer.items()}

    def tensor(self, name: str) -> Tensor:
        """Make a tensor, in the checkpoint's dtype."""
        size, part = self.shapes[name], name.removesuffix(".weight").rpartition(".")[2]
        if len(size) == 1:
            return torch.ones(size, dtype=self.dtype, device=self.device)
        match part:
            case "input_proj":
                weight = self._joined(name)
            case "q_proj" | "k_proj":
                weight = self.attending_to_itself(name)
            case "v_proj":
                weight = self._reads_nudges(name)
            case "o_proj":
                weight = self._writes_kinds(name)
            case "down_proj":
                weight = self.random_without_planted(name, DISTURBANCE / 2 / GATED_STD)
            case _:
                weight = self.random(name, 1.0)
        return weight.to(self.dtype)

    def _joined(self, name: str) -> Tensor:
        """[H, 2H]: the embedding's half is the identity."""
        weight, hidden = self.random_without_planted(name, DISTURBANCE / math.sqrt(2)), self.config.hidden_size
        weight[:, :hidden] = torch.eye(hidden, device=self.device)
        return weight

    def _reads_nudges(self, name: str) -> Tensor:
        """[kv_heads · head_size, H]: the first NUM_NUDGES channels of each head are 1 for what the token nudges."""
        weight, planted = self.random(name, 1.0), self.target.planted
        if self.target.chain.nudge is not None:
            reads = planted.directions_of_part("nudge", NUM_NUDGES).T / planted.length["nudge"]
            weight.unflatten(0, (-1, self.config.head_size))[:, :NUM_NUDGES] = reads
        return weight

    def _writes_kinds(self, name: str) -> Tensor:
        """[H, heads · head_size]: each query head writes an equal share."""
        weight, hidden = self.random_without_planted(name, DISTURBANCE / 2), self.config.hidden_size
        if self.target.chain.nudge is not None:
            nats = torch.tensor((FAVOUR_NATS, BURY_NATS), device=self.device).repeat_interleave(NUM_SUCCESSORS)
            kinds = self.target.planted.directions_of_part("kind", NUM_SUCCESSORS).repeat(1, 2)
            written = kinds * nats * (KIND_LENGTH_PER_NAT * math.sqrt(hidden) / self.config.heads)
            weight.view(hidden, -1, self.config.head_size)[:, :, :NUM_NUDGES] = written[:, None]
        return weight
