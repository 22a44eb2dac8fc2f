"""The products of a model's passes as a list of shapes: linear layers, and the experts behind routers.

timing.py runs them on a GPU.
"""

from collections import Counter
from dataclasses import dataclass, replace

from espalier.bench.shapes import find_shape
from espalier.cache.layer_spec import INDEX_PLANE, NO_MIXING, LayerSpec, RecurrentState
from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.ops.activation import SILU, Activation
from espalier.models.block import EDGE_PROJECTION_SIZES, BlockConfig, EdgeKind
from espalier.models.config import ModelConfig
from espalier.models.draft import DraftConfig
from espalier.models.latent_config import LatentConfig
from espalier.models.layer_loading import layer_specs_of
from espalier.models.mtp import MTPConfig
from espalier.models.quantisers import GROUP_SIZE, MXFP4_BLOCK_SIZE, NVFP4_GROUP_SIZE, QUANTISERS

Shape = tuple[int, int]
# Fields of a config that stand for products which are not counted here.
UNCOUNTED = ("hidden_size_per_layer_input", "use_double_wide_mlp", "gating")


@dataclass(frozen=True)
class ProductRun:
    """`count` weights [out, in] of a pass, each multiplied with `rows` rows.

    heads: if above 1, each weight is [heads, out, in], and one batched product multiplies each head with its own rows.
    weights: how the weights are stored, "dense" or a name of espalier/models/quantisers.py:QUANTISERS.
    experts: for a router, the experts that follow each of its products; None for other layers.
    first: index of the first weight among the weights of this name and shape.
    """

    name: str
    shape: Shape
    count: int
    rows: int
    heads: int = 1
    weights: str = DENSE
    experts: "RoutedExperts | None" = None
    first: int = 0

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights; dense weights have two bytes a number."""
        return value_bytes(self.weights) * self.count * self.heads * self.shape[0] * self.shape[1]

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.count * self.heads * self.shape[0] * self.shape[1]

    @property
    def expert_bytes(self) -> float:
        """Bytes of the experts that get rows from this router, in all its layers together."""
        experts = self.experts
        return 0 if experts is None else self.count * experts.touched_by(self.rows) * experts.expert_bytes


def value_bytes(weights: str) -> float:
    """Bytes for one number of a matrix, with its share of a group's scale.  Scales of rows and blocks are left out."""
    scales = {"int4": 2 / GROUP_SIZE, "nvfp4": 1 / NVFP4_GROUP_SIZE, "mxfp4": 1 / MXFP4_BLOCK_SIZE}
    return 0.5 + scales[weights] if weights in scales else 2 if weights == DENSE else 1


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a model's mixture-of-experts layers.

    layers: the number of such layers.  shape: of the experts of one layer.
    shared: intermediate size of the shared expert, 0: none.  shared_gate: whether the shared expert has a gate.
    shared_joins: whether passes of few rows compute the shared expert in the launches of the routed experts, where the
    weights of both are unquantised (espalier/models/layers/mlp.py).
    biases, activation: of the routed experts.
    """

    layers: int
    shape: ExpertsShape
    shared: int = 0
    shared_gate: bool = False
    shared_joins: bool = False
    biases: bool = False
    activation: Activation = SILU


@dataclass(frozen=True)
class RoutedExperts:
    """The experts behind a router.

    weights: how the experts are stored, as in ProductRun.  touched: how many experts of a layer get rows, the mean over
    layers; None: as many as with uniform routing.
    """

    sizes: ExpertSizes
    weights: str = DENSE
    touched: float | None = None

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert as stored."""
        return self.sizes.shape.expert_bytes * value_bytes(self.weights) / value_bytes(DENSE)

    def touched_by(self, rows: int) -> float:
        return self.sizes.shape.active_experts(rows) if self.touched is None else self.touched


@dataclass(frozen=True)
class MTPSizes:
    """The modules of an MTP draft.

    layer: sizes of one module's decoder layer.  own_heads: whether each module has its own lm_head; otherwise all share
    the target's.  Embeddings are not counted: a pass reads only the embeddings of its rows.
    """

    modules: int
    layer: "ModelShape"
    own_heads: bool = False


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a block draft.

    layers: of all its layers; rows: of its one pass over a block; edge_rank, edge_kind: as in BlockConfig.
    """

    layers: "ModelShape"
    rows: int
    edge_rank: int = 0
    edge_kind: EdgeKind = "vanilla"

    def edge_products(self, batch: int, steps: int, topk: int, draft_vocab: int) -> "tuple[ProductRun, ...]":
        """The products of a block draft's edges: one for the block's hidden states, then one for each depth, of the
        root and then of topk rows.  All depths read the same weights."""
        rank, (parts, inputs) = self.edge_rank, EDGE_PROJECTION_SIZES[self.edge_kind]
        runs = [ProductRun("draft edge hidden", (parts * rank, self.layers.hidden), 1, batch * steps)]
        # The first depth reads no state.
        for count, read in [(batch, min(inputs, 1)), *[(batch * topk, inputs)] * (steps - 1)]:
            runs.append(ProductRun("draft edge factors", (parts * rank, read * rank), 1, count))
            runs.append(ProductRun("draft edges", (draft_vocab, rank), 1, count))
        return tuple(run for run in runs if run.weight_bytes)

    def context(self, rows: int) -> "tuple[ProductRun, ...]":
        """The K and V projections of `rows` context rows."""
        layers = self.layers
        columns = layers.specs[0].keeps.values_per_token
        return (layers._run("draft context", (columns, layers.hidden), layers.layers, rows),)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder's linear layers and attention, and of a draft for it.

    specs: the heads and cache rows of each layer.  latent: of layers with latent attention; None: there are none.
    experts: of the last layers; None for a dense model.
    draft_vocab: rows of the draft's lm_head.  captured: number of target features that the draft fuses.
    draft: sizes of an EAGLE head's layer; None if it is like the target's.  mtp, block: None for an EAGLE head.
    weights: how the matrices of layers are stored, as in ProductRun.  A draft's sizes have their own value, for its
    head too.
    is_draft: whether these are the sizes of a draft's layers.
    gated: whether attention also has a gate, as wide as its queries.
    one_block: whether each layer is one block, a mixer or experts; layers of experts keep no K/V (Nemotron-H).
    """

    hidden: int
    specs: tuple[LayerSpec, ...]
    intermediate: int
    vocab: int
    draft_vocab: int = 32000
    captured: int = 3
    draft: "ModelShape | None" = None
    latent: LatentConfig | None = None
    experts: ExpertSizes | None = None
    mtp: MTPSizes | None = None
    block: BlockSizes | None = None
    weights: str = DENSE
    is_draft: bool = False
    gated: bool = False
    one_block: bool = False

    @property
    def layers(self) -> int:
        return len(self.specs)

    @property
    def dense_layers(self) -> int:
        """The number of the first layers that have no experts; 0 if each layer is one block."""
        return (
            0
            if self.one_block
            else self.layers - (0 if self.experts is None else min(self.experts.layers, self.layers))
        )

    def part(self, first: int, end: int | None = None) -> "ModelShape":
        """The sizes of the layers from `first` up to `end` alone."""
        specs = self.specs[first:end]
        dense = min(max(self.dense_layers - first, 0), len(specs))
        return replace(self, specs=specs, experts=self.experts and replace(self.experts, layers=len(specs) - dense))

    def target_pass(self, rows: int, head_rows: int | None = None) -> tuple[ProductRun, ...]:
        """The products of a verify pass: every layer over `rows` rows, and the lm_head over `head_rows` (None: all).

        Routed experts have no run of their own: the run of their router names them.
        """
        return (*self._layers("", self.hidden, rows), self._head("lm_head", self.vocab, rows, head_rows))

    def draft_pass(
        self, rows: int, head_rows: int | None = None, fused_rows: int = 0, module: int = 1
    ) -> tuple[ProductRun, ...]:
        """The products of one module (from 1) over `rows` rows, and of its head over `head_rows` (None: all).

        fused_rows: rows of captured features that an EAGLE head fuses before the pass; MTP modules fuse none.
        """
        head_rows = rows if head_rows is None else head_rows
        head = (self._draft_head(module, head_rows),) if head_rows else ()
        if self.mtp is not None:
            name, layer = f"draft {module} ", self.mtp.layer
            joined = layer._run(f"{name}project", (layer.hidden, 2 * layer.hidden), 1, rows)
            return (joined, *layer._layers(name, layer.hidden, rows), *head)
        draft = self.draft_sizes
        fuse = (self._fuse(draft, fused_rows),) if fused_rows else ()
        return (*fuse, *draft.part(0, 1)._layers("draft ", 2 * draft.hidden, rows), *head)

    def block_pass(self, batch: int, steps: int, topk: int) -> tuple[ProductRun, ...]:
        """The products of a block draft's one pass: layers over the block, the head over one row a depth, and edges."""
        block = self.block
        assert block is not None
        layers = block.layers._layers("draft ", block.layers.hidden, batch * block.rows)
        return (*layers, self._own_head(batch * steps), *block.edge_products(batch, steps, topk, self.draft_vocab))

    def extend_passes(self, rows: int) -> tuple[ProductRun, ...]:
        """The products of the draft's extend: every module over `rows` rows, no heads, or a block draft's context."""
        if self.block is not None:
            return (self._fuse(self.block.layers, rows), *self.block.context(rows))
        passes = [self.draft_pass(rows, 0, rows, module) for module in range(1, self.modules + 1)]
        return tuple(run for of_module in passes for run in of_module)

    @property
    def modules(self) -> int:
        return 1 if self.mtp is None else self.mtp.modules

    @property
    def draft_sizes(self) -> "ModelShape":
        """The sizes of a module's decoder layer, or of all layers of a block draft."""
        if self.mtp is not None:
            return self.mtp.layer
        if self.block is not None:
            return self.block.layers
        whole = (replace(self.specs[0], window=None),)
        return self.draft or replace(self, specs=whole, experts=None, weights=DENSE, is_draft=True)

    def shapes(self, weights: str = DENSE) -> tuple[Shape, ...]:
        """The shapes of all linear layers whose weights are stored as `weights`, each shape once, in a round's order.

        Batched products are left out, and the factors of edges, which have a kernel of their own.
        """
        draft = self.draft_pass(1, fused_rows=1)
        if self.block is not None:
            draft = (*self.block_pass(1, 1, 1), *self.extend_passes(1))
        runs = (run for run in (*self.target_pass(1), *draft) if run.name != "draft edge factors")
        return tuple(dict.fromkeys(run.shape for run in runs if run.heads == 1 and run.weights == weights))

    def _layers(self, prefix: str, wide: int, rows: int) -> tuple[ProductRun, ...]:
        """The products of all layers, dense layers first; equal layers share a run.

        wide: the first product's inputs.
        """
        # A window changes no product.
        kinds = Counter((at < self.dense_layers, replace(spec, window=None)) for at, spec in enumerate(self.specs))
        runs, taken = list[ProductRun](), Counter[tuple[str, Shape]]()
        for (is_dense, spec), count in kinds.items():
            mlp = self._mlp(prefix, self.intermediate, count, rows) if is_dense else self._routed(prefix, count, rows)
            if self.one_block and spec.keeps != NO_MIXING:
                mlp = ()
            for run in (*self._attention(prefix, wide, spec, count, rows), *mlp):
                runs.append(replace(run, first=taken[run.name, run.shape]))
                taken[run.name, run.shape] += count
        return tuple(runs)

    def _attention(self, prefix: str, wide: int, spec: LayerSpec, count: int, rows: int) -> tuple[ProductRun, ...]:
        if self.latent is not None:
            own = self._latent_attention(prefix, self.latent, spec.heads, count, rows)
            return (*self._indexer(prefix, self.latent, spec, count, rows), *own)
        if isinstance(spec.keeps, RecurrentState):
            return self._recurrence(prefix, spec.keeps, count, rows)
        size = spec.keeps.k_size
        heads = spec.projected_heads + (spec.heads if self.gated else 0)
        return (
            self._run(f"{prefix}qkv", (heads * size, wide), count, rows),
            self._run(f"{prefix}o", (self.hidden, spec.heads * size), count, rows),
        )

    def _recurrence(self, prefix: str, keeps: RecurrentState, count: int, rows: int) -> tuple[ProductRun, ...]:
        """The products of a recurrent layer: the inputs with their gate, the inputs of decays and betas, the output."""
        if keeps == NO_MIXING:
            return ()
        inner = keeps.heads * keeps.v_size or keeps.channels
        columns = keeps.channels + inner if keeps.heads else 3 * keeps.channels
        gates: tuple[ProductRun, ...] = ()
        if keeps.heads and keeps.delta:
            gates = (ProductRun(f"{prefix}gates", (2 * keeps.heads, self.hidden), count, rows),)
        else:
            columns += keeps.heads
        inputs = self._run(f"{prefix}inputs", (columns, self.hidden), count, rows)
        return (inputs, *gates, self._run(f"{prefix}out", (self.hidden, inner), count, rows))

    def _latent_attention(
        self, prefix: str, latent: LatentConfig, heads: int, count: int, rows: int
    ) -> tuple[ProductRun, ...]:
        queries = heads * latent.head_size
        rows_of_down = (latent.q_rank or queries) + latent.row_size
        up = () if latent.q_rank is None else (self._run(f"{prefix}q up", (queries, latent.q_rank), count, rows),)
        return (
            self._run(f"{prefix}q and kv", (rows_of_down, self.hidden), count, rows),
            *up,
            ProductRun(f"{prefix}k up", (latent.kv_rank, latent.nope_size), count, rows, heads),
            ProductRun(f"{prefix}v up", (latent.v_size, latent.kv_rank), count, rows, heads),
            self._run(f"{prefix}o", (self.hidden, heads * latent.v_size), count, rows),
        )

    def _indexer(
        self, prefix: str, latent: LatentConfig, spec: LayerSpec, count: int, rows: int
    ) -> tuple[ProductRun, ...]:
        """The products of indexers, for layers that keep index keys."""
        index = latent.indexer
        if index is None or latent.q_rank is None or not spec.keeps.planes.get(INDEX_PLANE):
            return ()
        return (
            self._run(f"{prefix}index up", (index.heads * index.size, latent.q_rank), count, rows),
            self._run(f"{prefix}index key", (index.size, self.hidden), count, rows),
            ProductRun(f"{prefix}index weights", (index.heads, self.hidden), count, rows),
        )

    def _mlp(self, prefix: str, inner: int, count: int, rows: int, halves: int = 2) -> tuple[ProductRun, ...]:
        return (
            self._run(f"{prefix}gate_up", (halves * inner, self.hidden), count, rows),
            self._run(f"{prefix}down", (self.hidden, inner), count, rows),
        )

    def _run(self, name: str, shape: Shape, count: int, rows: int) -> ProductRun:
        """A run with quantised weights if the format takes a matrix of this name and these sizes, else with
        dense."""
        return ProductRun(name, shape, count, rows, weights=self.weights if self._quantises(name, shape[1]) else DENSE)

    def _quantises(self, name: str, columns: int) -> bool:
        """Whether the format takes a matrix.  name: of a ProductRun; its last word is the matrix's name."""
        if self.weights == DENSE:
            return False
        quantiser = QUANTISERS[self.weights]
        return quantiser.for_draft(self.is_draft).is_quantised(name.split()[-1], columns)

    def _routed(self, prefix: str, count: int, rows: int) -> tuple[ProductRun, ...]:
        """The router with its routed experts, and then the linear layers beside the experts."""
        experts = self.experts
        if experts is None:
            return ()
        routed = RoutedExperts(experts, self.weights)
        router = ProductRun(f"{prefix}router", (experts.shape.num_experts, self.hidden), count, rows, experts=routed)
        gate = (ProductRun(f"{prefix}shared gate", (1, self.hidden), count, rows),) if experts.shared_gate else ()
        halves = experts.activation.halves
        shared = self._mlp(f"{prefix}shared ", experts.shared, count, rows, halves) if experts.shared else ()
        return router, *gate, *shared

    def _fuse(self, draft: "ModelShape", rows: int) -> ProductRun:
        return draft._run("draft fc", (draft.hidden, self.captured * self.hidden), 1, rows)

    def _own_head(self, rows: int) -> ProductRun:
        """The product of the head of an EAGLE head or of a block draft."""
        draft = self.draft_sizes
        return draft._run("draft lm_head", (self.draft_vocab, draft.hidden), 1, rows)

    def _draft_head(self, module: int, rows: int) -> ProductRun:
        if self.mtp is None:
            return self._own_head(rows)
        if self.mtp.own_heads:
            return self.mtp.layer._run(f"draft {module} lm_head", (self.vocab, self.hidden), 1, rows)
        # A shared head has the same name as the target's head, so a chain of passes uses the same weight.
        return self._head("lm_head", self.vocab, rows, None)

    def _head(self, name: str, vocab: int, rows: int, head_rows: int | None) -> ProductRun:
        return ProductRun(name, (vocab, self.hidden), 1, rows if head_rows is None else head_rows)


def model_sizes(config: ModelConfig) -> ModelShape:
    """The sizes of a target, or of a draft's layers.  Raises EspalierError for a model with uncounted products."""
    specs = layer_specs_of(config)
    uncounted = [name for name in UNCOUNTED if config.raw.get(name)]
    if uncounted:
        raise EspalierError(
            f"layers of {config.architecture} have products of {uncounted[0]}, which the benches do not count; "
            "name another model"
        )
    experts = None
    if config.experts is not None and config.experts.layers:
        own, routing = config.experts, config.experts.routing
        is_plain = own.activation == SILU and not (own.has_biases or own.shared_has_bias or own.shared_gate_name)
        experts = ExpertSizes(
            len(own.layers),
            ExpertsShape(routing.num_experts, routing.top_k, config.hidden_size, own.size, own.activation.halves),
            own.shared_size,
            own.shared_gate_name is not None,
            shared_joins=is_plain and own.shared_size > 0 and own.shared_size % own.size == 0,
            biases=own.has_biases,
            activation=own.activation,
        )
    return ModelShape(
        hidden=config.hidden_size,
        specs=specs,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        latent=config.latent,
        experts=experts,
        gated="linear_num_value_heads" in config.raw,
        one_block=any(spec.keeps == NO_MIXING for spec in specs),
    )


def module_sizes(config: MTPConfig) -> ModelShape:
    """The sizes of one MTP module's decoder layer."""
    whole, index, experts = model_sizes(config.layer), config.num_layers, config.layer.experts
    has_experts = experts is not None and index in experts.layers
    return replace(
        whole,
        specs=whole.specs[index : index + 1],
        experts=replace(whole.experts, layers=1) if has_experts and whole.experts else None,
    )


def with_draft(target: ModelShape, draft: DraftConfig, weights: str = DENSE) -> ModelShape:
    """The sizes of the target, with those of its draft.  weights: how the draft's weights are stored (ProductRun)."""
    spec = draft.spec
    if isinstance(draft, MTPConfig):
        return replace(target, mtp=MTPSizes(spec.modules, replace(module_sizes(draft), weights=weights, is_draft=True)))
    layer = replace(model_sizes(draft.layer), weights=weights, is_draft=True)
    if isinstance(draft, BlockConfig):
        block = BlockSizes(layer, spec.block_rows, draft.edge_rank, draft.edge_kind)
        return replace(target, draft_vocab=spec.vocab_size, captured=len(spec.capture), block=block)
    return replace(target, draft_vocab=spec.vocab_size, captured=len(spec.capture), draft=layer)


def shape_named(name: str, weights: str = DENSE, draft_weights: str = DENSE) -> ModelShape:
    """The sizes of a named shape and of an EAGLE-3 head.  weights, draft_weights: of target and draft.

    Raises EspalierError for an unknown name.
    """
    shape = find_shape(name)
    return with_draft(replace(model_sizes(shape.target), weights=weights), shape.draft_config, draft_weights)
