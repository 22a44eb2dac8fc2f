"""The target's tensors, each drawn from the seed by its name: random weights with a chain built in.

Every embedding has the same length and is the sum e_t = r_t + planted parts.  r_t is random and identifies the token.
The planted parts lie in a few directions that nothing else uses: `mark` is common to all tokens, and keys are made of
it.  A mixture of experts may have a part for topics, which its routers read (routing.py).  For an MTP head one part
says what it nudges, and the lm_head reads another (mtp.py).  For a block draft each layer adds its `stamp`, and
`favour` and `misread` are the draft's own (block.py).  Copy mode adds a direction for each kind that is read (`read`),
for each kind that is written (`write`) and for each lag (`lag`).  Attention and MLP change the residual little, so it
keeps e_t.  A row of the lm_head combines the r_t of the token's predecessors, with exactly the chain's logits there.

In copy mode layer l serves the tokens of lag l.  Query head A attends to the position `lag` back, and query head B of
the same key-value head to its own position.  What A reads minus what B reads is written to `write`.  For other tokens
both heads attend to their own position, and nothing is written.  So the K/V rows of every layer decide the text.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from espalier.bench.shapes import Shape
from espalier.errors import EspalierError
from espalier.models.config import ModelConfig
from espalier.models.layer_loading import layer_specs_of
from lab.synthetic.chain import NUM_NUDGES, NUM_SUCCESSORS, PROBABILITIES, Chain
from lab.synthetic.layer_tensors import embedding_name, layer_shapes
from lab.synthetic.rope import LagCode, make_lag_code
from lab.synthetic.routing import TOPIC_SIZE, router_weight, topic_directions
from lab.synthetic.state_tensors import CONSTANT_VECTORS, NORMS_WITHOUT_OFFSET

# Logit of the most likely successor.  Tokens that do not follow have logits of mean 0 and a standard deviation of about
# SUCCESSOR_LOGIT * sqrt(n / hidden), where n is the number of a token's predecessors.
SUCCESSOR_LOGIT = 20.0
# In copy mode, added to the logits of all tokens of the copied kind.
COPIED_KIND_LOGIT = 10.0
# The size of what all layers together add to the residual, relative to the residual.
DISTURBANCE = 0.15
# Shares of an embedding's squared length.
EMBEDDING_SHARES = {"mark": 0.08, "read": 0.08, "write": 0.12, "lag": 0.08, "topic": 0.08, "nudge": 0.08}
# A hidden state that holds a direction of the planted part "kind" with this share of its length has one nat more in
# the logits of that kind's tokens.  Only MTP heads write that part.
KIND_LENGTH_PER_NAT = 1 / 200
# The size of a layer's stamp in the residual, as a share of its length.
STAMP_LENGTH = 0.03
# Standard deviation of silu(a)·b for a, b of standard deviation 1.
GATED_STD = 0.6
# Rows that are drawn or solved at once.
CHUNK_ROWS = 2048


class RandomTensors:
    """Random tensors by name.  The same name, seed and device give the same numbers, in any order of calls."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device

    def generator(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))

    def normal(self, name: str, rows: int, columns: int, std: float, dtype: torch.dtype) -> Tensor:
        out = torch.empty(rows, columns, dtype=dtype, device=self.device)
        for chunk, drawn in self.normal_chunks(name, rows, columns):
            out[chunk] = drawn.mul_(std).to(dtype)
        return out

    def normal_chunks(self, name: str, rows: int, columns: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, standard normal values of these rows, float32), CHUNK_ROWS rows at a time."""
        generator = self.generator(name, self.device)
        for first in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - first)
            yield slice(first, first + count), torch.randn(count, columns, generator=generator, device=self.device)

    def orthonormal(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32 with orthonormal columns, drawn on the CPU."""
        drawn = torch.randn(rows, columns, generator=self.generator(name, torch.device("cpu")))
        return torch.linalg.qr(drawn.double())[0].float().to(self.device)


@dataclass(frozen=True)
class PlantedDirections:
    """The planted directions.

    basis: [H, n], orthonormal columns; first_columns: the first column of each part; length: the length of each part
    that embeddings contain."""

    basis: Tensor
    first_columns: dict[str, int]
    length: dict[str, float]

    def direction(self, part: str, index: int = 0) -> Tensor:
        return self.basis[:, self.first_columns[part] + index]

    def directions_of_part(self, part: str, size: int) -> Tensor:
        """Returns [H, size]: the directions of a part."""
        return self.basis[:, self.first_columns[part] : self.first_columns[part] + size]

    def remove_planted(self, rows: Tensor) -> Tensor:
        """Returns rows [..., H] without their components in the planted directions."""
        return rows - (rows @ self.basis) @ self.basis.T


class TargetTensors:
    """The weights of a target, by name in its checkpoint: `shapes` lists them, `tensor` makes one.

    correlation: of the routing, see routing.py.  is_quantised: whether the checkpoint is quantised.  Experts that the
    family joins are then stored apart, as in published quantised checkpoints.
    """

    def __init__(
        self,
        shape: Shape,
        chain: Chain,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        correlation: float = 0.0,
        is_quantised: bool = False,
    ) -> None:
        self.config, experts = shape.target, shape.target.experts
        if is_quantised and experts is not None and experts.storage == "joined":
            self.config = replace(self.config, experts=replace(experts, storage="apart"))
        self.chain = chain
        self.dtype = dtype
        self.device = device
        self.draw = RandomTensors(seed, device)
        self.is_copy_mode = chain.mode == "copy"
        self.correlation = correlation
        self.planted = self._planted()
        if self.is_copy_mode:
            require_copy_mode_fits(self.config, chain, shape.name)

    def _planted(self) -> PlantedDirections:
        sizes = {"mark": 1}
        if self.is_copy_mode:
            sizes |= {"read": NUM_SUCCESSORS, "write": NUM_SUCCESSORS, "lag": len(self.chain.lags)}
        if self.chain.nudge is not None:
            sizes |= {"nudge": NUM_NUDGES, "kind": NUM_SUCCESSORS}
        if self.chain.fading is not None:
            sizes |= {"favour": 1, "misread": 1}
            if self.writes_stamps:
                sizes["stamp"] = self.config.num_layers
        if self.correlation:
            sizes["topic"] = TOPIC_SIZE
        starts = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        hidden = self.config.hidden_size
        if 2 * starts[-1] > hidden:
            raise EspalierError(f"a hidden size of {hidden} has no room for {starts[-1]} planted directions")
        lengths = {part: math.sqrt(EMBEDDING_SHARES[part] * hidden) for part in sizes if part in EMBEDDING_SHARES}
        basis = self.draw.orthonormal("planted", hidden, starts[-1])
        return PlantedDirections(basis, dict(zip(sizes, starts, strict=False)), lengths)

    @cached_property
    def lag_code(self) -> LagCode:
        return make_lag_code(self.config.rope, self.config.max_position)

    @cached_property
    def topics(self) -> Tensor:
        """[topics, TOPIC_SIZE]: the direction of each topic in its planted part, of length 1."""
        return topic_directions(self.draw, int(self.chain.topic.max()) + 1)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        found: dict[str, tuple[int, ...]] = {embedding_name(c): (c.vocab_size, c.hidden_size)}
        for i in range(c.num_layers):
            found |= {f"model.layers.{i}.{name}": size for name, size in layer_shapes(c, i).items()}
        norm = {f"{c.family.final_norm}.weight": (c.hidden_size,)}
        return {**found, **norm, "lm_head.weight": (c.vocab_size, c.hidden_size)}

    def tensor(self, name: str) -> Tensor:
        """Make a tensor.  The embedding is kept, because the lm_head and the draft are made from it."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        if name == embedding_name(self.config):
            return self.embedding if self.config.embedding_scale == 1 else self.embedding / self.config.embedding_scale
        if name == "lm_head.weight":
            return self._head()
        size = self.shapes[name]
        if part in CONSTANT_VECTORS:
            return torch.full(size, CONSTANT_VECTORS[part], device=self.device)
        if part == "conv1d" and len(size) == 3:
            return self.draw.normal(name, size[0], size[2], size[2] ** -0.5, self.dtype)[:, None]
        if part == "e_score_correction_bias":
            return torch.zeros(size, device=self.device)
        if part.endswith("bias") or part == "sinks":
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        if len(size) == 1:
            offset = 0.0 if name.endswith(NORMS_WITHOUT_OFFSET) else self.config.family.norm_offset
            return torch.full(size, self._constant(name, part) - offset, dtype=self.dtype, device=self.device)
        if part in ("gate", "router") or name.endswith("router.proj.weight"):
            return router_weight(self, name, size[0]).to(self.dtype)
        if len(size) == 3:
            return self._stacked(name, part, size)
        weight = self._linear(name, part, size)
        if self.is_copy_mode and part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self._plant_copying(weight, part, int(name.split(".")[2]))
        if self.writes_stamps and part in ("v_proj", "o_proj"):
            self._plant_stamp(weight, part, int(name.split(".")[2]))
        return weight

    def _constant(self, name: str, part: str) -> float:
        """Returns the value that fills a tensor of one dimension."""
        c = self.config
        if part in (c.family.layer_norms.after_attention, c.family.layer_norms.after_mlp):
            return DISTURBANCE / math.sqrt(2 * c.num_layers)
        if name.endswith("router.scale"):
            # The model divides by it.
            return math.sqrt(c.hidden_size)
        if self.is_copy_mode and part in ("q_norm", "k_norm"):
            return self.lag_code.norm_weight
        if part == "k_norm":
            spec = layer_specs_of(c)[int(name.split(".")[2])]
            # With this value, attention scores have a standard deviation of 1, whatever the softmax scale.
            return spec.cache_spec.k_size**-0.5 / spec.softmax_scale
        return 1.0

    @property
    def writes_stamps(self) -> bool:
        """Whether each layer writes its stamp, by which a block draft knows the layers that it reads.

        Attention must keep a value that is the same in all rows.
        """
        c = self.config
        keeps_values = (
            c.latent is None and not c.family.has_sinks and c.family.layer_specs is None and len(c.family.names.qkv) > 1
        )
        return self.chain.fading is not None and not self.is_copy_mode and keeps_values

    @property
    def random_part_length(self) -> float:
        """The length of r_t."""
        return math.sqrt(self.config.hidden_size * (1 - sum(EMBEDDING_SHARES[part] for part in self.planted.length)))

    @cached_property
    def embedding(self) -> Tensor:
        """[V, H], every row of length sqrt(H)."""
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        out = torch.empty(vocab, hidden, dtype=self.dtype, device=self.device)
        for chunk, drawn in self.draw.normal_chunks("embedding", vocab, hidden):
            random = self.planted.remove_planted(drawn)
            random *= self.random_part_length / random.norm(dim=1, keepdim=True)
            out[chunk] = (random + self._planted_parts(chunk)).to(self.dtype)
        return out

    def _planted_parts(self, tokens: slice) -> Tensor:
        """[rows, H]: the planted parts of these tokens' embeddings."""
        planted, chain = self.planted, self.chain
        parts = (planted.direction("mark") * planted.length["mark"]).expand(tokens.stop - tokens.start, -1)
        if self.is_copy_mode:
            for part, index in (("read", chain.kind), ("write", chain.kind), ("lag", chain.lag_of)):
                columns = planted.first_columns[part] + index[tokens].to(self.device)
                parts = parts + planted.basis.T[columns] * planted.length[part]
        if chain.nudge is not None:
            columns = planted.first_columns["nudge"] + chain.nudge[tokens].to(self.device)
            parts = parts + planted.basis.T[columns] * planted.length["nudge"]
        if self.correlation:
            of_token = self.topics[chain.topic[tokens].to(self.device)]
            parts = parts + of_token @ planted.directions_of_part("topic", TOPIC_SIZE).T * planted.length["topic"]
        return parts

    def random_part_of(self, tokens: Tensor) -> Tensor:
        """r_t of tokens [...], from the stored embedding: [..., H] float32."""
        return self.planted.remove_planted(self.embedding[tokens.to(self.device)].float())

    def _linear(self, name: str, part: str, size: tuple[int, ...]) -> Tensor:
        """A random weight that keeps a standard deviation of 1.  If the output is added to the residual, the weight is
        smaller, and orthogonal to the planted directions."""
        if part not in ("o_proj", "out_proj", "down_proj"):
            return self.draw.normal(name, size[0], size[1], size[1] ** -0.5, self.dtype)
        weight = self.draw.normal(
            name, size[0], size[1], self._residual_std(name, part) * size[1] ** -0.5, torch.float32
        )
        basis = self.planted.basis
        return weight.sub_(basis @ (basis.T @ weight)).to(self.dtype)

    def _stacked(self, name: str, part: str, size: tuple[int, ...]) -> Tensor:
        """Experts [E, in, out], or [E, out, in] where gate lies over up, as `_linear`."""
        experts, num_in, num_out = size
        if self.config.experts is not None and self.config.experts.storage == "joined":
            out = self.draw.normal(name, experts * num_in, num_out, num_out**-0.5, self.dtype).view(size)
            for matrix in out if part == "down_proj" else ():
                matrix.copy_(self.planted.remove_planted(matrix.T.float()).T * self._residual_std(name, part))
            return out
        if part != "down_proj":
            return self.draw.normal(name, experts * num_in, num_out, num_in**-0.5, self.dtype).view(size)
        out = torch.empty(experts * num_in, num_out, dtype=self.dtype, device=self.device)
        for chunk, drawn in self.draw.normal_chunks(name, experts * num_in, num_out):
            out[chunk] = self.planted.remove_planted(drawn.mul_(self._residual_std(name, part) * num_in**-0.5)).to(
                self.dtype
            )
        return out.view(size)

    def _residual_std(self, name: str, part: str) -> float:
        """The standard deviation of what a layer adds to the residual, for inputs of standard deviation 1."""
        step = DISTURBANCE / math.sqrt(2 * self.config.num_layers)
        if part == "o_proj":
            return step
        experts = self.config.experts
        if experts is None or ".experts." not in name:
            return step / GATED_STD
        if self.config.family.layer_norms.after_mlp is not None:
            return 1.0  # that norm scales what experts add
        # The weights of a row's experts sum up to this factor at most.
        return step / GATED_STD / experts.routing.routed_scaling_factor

    def _plant_stamp(self, weight: Tensor, part: str, layer: int) -> None:
        """The first channel of the first head reads the mark, which is 1 in every row, and writes the stamp."""
        planted = self.planted
        if part == "v_proj":
            weight[0] = (planted.direction("mark") / planted.length["mark"]).to(self.dtype)
        else:
            stamp = planted.direction("stamp", layer) * (STAMP_LENGTH * math.sqrt(self.config.hidden_size))
            weight[:, 0] = stamp.to(self.dtype)

    def _plant_copying(self, weight: Tensor, part: str, layer: int) -> None:
        """Head A, the first of a group, attends to the lag, and head B, the second, to its own position.

        The normed residual holds a planted direction with its `length`, up to DISTURBANCE.
        """
        c, planted, code = self.config, self.planted, self.lag_code
        size, kv_head = c.head_size, layer % c.kv_heads
        first_head = kv_head * (c.heads // c.kv_heads)
        key = code.amplitude * torch.outer(code.key().to(self.device), planted.direction("mark"))
        key /= planted.length["mark"]
        if part == "k_proj":
            weight[kv_head * size : (kv_head + 1) * size] = key.to(self.dtype)
        elif part == "q_proj":
            query = torch.zeros_like(key)
            for lag in range(len(self.chain.lags)):
                distance = int(self.chain.lags[lag]) if lag == layer else 0
                rotated = code.query(distance).to(self.device)
                query += code.amplitude * torch.outer(rotated, planted.direction("lag", lag)) / planted.length["lag"]
            weight[first_head * size : (first_head + 1) * size] = query.to(self.dtype)
            weight[(first_head + 1) * size : (first_head + 2) * size] = key.to(self.dtype)
        for kind in range(NUM_SUCCESSORS):
            if part == "v_proj":
                weight[kv_head * size + kind] = (planted.direction("read", kind) / planted.length["read"]).to(
                    self.dtype
                )
            elif part == "o_proj":
                written = (planted.direction("write", kind) * planted.length["write"]).to(self.dtype)
                weight[:, first_head * size + kind] = written
                weight[:, (first_head + 1) * size + kind] = -written

    def _head(self) -> Tensor:
        """[V, H].  The rows of cold tokens, which are never emitted, are random and as large as a hot row."""
        hidden, vocab, chain = self.config.hidden_size, self.config.vocab_size, self.chain
        out = torch.empty(vocab, hidden, dtype=self.dtype, device=self.device)
        std = SUCCESSOR_LOGIT * math.sqrt(NUM_SUCCESSORS) / hidden
        for chunk, drawn in self.draw.normal_chunks("lm_head", vocab, hidden):
            out[chunk] = self.planted.remove_planted(drawn.mul_(std)).to(self.dtype)
        before, wanted = self._predecessors()
        for first in range(0, chain.size, CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            tokens = chain.token_at(torch.arange(chain.size)[rows])
            inputs = self.random_part_of(before[rows].clamp(min=0))
            row = solve_rows(inputs, wanted[rows].to(self.device), (before[rows] >= 0).to(self.device))
            if self.is_copy_mode:
                write = directions_by_index(self.planted, "write", chain.kind[tokens].to(self.device))
                row = row + write * (COPIED_KIND_LOGIT / self.planted.length["write"])
            if chain.nudge is not None:
                nat = KIND_LENGTH_PER_NAT * math.sqrt(hidden)
                row = row + directions_by_index(self.planted, "kind", chain.kind[tokens].to(self.device)) / nat
            out[tokens.to(self.device)] = row.to(self.dtype)
        return out

    def _predecessors(self) -> tuple[Tensor, Tensor]:
        """(tokens, logits), [N, n] each: for each place the tokens that may precede it, padded with -1, and the logits
        that the place's token gets after each of them."""
        chain = self.chain
        places = torch.arange(chain.size)
        ring = [chain.token_at(places - shift) for shift in chain.shifts[:NUM_SUCCESSORS]]
        gaps = torch.zeros(NUM_SUCCESSORS)
        if not self.is_copy_mode:
            gaps = torch.tensor(PROBABILITIES).log() - math.log(PROBABILITIES[0])
        cold = (~chain.is_hot).nonzero()[:, 0]
        follows = (chain.place[cold] + chain.shifts[0]) % chain.size
        order = follows.argsort(stable=True)
        follows, cold = follows[order], cold[order]
        column = torch.arange(len(cold)) - torch.searchsorted(follows, follows)
        more = torch.full((chain.size, int(column.max()) + 1 if len(cold) else 0), -1)
        more[follows, column] = cold
        before = torch.cat((torch.stack(ring, 1), more), 1)
        wanted = torch.cat((SUCCESSOR_LOGIT + gaps.expand(chain.size, -1), torch.full(more.shape, SUCCESSOR_LOGIT)), 1)
        cap = self.config.logit_cap
        return before, wanted if cap is None else cap * torch.atanh(wanted / cap)


def require_copy_mode_fits(config: ModelConfig, chain: Chain, shape: str) -> None:
    """Raises EspalierError for a model into which copy mode cannot be built."""
    if config.latent is not None:
        raise EspalierError(f"copy mode is not for latent attention, which {shape} has; use mode chain")
    if config.family.layer_specs is not None:
        raise EspalierError(f"copy mode needs layers with heads of one size, which {shape} lacks; use mode chain")
    if len(config.family.names.qkv) == 1:
        raise EspalierError(f"copy mode needs q, k and v stored apart, which {shape} lacks; use mode chain")
    if config.heads < 2 * config.kv_heads:
        raise EspalierError(f"copy mode needs two query heads a key-value head, {shape} has fewer")
    for layer, window in enumerate(config.windows):
        if window is not None and int(chain.lags[layer]) >= window:
            raise EspalierError(
                f"copy mode looks {int(chain.lags[layer])} positions back in layer {layer} of {shape}, whose window "
                f"is {window}; lower --reach below that"
            )


def directions_by_index(planted: PlantedDirections, part: str, index: Tensor) -> Tensor:
    """[rows, H]: the direction of `part` with each index."""
    return planted.basis.T[planted.first_columns[part] + index]


def solve_rows(inputs: Tensor, wanted: Tensor, is_real: Tensor) -> Tensor:
    """The shortest w [N, H] whose product with each real input is the wanted value: w · inputs[n] = wanted[n].

    inputs: [N, n, H]; wanted: [N, n]; is_real: bool [N, n], False for padding."""
    inputs = inputs * is_real[..., None]
    gram = inputs @ inputs.transpose(1, 2) + torch.diag_embed((~is_real).to(inputs.dtype))
    weights = torch.linalg.solve(gram, (wanted * is_real)[..., None])
    return (weights * inputs).sum(1)
