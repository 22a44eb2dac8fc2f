"""Lists the matrix products of a model's passes by their shapes: linear layers, and experts behind routers.

timing.py runs these products on a GPU.
"""

from collections import Counter
from dataclasses import dataclass, replace

from espalier.bench.shapes import find_shape
from espalier.cache.layer_spec import INDEX_PLANE, NO_MIXING, LayerSpec, RecurrentState
from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.ops.activation import SILU, Activation
from espalier.models.block import MARKOV_PROJECTION_SIZES, BlockConfig, MarkovHeadType
from espalier.models.config import ModelConfig
from espalier.models.draft import DraftConfig
from espalier.models.latent_config import LatentConfig
from espalier.models.layer_loading import layer_specs_of
from espalier.models.mtp import MTPConfig
from espalier.models.quantisers import GROUP_SIZE, MXFP4_BLOCK_SIZE, NVFP4_GROUP_SIZE, QUANTISERS

Shape = tuple[int, int]
# Config fields of models with products that this module does not count.
UNCOUNTED_FIELDS = ("hidden_size_per_layer_input", "use_double_wide_mlp", "gating")


@dataclass(frozen=True)
class ProductRun:
    """A run of equal products: `count` weights [out, in], each multiplied with `rows` rows.

    heads: if above 1, a weight is [heads, out, in], and a batched product multiplies each head with its own rows.
    weights: the weights' format, "dense" or a name of espalier/models/quantisers.py:QUANTISERS.  experts: for a router,
    the experts behind it; None for other layers.  first: index of the run's first weight among all weights of this name
    and shape.
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
        """The bytes of all weights of the run.  Dense weights have two bytes a number."""
        return value_bytes(self.weights) * self.count * self.heads * self.shape[0] * self.shape[1]

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.count * self.heads * self.shape[0] * self.shape[1]

    @property
    def expert_bytes(self) -> float:
        """The bytes of all experts that get rows from the routers of this run."""
        experts = self.experts
        return 0 if experts is None else self.count * experts.touched_by(self.rows) * experts.expert_bytes


def value_bytes(weights: str) -> float:
    """Returns the bytes of a matrix's number, with its share of a group's scale, without row and block scales."""
    scales = {"int4": 2 / GROUP_SIZE, "nvfp4": 1 / NVFP4_GROUP_SIZE, "mxfp4": 1 / MXFP4_BLOCK_SIZE}
    return 0.5 + scales[weights] if weights in scales else 2 if weights == DENSE else 1


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a model's mixture-of-experts layers.

    layers: the number of these layers.  shape: the experts' sizes in one layer.  shared: the shared expert's
    intermediate size, 0 for no shared expert.  shared_gate: whether the shared expert has a gate.  shared_joins:
    whether passes of few rows compute an unquantised shared expert in the launches of the routed experts
    (espalier/models/layers/mlp.py). biases, activation: of the routed experts.
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

    weights: the experts' format, see ProductRun.  touched: the mean number of a layer's experts that get rows; None for
    the number with uniform routing.
    """

    sizes: ExpertSizes
    weights: str = DENSE
    touched: float | None = None

    @property
    def expert_bytes(self) -> float:
        """The bytes of one stored expert."""
        return self.sizes.shape.expert_bytes * value_bytes(self.weights) / value_bytes(DENSE)

    def touched_by(self, rows: int) -> float:
        return self.sizes.shape.active_experts(rows) if self.touched is None else self.touched


@dataclass(frozen=True)
class MTPSizes:
    """The sizes of the modules of an MTP draft.

    layer: sizes of one module's decoder layer.  own_heads: whether each module has its own lm_head; False if all
    modules use the target's lm_head.  Embeddings are not counted, because a pass reads only the embeddings of its rows.
    """

    modules: int
    layer: "ModelShape"
    own_heads: bool = False


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a block draft.  layers: the sizes of all its layers.  rows: of its one pass over a block.
    markov_rank, markov_head_type: see BlockConfig."""

    layers: "ModelShape"
    rows: int
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"

    def edge_products(self, batch: int, steps: int, topk: int, draft_vocab: int) -> "tuple[ProductRun, ...]":
        """Returns the products of a block draft's edges: first the block's hidden states, then one product for each
        depth. The first depth has one row, the root; other depths have topk rows.  All depths read the same weights."""
        rank, (parts, inputs) = self.markov_rank, MARKOV_PROJECTION_SIZES[self.markov_head_type]
        runs = [ProductRun("draft edge hidden", (parts * rank, self.layers.hidden), 1, batch * steps)]
        # The first depth reads no state.
        for count, read in [(batch, min(inputs, 1)), *[(batch * topk, inputs)] * (steps - 1)]:
            runs.append(ProductRun("draft edge factors", (parts * rank, read * rank), 1, count))
            runs.append(ProductRun("draft edges", (draft_vocab, rank), 1, count))
        return tuple(run for run in runs if run.weight_bytes)

    def context(self, rows: int) -> "tuple[ProductRun, ...]":
        """Returns the K and V projections of `rows` context rows."""
        layers = self.layers
        columns = layers.specs[0].cache_spec.values_per_token
        return (layers._product_run("draft context", (columns, layers.hidden), layers.layers, rows),)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder's linear layers and attention, and of a draft for it.

    specs: the heads and cache rows of each layer.  latent: for latent attention, else None.  experts: of the last
    layers; None for a dense model.  draft_vocab: rows of the draft's lm_head.  captured: the number of target features
    that the draft fuses.  draft: sizes of an EAGLE head's layer; None if they equal the target's.  mtp, block: None for
    an EAGLE head.  weights: the format of the layers' matrices, see ProductRun; a draft has its own format, for its
    head too. is_draft: whether these are a draft's layers.  gated: whether attention has a gate as wide as its queries.
    one_block: whether a layer is only a mixer or only experts (Nemotron-H).
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
        """The number of dense layers before the layers with experts; 0 if one_block."""
        return (
            0
            if self.one_block
            else self.layers - (0 if self.experts is None else min(self.experts.layers, self.layers))
        )

    def part(self, first: int, end: int | None = None) -> "ModelShape":
        """Returns the sizes of a model with only the layers `first` to `end`."""
        specs = self.specs[first:end]
        dense = min(max(self.dense_layers - first, 0), len(specs))
        return replace(self, specs=specs, experts=self.experts and replace(self.experts, layers=len(specs) - dense))

    def target_pass(self, rows: int, head_rows: int | None = None) -> tuple[ProductRun, ...]:
        """Returns a verify pass's products: all layers over `rows` rows, the lm_head over `head_rows` (None: `rows`).
        Routed experts have no run of their own.  The run of their router has them as `experts`."""
        return (*self._layer_runs("", self.hidden, rows), self._head_run("lm_head", self.vocab, rows, head_rows))

    def draft_pass(
        self, rows: int, head_rows: int | None = None, fused_rows: int = 0, module: int = 1
    ) -> tuple[ProductRun, ...]:
        """Returns a draft module's products (module 1 is the first): `rows` rows, `head_rows` for the head (None:
        `rows`).

        fused_rows: rows of captured features that an EAGLE head fuses before the pass; MTP modules fuse none.
        """
        head_rows = rows if head_rows is None else head_rows
        head = (self._draft_head_run(module, head_rows),) if head_rows else ()
        if self.mtp is not None:
            name, layer = f"draft {module} ", self.mtp.layer
            joined = layer._product_run(f"{name}project", (layer.hidden, 2 * layer.hidden), 1, rows)
            return (joined, *layer._layer_runs(name, layer.hidden, rows), *head)
        draft = self.draft_sizes
        fuse = (self._fusion_run(draft, fused_rows),) if fused_rows else ()
        return (*fuse, *draft.part(0, 1)._layer_runs("draft ", 2 * draft.hidden, rows), *head)

    def block_pass(self, batch: int, steps: int, topk: int) -> tuple[ProductRun, ...]:
        """Returns a block draft pass's products: layers over the block, the head over one row a depth, and edges."""
        block = self.block
        assert block is not None
        layers = block.layers._layer_runs("draft ", block.layers.hidden, batch * block.rows)
        return (*layers, self._own_head_run(batch * steps), *block.edge_products(batch, steps, topk, self.draft_vocab))

    def extend_passes(self, rows: int) -> tuple[ProductRun, ...]:
        """Returns a draft's extend products: modules over `rows` rows without heads, or a block draft's context."""
        if self.block is not None:
            return (self._fusion_run(self.block.layers, rows), *self.block.context(rows))
        passes = [self.draft_pass(rows, 0, rows, module) for module in range(1, self.modules + 1)]
        return tuple(run for of_module in passes for run in of_module)

    @property
    def modules(self) -> int:
        return 1 if self.mtp is None else self.mtp.modules

    @property
    def draft_sizes(self) -> "ModelShape":
        """The sizes of a draft module's decoder layer, or of all layers of a block draft."""
        if self.mtp is not None:
            return self.mtp.layer
        if self.block is not None:
            return self.block.layers
        whole = (replace(self.specs[0], window=None),)
        return self.draft or replace(self, specs=whole, experts=None, weights=DENSE, is_draft=True)

    def shapes(self, weights: str = DENSE) -> tuple[Shape, ...]:
        """Returns the different shapes of all linear layers with the weight format `weights`, in the order of a round.

        Not included are batched products, and the factors of edges, which have their own kernel.
        """
        draft = self.draft_pass(1, fused_rows=1)
        if self.block is not None:
            draft = (*self.block_pass(1, 1, 1), *self.extend_passes(1))
        runs = (run for run in (*self.target_pass(1), *draft) if run.name != "draft edge factors")
        return tuple(dict.fromkeys(run.shape for run in runs if run.heads == 1 and run.weights == weights))

    def _layer_runs(self, prefix: str, input_columns: int, rows: int) -> tuple[ProductRun, ...]:
        """Returns the products of all layers, dense layers first.  Equal layers share a run.  input_columns: of the
        first product."""
        # A sliding window does not change a layer's products.
        kinds = Counter((at < self.dense_layers, replace(spec, window=None)) for at, spec in enumerate(self.specs))
        runs, taken = list[ProductRun](), Counter[tuple[str, Shape]]()
        for (is_dense, spec), count in kinds.items():
            mlp = (
                self._mlp_runs(prefix, self.intermediate, count, rows)
                if is_dense
                else self._mixture_runs(prefix, count, rows)
            )
            if self.one_block and spec.cache_spec != NO_MIXING:
                mlp = ()
            for run in (*self._attention_runs(prefix, input_columns, spec, count, rows), *mlp):
                runs.append(replace(run, first=taken[run.name, run.shape]))
                taken[run.name, run.shape] += count
        return tuple(runs)

    def _attention_runs(
        self, prefix: str, input_columns: int, spec: LayerSpec, count: int, rows: int
    ) -> tuple[ProductRun, ...]:
        if self.latent is not None:
            own = self._latent_attention(prefix, self.latent, spec.heads, count, rows)
            return (*self._indexer(prefix, self.latent, spec, count, rows), *own)
        if isinstance(spec.cache_spec, RecurrentState):
            return self._recurrence(prefix, spec.cache_spec, count, rows)
        size = spec.cache_spec.k_size
        heads = spec.projected_heads + (spec.heads if self.gated else 0)
        return (
            self._product_run(f"{prefix}qkv", (heads * size, input_columns), count, rows),
            self._product_run(f"{prefix}o", (self.hidden, spec.heads * size), count, rows),
        )

    def _recurrence(self, prefix: str, keeps: RecurrentState, count: int, rows: int) -> tuple[ProductRun, ...]:
        """Returns the products of a recurrent layer: inputs with gate, inputs of decays and betas, output."""
        if keeps == NO_MIXING:
            return ()
        inner = keeps.heads * keeps.v_size or keeps.channels
        columns = keeps.channels + inner if keeps.heads else 3 * keeps.channels
        gates: tuple[ProductRun, ...] = ()
        if keeps.heads and keeps.delta:
            gates = (ProductRun(f"{prefix}gates", (2 * keeps.heads, self.hidden), count, rows),)
        else:
            columns += keeps.heads
        inputs = self._product_run(f"{prefix}inputs", (columns, self.hidden), count, rows)
        return (inputs, *gates, self._product_run(f"{prefix}out", (self.hidden, inner), count, rows))

    def _latent_attention(
        self, prefix: str, latent: LatentConfig, heads: int, count: int, rows: int
    ) -> tuple[ProductRun, ...]:
        queries = heads * latent.head_size
        rows_of_down = (latent.q_rank or queries) + latent.cache_row_size
        up = (
            ()
            if latent.q_rank is None
            else (self._product_run(f"{prefix}q up", (queries, latent.q_rank), count, rows),)
        )
        return (
            self._product_run(f"{prefix}q and kv", (rows_of_down, self.hidden), count, rows),
            *up,
            ProductRun(f"{prefix}k up", (latent.kv_rank, latent.nope_size), count, rows, heads),
            ProductRun(f"{prefix}v up", (latent.v_size, latent.kv_rank), count, rows, heads),
            self._product_run(f"{prefix}o", (self.hidden, heads * latent.v_size), count, rows),
        )

    def _indexer(
        self, prefix: str, latent: LatentConfig, spec: LayerSpec, count: int, rows: int
    ) -> tuple[ProductRun, ...]:
        """Returns the products of the indexers of layers that keep index keys."""
        index = latent.indexer
        if index is None or latent.q_rank is None or not spec.cache_spec.planes.get(INDEX_PLANE):
            return ()
        return (
            self._product_run(f"{prefix}index up", (index.heads * index.size, latent.q_rank), count, rows),
            self._product_run(f"{prefix}index key", (index.size, self.hidden), count, rows),
            ProductRun(f"{prefix}index weights", (index.heads, self.hidden), count, rows),
        )

    def _mlp_runs(self, prefix: str, inner: int, count: int, rows: int, halves: int = 2) -> tuple[ProductRun, ...]:
        return (
            self._product_run(f"{prefix}gate_up", (halves * inner, self.hidden), count, rows),
            self._product_run(f"{prefix}down", (self.hidden, inner), count, rows),
        )

    def _product_run(self, name: str, shape: Shape, count: int, rows: int) -> ProductRun:
        """Returns a run with quantised weights if the format can store this matrix, else with dense weights."""
        return ProductRun(name, shape, count, rows, weights=self.weights if self._quantises(name, shape[1]) else DENSE)

    def _quantises(self, name: str, columns: int) -> bool:
        """Returns whether the format can store a matrix.  name: of a ProductRun; its last word names the matrix."""
        if self.weights == DENSE:
            return False
        quantiser = QUANTISERS[self.weights]
        return quantiser.for_draft(self.is_draft).is_quantised(name.split()[-1], columns)

    def _mixture_runs(self, prefix: str, count: int, rows: int) -> tuple[ProductRun, ...]:
        """Returns the router with its routed experts, and then the linear layers beside the experts."""
        experts = self.experts
        if experts is None:
            return ()
        routed = RoutedExperts(experts, self.weights)
        router = ProductRun(f"{prefix}router", (experts.shape.num_experts, self.hidden), count, rows, experts=routed)
        gate = (ProductRun(f"{prefix}shared gate", (1, self.hidden), count, rows),) if experts.shared_gate else ()
        halves = experts.activation.num_matrices
        shared = self._mlp_runs(f"{prefix}shared ", experts.shared, count, rows, halves) if experts.shared else ()
        return router, *gate, *shared

    def _fusion_run(self, draft: "ModelShape", rows: int) -> ProductRun:
        return draft._product_run("draft fc", (draft.hidden, self.captured * self.hidden), 1, rows)

    def _own_head_run(self, rows: int) -> ProductRun:
        """Returns the product of the lm_head of an EAGLE head or of a block draft."""
        draft = self.draft_sizes
        return draft._product_run("draft lm_head", (self.draft_vocab, draft.hidden), 1, rows)

    def _draft_head_run(self, module: int, rows: int) -> ProductRun:
        if self.mtp is None:
            return self._own_head_run(rows)
        if self.mtp.own_heads:
            return self.mtp.layer._product_run(f"draft {module} lm_head", (self.vocab, self.hidden), 1, rows)
        # A shared head has the target head's name, so a chain of passes uses the same weight.
        return self._head_run("lm_head", self.vocab, rows, None)

    def _head_run(self, name: str, vocab: int, rows: int, head_rows: int | None) -> ProductRun:
        return ProductRun(name, (vocab, self.hidden), 1, rows if head_rows is None else head_rows)


def model_sizes(config: ModelConfig) -> ModelShape:
    """Returns the sizes of a target or a draft's layers.  Raises EspalierError for a model with uncounted products."""
    specs = layer_specs_of(config)
    uncounted = [name for name in UNCOUNTED_FIELDS if config.raw.get(name)]
    if uncounted:
        raise EspalierError(
            f"layers of {config.architecture} have products of {uncounted[0]}, which the benches do not count; "
            "name another model"
        )
    experts = None
    if config.experts is not None and config.experts.layers:
        own, routing, size = config.experts, config.experts.routing, config.experts.intermediate_size
        is_plain = own.activation == SILU and not (own.has_biases or own.shared_has_bias or own.shared_gate_name)
        experts = ExpertSizes(
            len(own.layers),
            ExpertsShape(routing.num_experts, routing.top_k, config.hidden_size, size, own.activation.num_matrices),
            own.shared_size,
            own.shared_gate_name is not None,
            shared_joins=is_plain and own.shared_size > 0 and own.shared_size % size == 0,
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
        one_block=any(spec.cache_spec == NO_MIXING for spec in specs),
    )


def module_sizes(config: MTPConfig) -> ModelShape:
    """Returns the sizes of one MTP module's decoder layer."""
    whole, index, experts = model_sizes(config.layer), config.num_layers, config.layer.experts
    has_experts = experts is not None and index in experts.layers
    return replace(
        whole,
        specs=whole.specs[index : index + 1],
        experts=replace(whole.experts, layers=1) if has_experts and whole.experts else None,
    )


def with_draft(target: ModelShape, draft: DraftConfig, weights: str = DENSE) -> ModelShape:
    """Returns the target's sizes with the draft's sizes.  weights: the format of the draft's weights (ProductRun)."""
    spec = draft.spec
    if isinstance(draft, MTPConfig):
        module = replace(module_sizes(draft), weights=weights, is_draft=True)
        return replace(target, mtp=MTPSizes(spec.num_modules, module))
    layer = replace(model_sizes(draft.layer), weights=weights, is_draft=True)
    if isinstance(draft, BlockConfig):
        block = BlockSizes(layer, spec.block_rows, draft.markov_rank, draft.markov_head_type)
        return replace(target, draft_vocab=spec.vocab_size, captured=len(spec.captured_layers), block=block)
    return replace(target, draft_vocab=spec.vocab_size, captured=len(spec.captured_layers), draft=layer)


def shape_named(name: str, weights: str = DENSE, draft_weights: str = DENSE) -> ModelShape:
    """Returns the sizes of a named shape with an EAGLE-3 head.  weights, draft_weights: the formats of target and
    draft. Raises EspalierError for an unknown name.
    """
    shape = find_shape(name)
    return with_draft(replace(model_sizes(shape.target), weights=weights), shape.draft_config, draft_weights)
