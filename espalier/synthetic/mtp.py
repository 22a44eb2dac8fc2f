"""The tensors of an MTP head that predicts the chain with the draft's log-probabilities, in the form of speculators.

An MTP head shares the target's embedding and lm_head.  The lm_head reads the chain from e_t, the embedding of the last
token, so a layer hands that on: input_proj passes the token on unchanged, with a little of the hidden state mixed in.
The embedding says in its part `nudge` which kind of successor the head favours or buries.  Every query head attends to
its own row, reads that part, and writes the part `kind`, which only an MTP head writes and which the lm_head adds to
the logits of the kind's tokens.  All layers do the same, each with its own random background, so the accept length
follows from the tables of chain.py for any number of layers and steps.
"""

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig, find_family, parse
from espalier.models.loading import FAMILIES
from espalier.synthetic.chain import BURY, FAVOUR, NUM_NUDGES, NUM_SUCCESSORS
from espalier.synthetic.layer_tensors import layer_shapes
from espalier.synthetic.rope import LagCode, lag_code
from espalier.synthetic.shapes import LLAMA, Shape
from espalier.synthetic.target import DISTURBANCE, GATED, NAT, TargetTensors

FORMS = ("chain", "target")
# Standard deviation of the random part of queries and keys; in other weights it is 1.
BACKGROUND = 0.05


class MtpTensors:
    """The weights of a head of `num_layers` layers, by name in its checkpoint: `shapes` lists them, `tensor` makes one.

    Raises EspalierError for a form that does not exist or a shape whose heads are too small.
    """

    def __init__(self, shape: Shape, target: TargetTensors, num_layers: int, form: str) -> None:
        if form not in FORMS or num_layers < 1:
            raise EspalierError(
                f"an MTP head of {num_layers} layers in form {form!r} is not supported; use 1 or more layers and the "
                f"form {' or '.join(FORMS)}"
            )
        raw = {**LLAMA, **shape.draft_layer}
        self.config: ModelConfig = parse(raw, find_family(raw, FAMILIES, Path(shape.name)), Path(shape.name))
        if self.config.head_size < NUM_NUDGES:
            raise EspalierError(f"{shape.name}: an MTP head needs heads of {NUM_NUDGES} values or more")
        self.num_layers = num_layers
        self.target = target
        self.dtype, self.device = target.dtype, target.device

    @cached_property
    def code(self) -> LagCode:
        return lag_code(self.config.rope, self.config.max_position)

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
        rows, columns = size
        match part:
            case "input_proj":
                weight = self._joined(name, columns // 2)
            case "q_proj" | "k_proj":
                weight = self._attends_to_itself(name, rows, columns)
            case "v_proj":
                weight = self._reads_nudges(name, rows, columns)
            case "o_proj":
                weight = self._writes_kinds(name, rows, columns)
            case "down_proj":
                weight = self._quiet(name, rows, columns, DISTURBANCE / 2 / GATED)
            case _:
                return self._random(name, rows, columns, 1.0).to(self.dtype)
        return weight.to(self.dtype)

    def _random(self, name: str, rows: int, columns: int, std: float) -> Tensor:
        """[rows, columns] float32.  std: of the output, for inputs of standard deviation 1."""
        return self.target.draw.normal(f"draft/{name}", rows, columns, std * columns**-0.5, torch.float32)

    def _quiet(self, name: str, rows: int, columns: int, std: float) -> Tensor:
        """A random weight [H, columns] that adds nothing in the planted directions."""
        drawn = self._random(name, rows, columns, std)
        basis = self.target.planted.basis
        return drawn.sub_(basis @ (basis.T @ drawn))

    def _joined(self, name: str, hidden: int) -> Tensor:
        """[H, 2H]: the embedding's half is the identity."""
        identity = torch.eye(hidden, device=self.device)
        return torch.cat((identity, self._quiet(name, hidden, hidden, DISTURBANCE / 2)), 1)

    def _attends_to_itself(self, name: str, rows: int, hidden: int) -> Tensor:
        """[heads · head_size, H]: made from the embedding's mark, so that query and key agree only at distance 0."""
        planted = self.target.planted
        weight = self._random(name, rows, hidden, BACKGROUND)
        key = (self.code.amplitude * self.code.key()).to(self.device).repeat(rows // self.config.head_size)
        return weight.add_(torch.outer(key, planted.direction("mark") / planted.length["mark"]))

    def _reads_nudges(self, name: str, rows: int, hidden: int) -> Tensor:
        """[kv_heads · head_size, H]: the first NUM_NUDGES channels of each head are 1 for what the token nudges."""
        weight = self._random(name, rows, hidden, 1.0)
        planted = self.target.planted
        if self.target.chain.nudge is not None:
            reads = planted.of_part("nudge", NUM_NUDGES).T / planted.length["nudge"]
            weight.view(-1, self.config.head_size, hidden)[:, :NUM_NUDGES] = reads
        return weight

    def _writes_kinds(self, name: str, hidden: int, columns: int) -> Tensor:
        """[H, heads · head_size]: each query head writes an equal share."""
        weight = self._quiet(name, hidden, columns, DISTURBANCE / 2)
        if self.target.chain.nudge is not None:
            nats = torch.tensor((FAVOUR, BURY), device=self.device).repeat_interleave(NUM_SUCCESSORS)
            kinds = self.target.planted.of_part("kind", NUM_SUCCESSORS).repeat(1, 2)
            written = kinds * nats * (NAT * math.sqrt(hidden) / self.config.heads)
            weight.view(hidden, -1, self.config.head_size)[:, :, :NUM_NUDGES] = written[:, None]
        return weight
