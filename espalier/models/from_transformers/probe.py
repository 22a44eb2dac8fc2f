"""Finds out what a class of transformers does, by tests on tiny random models and without a checkpoint's weights.

A class can be a target if it passes this test: the nodes of a tree, run in one pass after a prefix, get the same logits
as the plain model returns for each path.  The tests are all that is known about a class.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import apply_sink, masked_attention
from espalier.models.from_transformers.shrink import refusal_reason, tiny_config, tiny_model
from espalier.models.from_transformers.target import (
    ATTENTION_NAME,
    MakeForward,
    TransformersModel,
    attend,
    find_replacements,
    layers_of,
)

# The largest difference of logits, relative to the largest logit, in float32.
TOLERANCE = 1e-4
# The parent row of each row, for two requests: a prefix, then the nodes of a tree.
TREE_PARENTS = ((*range(-1, 13), 13, 13, 14, 14, 15), (*range(-1, 9), 9, 9, 10, 10, 11, 13, 14, 9, 17))


@dataclass(frozen=True)
class ProbeResult:
    """What was measured of a class with a config.

    replacements: see TransformersModel.  replaced: how many modules of each class they replace, in words.
    can_capture: whether a layer's input is one row [H] for each token.
    num_weights: the number of values in all matrices; expert_weights: the number in experts' matrices.
    num_experts, top_k: 1 without experts.
    """

    model_class: Any
    config: Any
    specs: tuple[LayerSpec, ...]
    replacements: Mapping[type, MakeForward]
    replaced: str
    can_capture: bool
    vocab_size: int
    num_weights: int
    expert_weights: int
    num_experts: int
    top_k: int


@dataclass
class TrialAttention:
    """An Attend in which rows attend as `seen` says.  It records the calls.

    positions: [B, Q].  seen: [B, Q, Q] bool, the rows to which each row attends.
    modules, rows, specs: by call, the module, its K and V, and its layer's spec.
    """

    positions: Tensor
    seen: Tensor
    modules: list[nn.Module] = field(default_factory=list)
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    specs: list[LayerSpec] = field(default_factory=list)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Raises EspalierError, with the reason, for attention that no backend computes."""
        scale, sink = options.get("scaling"), options.get("s_aux")
        window, softcap = options.get("sliding_window") or None, options.get("softcap") or None
        if mask is not None:
            raise EspalierError("its attention has a mask of its own, which may be not causal")
        if scale is not None and not isinstance(scale, int | float):
            raise EspalierError("the factor of its attention scores is no number")
        # A layer whose K and V are the same tensors as an earlier layer's shares that layer's rows.
        shared = next((i for i, rows in enumerate(self.rows) if rows[0] is k and rows[1] is v), None)
        keeps = KVHeads(k.shape[1], k.shape[3], v.shape[3])
        self.specs.append(LayerSpec(q.shape[1], keeps, window, scale, softcap, shared))
        self.modules.append(module)
        self.rows.append((k, v))
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        if q.is_meta or k.shape[1] != self.seen.shape[2]:
            # Zeros of the right shape: meta tensors have no values, and a class that attends over other rows is refused
            # by its calls or its logits.
            return q.new_zeros(*q.shape[:3], v.shape[3])
        seen, at = self.seen, self.positions
        if window is not None:
            seen = seen & (at[:, :, None] - at[:, None] < window)
        out, lse = masked_attention(q, k, v, seen, q.shape[3] ** -0.5 if scale is None else scale, softcap=softcap)
        return (out if sink is None else apply_sink(out, lse, sink)).contiguous()


def require_one_call_each(layers: nn.ModuleList, modules: Sequence[nn.Module]) -> None:
    """Check that each layer attends once, in order.  modules: those that attended.
    Raises EspalierError with the reason."""
    if not modules:
        raise EspalierError("its attention does not go through transformers' AttentionInterface")
    layer_of = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    at = [layer_of.get(module, -1) for module in modules]
    if without := [i for i in range(len(layers)) if i not in at]:
        kind = type(layers[without[0]]).__name__
        raise EspalierError(f"its layer {without[0]} ({kind}) keeps no K and V: it has recurrent state or no attention")
    if at != list(range(len(layers))):
        raise EspalierError("its layers do not attend once each, in the order of one list")


@torch.no_grad()
def probe(model_class: Any, config: Any) -> ProbeResult:
    """Probes a class.  Raises EspalierError, with the reason, for a class that cannot be a target."""
    replacements, can_capture = try_tree(tiny_model(model_class, tiny_config(config)))
    meta = copy.deepcopy(config)
    meta._attn_implementation = ATTENTION_NAME
    # This is the only implementation of experts that never reads on the host.
    meta._experts_implementation = "batched_mm"
    with refusal_reason("its class refuses its config"), torch.device("meta"):
        full = model_class(meta).eval()
    kinds = Counter(type(module) for module in full.modules())
    matrices = [each for each in full.parameters() if each.ndim > 1]
    experts = [each for each in matrices if each.ndim == 3]
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    trial = TrialAttention(tokens, tokens)
    with refusal_reason("with this config it does not run, or it reads values on the host, which no captured pass can"):
        body = TransformersModel(full, {})
        body.logits(body.run(tokens, tokens, trial)[0])
    return ProbeResult(
        model_class=model_class,
        config=config,
        specs=tuple(trial.specs),
        replacements=replacements,
        replaced=", ".join(f"{kinds[kind]} {kind.__name__}" for kind in replacements),
        can_capture=can_capture,
        vocab_size=body.head.shape[0],
        num_weights=sum(each.numel() for each in matrices),
        expert_weights=sum(each.numel() for each in experts),
        num_experts=experts[0].shape[0] if experts else 1,
        top_k=getattr(config, "num_experts_per_tok", None) or 1,
    )


@torch.no_grad()
@refusal_reason("a small model of it does not run")
def try_tree(model: Any) -> tuple[Mapping[type, MakeForward], bool]:
    """Returns `replacements` and `can_capture` of ProbeResult.

    Raises EspalierError, with the reason, unless a tree's nodes get the logits of the plain model.
    """
    from transformers import AttentionInterface

    # It is not registered as a mask function too.  So transformers makes no mask, and does not search the positions for
    # packed sequences, which it would do on the host.
    AttentionInterface.register(ATTENTION_NAME, attend)
    size = (len(TREE_PARENTS), len(TREE_PARENTS[0]))
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(1))
    # The rows run in reverse order, to find a class that treats the first rows of a pass differently: it is no target.
    rows = range(size[1] - 1, -1, -1)
    paths = [[_path_to_root(parents, row) for row in rows] for parents in TREE_PARENTS]
    model.set_attn_implementation("eager")
    logits = [
        model(input_ids=of_request[None, path], use_cache=False).logits[0, -1]
        for of_request, of_rows in zip(tokens, paths, strict=True)
        for path in of_rows
    ]
    wanted = torch.stack(logits).view(*size, -1)
    model.set_attn_implementation(ATTENTION_NAME)
    seen = torch.tensor([[[row in path for row in rows] for path in of_rows] for of_rows in paths])
    capture = tuple(range(len(layers_of(model)) + 1))
    for replacements in ({}, find_replacements(model)):
        trial = TrialAttention(seen.sum(2) - 1, seen)
        body = TransformersModel(copy.deepcopy(model), replacements, capture)
        hidden, inputs = body.run(tokens.flip(1), trial.positions, trial)
        require_one_call_each(layers_of(body.model), trial.modules)
        difference = float((body.logits(hidden) - wanted).abs().max() / wanted.abs().max())
        if difference > TOLERANCE:
            raise EspalierError(
                "its rows do not see just the rows before them, at the positions that they are given: a tree's logits "
                f"differ from the plain model's by {difference:.1e} of the largest"
            )
    shape = (*size, model.config.hidden_size)
    return replacements, all(i in inputs and inputs[i].shape == shape for i in capture)


def _path_to_root(parents: Sequence[int], row: int) -> list[int]:
    return [] if row < 0 else [*_path_to_root(parents, parents[row]), row]
