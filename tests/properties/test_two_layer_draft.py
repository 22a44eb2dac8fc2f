"""A draft of two layers that only this file knows: its format is registered here, and every property holds of it.

Nothing of the package names it, so what sizes its rows, feeds it and runs it are its declaration alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from espalier.attention import Pass
from espalier.config import EngineConfig, SpeculationConfig
from espalier.errors import EspalierError
from espalier.layout import TreeShape
from espalier.models import CausalLM, DraftModel, DraftOutput, DraftSpec, ModelConfig
from espalier.models.config import Json, parse_config
from espalier.models.families import FAMILIES
from espalier.models.layer_loading import layer_specs_of, load_layer
from espalier.models.layers.linear import Linear
from espalier.models.layers.residual import Residual
from espalier.models.rope import RopeTables
from espalier.models.weight_formats import dense_weight
from espalier.models.weights import Weights
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter
from espalier.speculate.drafters.base import DraftFormat
from espalier.speculate.drafters.registry import DRAFT_FORMATS
from espalier.startup import load
from tests.checkpoints import load_pair
from tests.folders import new_folder
from tests.harness import CPU, DTYPE, MAX_POSITIONS, Setup, directories, prompts, request, run
from tests.oracles.reference_round import Reference
from tests.pairwise import fewest_params, pairwise
from tests.properties.layouts import AROUND, Cell, impossible
from tests.properties.watch import PROPOSAL, Watch, run_watched

NAME, ARCHITECTURE = "two-layer", "TwoLayerToyDraft"
HIDDEN, DRAFT_WINDOW = 32, 5
# What feeds the first layer: the inputs of two target layers, or the last hidden state before or after the final norm.
READS = ("captured", "before_norm", "after_norm")


@dataclass(frozen=True)
class ToyConfig:
    layer: ModelConfig
    spec: DraftSpec


def read(path: Path, raw: Json, target: ModelConfig) -> ToyConfig:
    layer = parse_config(raw, FAMILIES["LlamaForCausalLM"], path)
    first, second = layer_specs_of(layer)
    captures = {"captured": (0, 2), "before_norm": (target.num_layers,), "after_norm": ()}
    spec = DraftSpec(
        algorithm=NAME,
        layer_specs=(first, replace(second, window=raw["second_window"])),
        target_output="hidden" if raw["reads"] == "after_norm" else "captured",
        captured_layers=captures[raw["reads"]],
        num_modules=1,
        hidden_size=layer.hidden_size,
        vocab_size=raw["draft_vocab_size"],
    )
    return ToyConfig(layer, spec)


class ToyDraft:
    """join(embedding of token q, hidden that feeds it), then two decoder layers; what it hands on is not normed."""

    has_experts = False

    def __init__(self, weights: Weights, config: ToyConfig, target: CausalLM, position_rows: int) -> None:
        layer, self.spec, self.layer_specs = config.layer, config.spec, config.spec.layer_specs
        size, fed = layer.hidden_size, max(len(self.spec.captured_layers), 1) * target.config.hidden_size
        self.fuse = weights.linear("", ("fuse",), (size,), fed, False)
        self.join = weights.linear("", ("join",), (size,), 2 * size, False)
        self.rope = RopeTables(layer.rope, position_rows, weights.dtype, weights.device)
        self.layers = [load_layer(weights, layer, f"layers.{i}.", i, self.rope) for i in range(len(self.layer_specs))]
        self.norm = weights.norm("norm", size, layer.rms_norm_eps)
        self.embed, self.head, self.d2t = target.embed, target.head, None
        if self.spec.vocab_size != layer.vocab_size:
            self.head = Linear(dense_weight(weights.load("lm_head.weight", self.spec.vocab_size, size)))
            self.d2t = weights.load_raw("d2t", self.spec.vocab_size)
        self.modules = (self,)
        weights.require_all_used()

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        if parents is not None:
            hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[2]))
        s = Residual(self.join(torch.cat((self.embed(p, self.rope).x, hidden.flatten(0, 1)), 1)))
        for block in self.layers:
            block(s, p)
        return DraftOutput(*s.final_norm(self.norm, p.out_shape))

    def output_from_hidden(self, hidden: Tensor) -> DraftOutput:
        return DraftOutput(hidden, self.norm(hidden))

    def logits(self, out: DraftOutput) -> Tensor:
        return self.head(out.normed)


FORMAT = DraftFormat(
    algorithm=NAME,
    title="two-layer toys",
    architectures=(ARCHITECTURE,),
    speculators_types=("toy",),
    read=read,
    make=ToyDraft,
    drafter=AutoregressiveDrafter,
)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRAFT_FORMATS, NAME, FORMAT)
        yield


def write(path: Path, target: Path, reads: str, draft_vocab: int | None) -> Path:
    """A directory with random weights, float64, for the target at `target`."""
    raw = json.loads((target / "config.json").read_text())
    vocab = draft_vocab or raw["vocab_size"]
    fields = {
        **{name: raw[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")},
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 2,
        "draft_vocab_size": vocab,
        "reads": reads,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "second_window": DRAFT_WINDOW,
    }
    kv, inner = (16, HIDDEN), fields["intermediate_size"]
    block = {
        **{f"self_attn.{name}_proj": shape for name, shape in zip("qkvo", ((32, 32), kv, kv, (32, 32)), strict=True)},
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()},
        "fuse": (HIDDEN, HIDDEN * (2 if reads == "captured" else 1)),
        "join": (HIDDEN, 2 * HIDDEN),
        "norm": (HIDDEN,),
    }
    if draft_vocab is not None:
        shapes["lm_head"] = (draft_vocab, HIDDEN)
    generator = torch.Generator().manual_seed(7)
    weights = {f"{name}.weight": drawn(shape, generator) for name, shape in shapes.items()}
    if draft_vocab is not None:
        weights["d2t"] = torch.randperm(fields["vocab_size"], generator=generator)[:draft_vocab]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields))
    save_file(weights, path / "model.safetensors")
    return path


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Wide, so that logits spread; norms around 1."""
    values = torch.randn(shape, generator=generator, dtype=DTYPE)
    return 1 + 0.2 * values if len(shape) == 1 else 1.3 * values / shape[1] ** 0.5


@lru_cache
def paths(family: str, window: int | None, draft_vocab: int | None, reads: str) -> tuple[Path, Path]:
    root = new_folder("toy-")
    target, _ = directories(family, window=window)
    return target, write(root / "draft", target, reads, draft_vocab)


@lru_cache
def toy_models(
    family: str, window: int | None, draft_vocab: int | None, reads: str, position_rows: int
) -> tuple[CausalLM, DraftModel]:
    target_path, draft_path = paths(family, window, draft_vocab, reads)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": position_rows}
    return load_pair(target_path, draft_path, **how)


@dataclass(frozen=True)
class ToySetup(Setup):
    algorithm: str = NAME
    reads: str = "captured"

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        if self.algorithm != NAME:
            return super().models(position_rows)
        return toy_models(self.family, self.window, self.draft_vocab, self.reads, position_rows)


@lru_cache
def reference(family: str, window: int | None, draft_vocab: int | None, reads: str) -> Reference:
    return Reference(*toy_models(family, window, draft_vocab, reads, MAX_POSITIONS))


def watched(setup: ToySetup) -> Watch:
    return Watch(setup.engine(), NAME, reference(setup.family, setup.window, setup.draft_vocab, setup.reads))


# Fewer sizes than tests/properties/layouts.py: the layouts are not this draft's, but what it reads and keeps is.
SIZES = {"page_size": (1, 64), "topk": (1, 3), "steps": (1, 5), "nodes": ("2", "bound"), "batch": (1, 3)}
FACTORS = {
    "reads": READS,
    **SIZES,
    **{name: values for name, values in AROUND.items() if name not in ("algorithm", "kv", "sinks")},
    # Whether the target's rows are latent reaches the draft; which family they are of does not.
    "keeps": ("kv", "latent"),
}


# Pairs of sizes, and of what is around, meet in test_layouts.py.
@pytest.mark.parametrize("row", fewest_params(pairwise(FACTORS, impossible)))
def test_every_property_holds(row: dict[str, Any]):
    reads, cell = row["reads"], Cell(**{name: value for name, value in row.items() if name != "reads"})
    run_watched(watched(ToySetup(**{**vars(cell.setup), "algorithm": NAME, "reads": reads})), cell.traffic)


SMALL = ToySetup(steps=3, topk=2, num_draft_tokens=9, page_size=2, max_batch=3, max_context=64, chunk_size=16)
disturbed = pytest.mark.parametrize(
    ("reads", "overlap"), [pytest.param("captured", False, marks=pytest.mark.full), ("after_norm", True)]
)


def asked(index: int, prompt: list[int], **style: Any) -> Request:
    return request(index, prompt, SamplingParams(**{"temperature": 3.0, "max_tokens": 8, **style}))


@disturbed
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_prefix_hit_is_entered_again_for_both_layers(page_size, reads, overlap):
    watch = watched(replace(SMALL, page_size=page_size, reads=reads, overlap=overlap))
    trunk = prompts(29, [9])[0]
    branches = [[*trunk[:kept], (trunk[kept] + 1) % 16, *trunk[kept + 1 :]] for kept in range(len(trunk))]
    requests = [asked(i, prompt, max_tokens=4) for i, prompt in enumerate([trunk, *branches, trunk])]
    run_watched(watch, requests[:1], last=False)
    run_watched(watch, requests[1:])
    assert sum(r.cached_tokens for r in requests) >= 9


# That pages and requests are put back is the engine's: test_states.py has it.
@pytest.mark.full
@disturbed
def test_preempted_and_chunked_requests_are_as_if_undisturbed(reads, overlap):
    watch = watched(replace(SMALL, reads=reads, overlap=overlap, num_pages=26, max_context=40))
    style = {"max_tokens": 20, "presence_penalty": 0.6}
    run_watched(watch, [asked(i, prompt, **style) for i, prompt in enumerate(prompts(31, [5, 19, 7, 12]))])
    assert watch.engine.scheduler.num_preempted > 0


def test_a_tree_a_batch():
    setup = replace(SMALL, trees=((2, TreeShape(2, 2, 5)), (3, TreeShape(0, 1, 1))))
    watch = watched(setup)
    # The brute-force tree knows one shape; what is proposed in the others, the tokens and the rows show.
    watch.properties -= {PROPOSAL}
    run_watched(watch, [asked(i, p, max_tokens=6 + 5 * i) for i, p in enumerate(prompts(5, [4, 6, 5]))])


def test_a_user_names_the_directory_alone():
    """From config.json to text: found, sized, loaded and run by what the draft declares."""
    target, draft = paths("llama", None, None, "captured")
    config = EngineConfig(model=target, draft=draft, device="cpu", dtype="float64", max_context=64, num_pages=40)
    found = load.find_checkpoint(config)
    resolved = load.resolve_config(config, found)
    assert (resolved.algorithm, resolved.layout.num_recomputed_tokens, len(found.spec.layer_specs)) == (NAME, 1, 2)
    engine, _ = load.build_engine(resolved, found, None)
    ran, plain = ([request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))] for _ in range(2))
    assert run(engine, ran).stats.accepted > 0
    assert [r.output for r in ran] == run(SMALL.plain().engine(), plain).tokens


def test_what_it_is_not_is_refused():
    target, draft = paths("llama", None, None, "captured")
    named = EngineConfig(model=target, draft=draft, speculation=SpeculationConfig(algorithm="eagle3"))
    with pytest.raises(EspalierError, match="algorithm='eagle3' is set, but the draft is for 'two-layer'"):
        load.find_checkpoint(named)
    with pytest.raises(EspalierError, match=r"is not a known draft.*; supported are EAGLE-3 .*; two-layer toys \(Two"):
        load.find_checkpoint(EngineConfig(model=target, draft=target))


@pytest.mark.parametrize("change", [{"num_modules": 0}, {"num_modules": 3}, {"layer_specs": ()}], ids=str)
def test_layers_that_no_module_holds_are_refused(change):
    _, draft = SMALL.models(SMALL.layout.position_rows)
    with pytest.raises(EspalierError, match="use 1 to 16 modules with equally many layers"):
        replace(draft.spec, **change)
