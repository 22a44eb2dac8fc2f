"""Lists the matrix products of a model's passes: linear layers, and experts with routers.  timing.py runs them."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

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

# Config fields of models with products that this module does not count.
UNCOUNTED_FIELDS = ("hidden_size_per_layer_input", "use_double_wide_mlp", "gating")

Shape = tuple[int, int]


@dataclass(frozen=True)
class ProductGroup:
    """Equal products of a pass: `num_weights` weights of shape [out, in], each multiplied with `num_rows` rows.

    num_heads: if above 1, a weight is [heads, out, in], and a batched product multiplies each head with its own rows.
    weight_format: "dense", or a name in espalier/models/quantisers.py:QUANTISERS.
    experts: for a router, the experts that it chooses from; None for other layers.
    first_weight: index of the group's first weight among all weights of this name and shape."""

    name: str
    shape: Shape
    num_weights: int
    num_rows: int
    num_heads: int = 1
    weight_format: str = DENSE
    experts: "RoutedExperts | None" = None
    first_weight: int = 0

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights of the group.  Dense weights have two bytes a number."""
        return value_bytes(self.weight_format) * self.num_weights * self.num_heads * self.shape[0] * self.shape[1]

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.num_weights * self.num_heads * self.shape[0] * self.shape[1]

    @property
    def expert_bytes(self) -> float:
        """The bytes of all experts that get rows from the routers of this group."""
        experts = self.experts
        return 0 if experts is None else self.num_weights * experts.active_experts(self.num_rows) * experts.expert_bytes


def value_bytes(weight_format: str) -> float:
    """Returns the bytes of one value of a weight, and of its share of a group's scale.  FP8's scales do not count."""
    scales = {"int4": 2 / GROUP_SIZE, "nvfp4": 1 / NVFP4_GROUP_SIZE, "mxfp4": 1 / MXFP4_BLOCK_SIZE}
    return 0.5 + scales[weight_format] if weight_format in scales else 2 if weight_format == DENSE else 1


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a model's mixture-of-experts layers.

    shape: the experts' sizes in one layer.  shared_size: the shared expert's intermediate size, 0 for no shared expert.
    has_shared_gate: whether a learned gate scales the shared expert's output.
    fuses_shared: whether the launches of the routed experts also compute the shared expert, if it is not quantised and
    the pass has few rows (espalier/models/layers/mlp.py).  has_biases, activation: of the routed experts."""

    num_layers: int
    shape: ExpertsShape
    shared_size: int = 0
    has_shared_gate: bool = False
    fuses_shared: bool = False
    has_biases: bool = False
    activation: Activation = SILU


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that a router chooses from.  weight_format: see ProductGroup.  mean_active_experts: how many experts
    of a layer get rows, on average over passes; None for as many as with uniform routing."""

    sizes: ExpertSizes
    weight_format: str = DENSE
    mean_active_experts: float | None = None

    @property
    def expert_bytes(self) -> float:
        """The bytes of one expert in this weight_format."""
        return self.sizes.shape.expert_bytes * value_bytes(self.weight_format) / value_bytes(DENSE)

    def active_experts(self, num_rows: int) -> float:
        mean = self.mean_active_experts
        return self.sizes.shape.active_experts(num_rows) if mean is None else mean


@dataclass(frozen=True)
class MTPSizes:
    """The sizes of the modules of an MTP draft.  Embeddings do not count, because a pass reads only a few rows of them.

    layer_shape: sizes of one module's decoder layer.  has_own_heads: if False, modules use the target's lm_head."""

    num_modules: int
    layer_shape: "ModelShape"
    has_own_heads: bool = False


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a block draft.  layers_shape: the sizes of all its layers.  block_rows: the rows of the draft's
    only pass, for each request.  markov_rank, markov_head_type: see BlockConfig."""

    layers_shape: "ModelShape"
    block_rows: int
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"

    def edge_products(self, batch: int, steps: int, topk: int, draft_vocab: int) -> "tuple[ProductGroup, ...]":
        """Returns the products of the draft's Markov head (kernels/tree/edges.py): one product over the block's hidden
        states, then two for each of the tree's `steps` depths, with the same weights.  The first depth has one row for
        each request, the root.  Other depths have topk rows for each request."""
        rank, hidden_size = self.markov_rank, self.layers_shape.hidden_size
        num_parts, num_inputs = MARKOV_PROJECTION_SIZES[self.markov_head_type]
        groups = [ProductGroup("draft edge hidden", (num_parts * rank, hidden_size), 1, batch * steps)]
        # At the first depth, an RNN head has no earlier state to read.
        for num_rows, num_read in [(batch, min(num_inputs, 1)), *[(batch * topk, num_inputs)] * (steps - 1)]:
            groups.append(ProductGroup("draft edge factors", (num_parts * rank, num_read * rank), 1, num_rows))
            groups.append(ProductGroup("draft edges", (draft_vocab, rank), 1, num_rows))
        return tuple(group for group in groups if group.weight_bytes)

    def context_products(self, rows: int) -> "tuple[ProductGroup, ...]":
        """Returns the products that project `rows` context rows to the K and V of all layers."""
        layers = self.layers_shape
        columns = layers.layer_specs[0].cache_spec.values_per_token
        return (layers._product("draft context", (columns, layers.hidden_size), layers.num_layers, rows),)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder's linear layers and attention, and of a draft for it.
    layer_specs: the heads and cache rows of each layer.  latent: the sizes of latent attention; None without it.
    experts: the sizes of the experts in the last layers; None for a dense model.
    draft_vocab_size: rows of the draft's lm_head.  num_captured_layers: how many target layers the draft reads.
    draft: sizes of an EAGLE head's layer; None if they equal the target's.  mtp, block: sizes of an MTP or block draft.
    weight_format: the format of these layers' matrices (ProductGroup).  is_draft: whether these are a draft's layers.
    gates_attention: whether attention has a gate as wide as its queries.
    one_block_layers: whether a layer is only a mixer or only experts (Nemotron-H)."""

    hidden_size: int
    layer_specs: tuple[LayerSpec, ...]
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int = 32000
    num_captured_layers: int = 3
    draft: "ModelShape | None" = None
    latent: LatentConfig | None = None
    experts: ExpertSizes | None = None
    mtp: MTPSizes | None = None
    block: BlockSizes | None = None
    weight_format: str = DENSE
    is_draft: bool = False
    gates_attention: bool = False
    one_block_layers: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layer_specs)

    @property
    def num_dense_layers(self) -> int:
        """The number of dense layers before the layers with experts; 0 if one_block_layers."""
        num_expert_layers = self.experts.num_layers if self.experts else 0
        return 0 if self.one_block_layers else max(0, self.num_layers - num_expert_layers)

    def slice_layers(self, begin: int, end: int | None = None) -> "ModelShape":
        """Returns the sizes of a model with only the layers `begin` to `end` - 1; end: None for all after `begin`."""
        specs = self.layer_specs[begin:end]
        num_dense_layers = min(max(self.num_dense_layers - begin, 0), len(specs))
        experts = self.experts and replace(self.experts, num_layers=len(specs) - num_dense_layers)
        return replace(self, layer_specs=specs, experts=experts)

    def target_pass(self, rows: int, head_rows: int | None = None) -> tuple[ProductGroup, ...]:
        """Returns a verify pass's products: all layers over `rows` rows, the lm_head over `head_rows` (None: `rows`).
        Routed experts have no ProductGroup of their own, but are the `experts` of their router's ProductGroup."""
        lm_head = self._lm_head(rows if head_rows is None else head_rows)
        return (*self._layer_products("", self.hidden_size, rows), lm_head)

    def draft_pass(
        self, rows: int, head_rows: int | None = None, fused_rows: int = 0, module: int = 1
    ) -> tuple[ProductGroup, ...]:
        """Returns a draft module's products over `rows` rows.  module: the module's number in an MTP draft, from 1.
        head_rows: rows of the lm_head; None for `rows`.  fused_rows: rows of the target's hidden states that an EAGLE
        head projects (fc) before the pass; MTP modules project none."""
        head_rows = rows if head_rows is None else head_rows
        head = (self._draft_head_product(module, head_rows),) if head_rows else ()
        if self.mtp is not None:
            name, layer = f"draft {module} ", self.mtp.layer_shape
            joined = layer._product(f"{name}project", (layer.hidden_size, 2 * layer.hidden_size), 1, rows)
            return (joined, *layer._layer_products(name, layer.hidden_size, rows), *head)
        draft = self.draft_sizes
        fuse = (self._fusion_product(draft, fused_rows),) if fused_rows else ()
        return (*fuse, *draft.slice_layers(0, 1)._layer_products("draft ", 2 * draft.hidden_size, rows), *head)

    def block_pass(self, batch: int, steps: int, topk: int) -> tuple[ProductGroup, ...]:
        """Returns the products of a block draft's pass: layers, lm_head over one row for each depth, Markov head."""
        block = self.block
        assert block is not None
        layers = block.layers_shape._layer_products("draft ", block.layers_shape.hidden_size, batch * block.block_rows)
        edges = block.edge_products(batch, steps, topk, self.draft_vocab_size)
        return (*layers, self._own_lm_head(batch * steps), *edges)

    def extend_passes(self, rows: int) -> tuple[ProductGroup, ...]:
        """Returns a draft's products for `rows` accepted tokens, without lm_head.  A block draft only makes K and V."""
        if self.block is not None:
            return (self._fusion_product(self.block.layers_shape, rows), *self.block.context_products(rows))
        passes = [self.draft_pass(rows, 0, rows, module) for module in range(1, self.num_draft_modules + 1)]
        return tuple(group for products in passes for group in products)

    @property
    def num_draft_modules(self) -> int:
        return 1 if self.mtp is None else self.mtp.num_modules

    @property
    def draft_sizes(self) -> "ModelShape":
        """The sizes of a draft module's decoder layer, or of all layers of a block draft."""
        if self.mtp is not None:
            return self.mtp.layer_shape
        if self.block is not None:
            return self.block.layers_shape
        first_layer = (replace(self.layer_specs[0], window=None),)
        return self.draft or replace(self, layer_specs=first_layer, experts=None, weight_format=DENSE, is_draft=True)

    def matrix_shapes(self, weight_format: str = DENSE) -> tuple[Shape, ...]:
        """Returns the different shapes of all linear layers with this weight format, in the order in which they
        run.  Batched products are left out, and so are the projections of the Markov head (another kernel)."""
        draft = self.draft_pass(1, fused_rows=1)
        if self.block is not None:
            draft = (*self.block_pass(1, 1, 1), *self.extend_passes(1))
        groups = (group for group in (*self.target_pass(1), *draft) if group.name != "draft edge factors")
        shapes = (group.shape for group in groups if group.num_heads == 1 and group.weight_format == weight_format)
        return tuple(dict.fromkeys(shapes))

    def _layer_products(self, prefix: str, input_columns: int, num_rows: int) -> tuple[ProductGroup, ...]:
        """Returns the products of all layers, dense layers first.  Layers that differ only in the sliding window share
        groups.  prefix: the start of the products' names.  input_columns: the input size of a layer's first product."""
        specs = [replace(spec, window=None) for spec in self.layer_specs]
        layer_counts = Counter((i < self.num_dense_layers, spec) for i, spec in enumerate(specs))
        groups, num_earlier_weights = list[ProductGroup](), Counter[tuple[str, Shape]]()
        for (is_dense, spec), count in layer_counts.items():
            mlp = (
                self._mlp_products(prefix, self.intermediate_size, count, num_rows)
                if is_dense
                else self._expert_products(prefix, count, num_rows)
            )
            if self.one_block_layers and spec.cache_spec != NO_MIXING:
                mlp = ()
            for group in (*self._attention_products(prefix, input_columns, spec, count, num_rows), *mlp):
                groups.append(replace(group, first_weight=num_earlier_weights[group.name, group.shape]))
                num_earlier_weights[group.name, group.shape] += count
        return tuple(groups)

    def _attention_products(
        self, prefix: str, input_columns: int, spec: LayerSpec, num_layers: int, num_rows: int
    ) -> tuple[ProductGroup, ...]:
        if self.latent is not None:
            latent_products = self._latent_products(prefix, self.latent, spec.heads, num_layers, num_rows)
            return (*self._indexer_products(prefix, self.latent, spec, num_layers, num_rows), *latent_products)
        if isinstance(spec.cache_spec, RecurrentState):
            return self._recurrent_products(prefix, spec.cache_spec, num_layers, num_rows)
        size = spec.cache_spec.k_size
        heads = spec.projected_heads + (spec.heads if self.gates_attention else 0)
        return (
            self._product(f"{prefix}qkv", (heads * size, input_columns), num_layers, num_rows),
            self._product(f"{prefix}o", (self.hidden_size, spec.heads * size), num_layers, num_rows),
        )

    def _recurrent_products(
        self, prefix: str, state: RecurrentState, num_layers: int, num_rows: int
    ) -> tuple[ProductGroup, ...]:
        """Returns the products of a recurrent layer: the projections of its inputs, of its gates, and of its output."""
        if state == NO_MIXING:
            return ()
        inner = state.heads * state.v_size or state.channels
        columns = state.channels + inner if state.heads else 3 * state.channels
        gates: tuple[ProductGroup, ...] = ()
        if state.heads and state.delta:
            gates = (ProductGroup(f"{prefix}gates", (2 * state.heads, self.hidden_size), num_layers, num_rows),)
        else:
            columns += state.heads
        inputs = self._product(f"{prefix}inputs", (columns, self.hidden_size), num_layers, num_rows)
        return (inputs, *gates, self._product(f"{prefix}out", (self.hidden_size, inner), num_layers, num_rows))

    def _latent_products(
        self, prefix: str, latent: LatentConfig, heads: int, num_layers: int, num_rows: int
    ) -> tuple[ProductGroup, ...]:
        queries = heads * latent.head_size
        rows_of_down = (latent.q_rank or queries) + latent.cache_row_size
        up = (
            ()
            if latent.q_rank is None
            else (self._product(f"{prefix}q up", (queries, latent.q_rank), num_layers, num_rows),)
        )
        return (
            self._product(f"{prefix}q and kv", (rows_of_down, self.hidden_size), num_layers, num_rows),
            *up,
            ProductGroup(f"{prefix}k up", (latent.kv_rank, latent.nope_size), num_layers, num_rows, heads),
            ProductGroup(f"{prefix}v up", (latent.v_size, latent.kv_rank), num_layers, num_rows, heads),
            self._product(f"{prefix}o", (self.hidden_size, heads * latent.v_size), num_layers, num_rows),
        )

    def _indexer_products(
        self, prefix: str, latent: LatentConfig, spec: LayerSpec, num_layers: int, num_rows: int
    ) -> tuple[ProductGroup, ...]:
        """Returns the products of the indexers of layers that keep index keys."""
        index = latent.indexer
        if index is None or latent.q_rank is None or not spec.cache_spec.planes.get(INDEX_PLANE):
            return ()
        return (
            self._product(f"{prefix}index up", (index.heads * index.size, latent.q_rank), num_layers, num_rows),
            self._product(f"{prefix}index key", (index.size, self.hidden_size), num_layers, num_rows),
            ProductGroup(f"{prefix}index weights", (index.heads, self.hidden_size), num_layers, num_rows),
        )

    def _mlp_products(
        self, prefix: str, inner_size: int, num_layers: int, num_rows: int, num_in_matrices: int = 2
    ) -> tuple[ProductGroup, ...]:
        return (
            self._product(f"{prefix}gate_up", (num_in_matrices * inner_size, self.hidden_size), num_layers, num_rows),
            self._product(f"{prefix}down", (self.hidden_size, inner_size), num_layers, num_rows),
        )

    def _product(self, name: str, shape: Shape, num_layers: int, num_rows: int) -> ProductGroup:
        """Returns a group with quantised weights if the format can store this matrix, else with dense weights."""
        weight_format = self.weight_format if self._quantises(name, shape[1]) else DENSE
        return ProductGroup(name, shape, num_layers, num_rows, weight_format=weight_format)

    def _quantises(self, name: str, columns: int) -> bool:
        """Returns whether the format can store a matrix.  name: of its ProductGroup, ends with the matrix's name."""
        if self.weight_format == DENSE:
            return False
        quantiser = QUANTISERS[self.weight_format]
        return quantiser.for_draft(self.is_draft).is_quantised(name.split()[-1], columns)

    def _expert_products(self, prefix: str, num_layers: int, num_rows: int) -> tuple[ProductGroup, ...]:
        """Returns the router's product, whose `experts` are the routed experts, then the shared expert's products."""
        experts = self.experts
        if experts is None:
            return ()
        routed = RoutedExperts(experts, self.weight_format)
        router_shape = experts.shape.num_experts, self.hidden_size
        router = ProductGroup(f"{prefix}router", router_shape, num_layers, num_rows, experts=routed)
        gate = ProductGroup(f"{prefix}shared gate", (1, self.hidden_size), num_layers, num_rows)
        num_in_matrices = experts.activation.num_matrices
        shared = self._mlp_products(f"{prefix}shared ", experts.shared_size, num_layers, num_rows, num_in_matrices)
        return router, *([gate] if experts.has_shared_gate else ()), *(shared if experts.shared_size else ())

    def _fusion_product(self, draft: "ModelShape", num_rows: int) -> ProductGroup:
        """Returns the product of fc, by which the draft joins the hidden states of several target layers."""
        return draft._product("draft fc", (draft.hidden_size, self.num_captured_layers * self.hidden_size), 1, num_rows)

    def _own_lm_head(self, num_rows: int) -> ProductGroup:
        """Returns the product of the lm_head of an EAGLE head or of a block draft."""
        draft = self.draft_sizes
        return draft._product("draft lm_head", (self.draft_vocab_size, draft.hidden_size), 1, num_rows)

    def _draft_head_product(self, module: int, num_rows: int) -> ProductGroup:
        if self.mtp is None:
            return self._own_lm_head(num_rows)
        if self.mtp.has_own_heads:
            lm_head = self.vocab_size, self.hidden_size
            return self.mtp.layer_shape._product(f"draft {module} lm_head", lm_head, 1, num_rows)
        # Modules that share the target's lm_head use its name, so that all of them multiply with the same weight.
        return self._lm_head(num_rows)

    def _lm_head(self, num_rows: int) -> ProductGroup:
        return ProductGroup("lm_head", (self.vocab_size, self.hidden_size), 1, num_rows)


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
        moe, routing, size = config.experts, config.experts.routing, config.experts.intermediate_size
        is_plain = moe.activation == SILU and not (moe.has_biases or moe.shared_has_bias or moe.shared_gate_name)
        experts = ExpertSizes(
            len(moe.layers),
            ExpertsShape(routing.num_experts, routing.top_k, config.hidden_size, size, moe.activation.num_matrices),
            moe.shared_size,
            moe.shared_gate_name is not None,
            fuses_shared=is_plain and moe.shared_size > 0 and moe.shared_size % size == 0,
            has_biases=moe.has_biases,
            activation=moe.activation,
        )
    return ModelShape(
        hidden_size=config.hidden_size,
        layer_specs=specs,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        latent=config.latent,
        experts=experts,
        gates_attention="linear_num_value_heads" in config.raw,
        one_block_layers=any(spec.cache_spec == NO_MIXING for spec in specs),
    )


def module_sizes(config: MTPConfig) -> ModelShape:
    """Returns the sizes of one MTP module's decoder layer."""
    layers_shape, index, experts = model_sizes(config.layer), config.num_target_layers, config.layer.experts
    has_experts = experts is not None and index in experts.layers
    return replace(
        layers_shape,
        layer_specs=layers_shape.layer_specs[index : index + 1],
        experts=replace(layers_shape.experts, num_layers=1) if has_experts and layers_shape.experts else None,
    )


def with_draft(target: ModelShape, draft: DraftConfig, weight_format: str = DENSE) -> ModelShape:
    """Returns the target's sizes with the draft's sizes.  weight_format: the draft's, see ProductGroup."""
    spec = draft.spec
    if isinstance(draft, MTPConfig):
        module = replace(module_sizes(draft), weight_format=weight_format, is_draft=True)
        return replace(target, mtp=MTPSizes(spec.num_modules, module))
    layer = replace(model_sizes(draft.layer), weight_format=weight_format, is_draft=True)
    draft_fields: dict[str, Any] = {"draft": layer}
    if isinstance(draft, BlockConfig):
        draft_fields = {"block": BlockSizes(layer, spec.block_rows, draft.markov_rank, draft.markov_head_type)}
    draft_fields |= {"draft_vocab_size": spec.vocab_size, "num_captured_layers": len(spec.captured_layers)}
    return replace(target, **draft_fields)


def shape_named(name: str, weight_format: str = DENSE, draft_weight_format: str = DENSE) -> ModelShape:
    """Returns the sizes of a named shape with an EAGLE-3 head.  weight_format, draft_weight_format: the formats of
    target and draft. Raises EspalierError for an unknown name."""
    shape = find_shape(name)
    target = replace(model_sizes(shape.target), weight_format=weight_format)
    return with_draft(target, shape.draft_config, draft_weight_format)
