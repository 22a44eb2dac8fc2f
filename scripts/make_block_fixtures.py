"""Make tests/fixtures/block: what the code that defines the forms of block drafts computes for small random drafts.

A script for maintainers; tests need none of it.  In a separate environment:

    pip install speculators && pip install --no-deps dflash
    python scripts/make_block_fixtures.py tests/fixtures/block --zlab FILE --jetspec FILE --deepspec FOLDER

--zlab: dflash/model.py of z-lab/dflash; --jetspec: jetspec/models/draft_head.py of hao-ai-lab/JetSpec; --deepspec: a
checkout of deepseek-ai/DeepSpec.  DFlash 2 is read from z-lab's package `dflash`.  --cases: make these folders only;
only their code is needed.

Each draft runs two rounds: a block behind the first tokens, then one behind more of them, in which the publishers' own
caches hold the first round's context.  The package `speculators` has only a training pass, which runs both blocks at
once, at chosen anchors.  Features are transformers' hidden_states of a small random target.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config

VOCAB, HIDDEN, LAYERS, DRAFT_LAYERS, DRAFT_VOCAB, BLOCK, MASK, RANK = 24, 16, 8, 2, 10, 5, 7, 3
# The roots of the two rounds, and the tokens of the text.
ANCHORS, LENGTH = (6, 9), 16
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SLIDES = {
    "sliding_window": 3,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
MARKOV, GATED, RNN = ({"markov_rank": RANK, "markov_head_type": kind} for kind in ("vanilla", "gated", "rnn"))
SIZES2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": 6}
ZLAB2 = {"target_layer_ids": [1, 4], "mask_token_id": MASK, "block_size": BLOCK, **SIZES2}
SCALES2 = {"output_multiplier": 0.6, "final_logit_softcapping": 2.0, "input_embedding_scale": 1.7}
# source: whose code; the rest are fields of config.json, and of its layers.  A case's place is its seed, so new cases
# come last.
CASES: dict[str, dict[str, Any]] = {
    "zlab": {"source": "zlab", "dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": MASK}},
    "zlab_default_layers": {"source": "zlab", "dflash_config": {"mask_token_id": MASK}},
    "zlab_one_layer": {"source": "zlab", "dflash_config": {"mask_token_id": MASK}, "num_hidden_layers": 1},
    "jetspec_causal": {
        "source": "jetspec",
        "dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": MASK, "causal_head": True},
    },
    "deepspec_dspark": {"source": "deepspec", "target_layer_ids": [1, 4], **MARKOV},
    "deepspec_embedding": {"source": "deepspec", "target_layer_ids": [-1, 2, 5], **MARKOV},
    "deepspec_confidence": {"source": "deepspec", "target_layer_ids": [1, 4], **MARKOV, "enable_confidence_head": True},
    "deepspec_dflash": {"source": "deepspec", "target_layer_ids": [1, 4], "markov_rank": 0},
    "speculators_dflash": {"source": "dflash"},
    "speculators_reduced": {"source": "dflash", "draft_vocab_size": DRAFT_VOCAB},
    "speculators_anchor": {"source": "dflash", "sample_from_anchor": True},
    "speculators_slides": {"source": "dflash", "layer": SLIDES},
    "speculators_slides_non_causal": {"source": "dflash", "layer": SLIDES, "sliding_window_non_causal": True},
    "speculators_dspark": {"source": "dspark", **MARKOV, "draft_vocab_size": DRAFT_VOCAB},
    "speculators_dspark_mask": {"source": "dspark", **MARKOV, "sample_from_anchor": False, "layer": SLIDES},
    "zlab2": {"source": "zlab2", "dflash_config": ZLAB2},
    "zlab2_scaled": {"source": "zlab2", "dflash_config": {**ZLAB2, **SCALES2, "conv_kernel_size": 3}},
    "zlab2_slides": {
        "source": "zlab2",
        "dflash_config": ZLAB2,
        "layer": {**SLIDES, "sliding_window": BLOCK},
        "is_causal": False,
    },
    "zlab2_slides_causal": {"source": "zlab2", "dflash_config": ZLAB2, "layer": SLIDES},
    "speculators_dflash2": {"source": "dflash2", **SIZES2},
    "speculators_dflash2_slides": {"source": "dflash2", **SIZES2, "layer": SLIDES},
    "speculators_dflash2_anchor": {"source": "dflash2", **SIZES2, "conv_kernel_size": 3, "sample_from_anchor": True},
    "deepspec_gated": {"source": "deepspec", "target_layer_ids": [1, 4], **GATED},
    "deepspec_rnn": {"source": "deepspec", "target_layer_ids": [1, 4], **RNN},
    "speculators_dspark_gated": {"source": "dspark", **GATED},
    "speculators_dspark_rnn": {"source": "dspark", **RNN, "draft_vocab_size": DRAFT_VOCAB},
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                drawn = 1 + 0.3 * drawn
            elif "embed" not in name and "markov_w1" not in name:
                drawn = drawn * 1.3 / parameter.shape[-1] ** 0.5
            parameter.copy_(drawn)


def make_target(path: Path) -> Any:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, bos_token_id=None, eos_token_id=None)
    )
    randomise(model, seed=1)
    model.save_pretrained(path)
    return model.eval()


def imported(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def block_ids(tokens: Tensor, anchor: int) -> Tensor:
    ids = torch.full((1, BLOCK), MASK)
    ids[0, 0] = tokens[0, anchor]
    return ids


def features(target: Any, tokens: Tensor, layers: list[int]) -> Tensor:
    """[1, n, F]: entries `layers` of transformers' hidden_states."""
    states = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[i] for i in layers], -1)


class Published:
    """A publisher's model with a cache, as its own decoding loop calls it."""

    def __init__(self, model: Any, embed: Any, head: Any) -> None:
        self.model, self.embed, self.head = model, embed, head
        self.cache = DynamicCache()

    def round(self, tokens: Tensor, captured: Tensor, anchor: int) -> Tensor:
        """[block, H]: the output of a block; the cache keeps the context."""
        seen = self.cache.get_seq_length()
        positions = torch.arange(seen, anchor + BLOCK)[None]
        fed = {
            "noise_embedding": self.embed(block_ids(tokens, anchor)),
            "position_ids": positions,
            "attention_mask": None,
        }
        fed |= {"past_key_values": self.cache, "use_cache": True}
        context = captured[:, seen:anchor]
        if hasattr(self.model, "candidate_selector"):
            fed["noise_embedding"] = fed["noise_embedding"] * self.model.config.dflash_config.get(
                "input_embedding_scale", 1.0
            )
            hidden = self.model(target_hidden=context, **fed)
        elif hasattr(self.model, "_forward_backbone"):
            hidden = self.model._forward_backbone(target_hidden_states=context, is_causal=False, **fed)
        elif getattr(self.model, "causal_head", False):
            hidden = self.model(target_hidden=context, is_causal=True, **fed)
        else:
            hidden = self.model(target_hidden=context, is_causal=False, **fed)
        self.cache.crop(anchor)
        return hidden[0]


def run_published(case: dict[str, Any], path: Path, target: Any, model_class: Any, seed: int) -> dict[str, Tensor]:
    fields = {name: value for name, value in case.items() if name not in ("source", "layer")}
    layers = fields.pop("num_hidden_layers", DRAFT_LAYERS)
    layer = case.get("layer", {})
    config = Qwen3Config(**SHAPE, num_hidden_layers=layers, bos_token_id=None, eos_token_id=None, **layer)
    config.block_size, config.num_target_layers, config._attn_implementation = BLOCK, LAYERS, "eager"
    is_deepspec = case["source"] == "deepspec"
    if is_deepspec:
        fields = {"enable_confidence_head": False, "confidence_head_with_markov": True, "num_anchors": 2, **fields}
        fields["mask_token_id"] = MASK
    for name, value in fields.items():
        setattr(config, name, value)
    model = model_class(config).eval()
    randomise(model, seed)
    config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    if case["source"] == "zlab2":
        as_published(path)
    own = model if is_deepspec else None
    embed = model.embed_tokens if own else target.model.embed_tokens
    head = model.lm_head if own else target.lm_head
    published, first = Published(model, embed, head), 0 if is_deepspec else 1
    tokens = random_tokens()
    ids = [0 if i == -1 else i + 1 for i in model.target_layer_ids]
    captured = features(target, tokens, ids)
    made = {"tokens": tokens, "captured": captured, "ids": torch.tensor(ids)}
    for number, anchor in enumerate(ANCHORS):
        hidden = published.round(tokens, captured, anchor)[first:]
        made[f"logits.{number}"] = head(hidden)
        if case["source"] == "zlab2":
            made[f"logits.{number}"] = model.compute_logits(hidden, head)
            made |= selected(model, tokens[:, anchor], hidden, head, number)
        if getattr(model, "markov_head", None) is not None:
            drafted, edged = model.sample_draft_tokens(
                head(hidden)[None], first_prev_token_ids=tokens[:, anchor], hidden_states=hidden[None]
            )
            made[f"before.{number}"] = torch.cat((tokens[:, anchor], drafted[0, :-1]))
            made[f"edged.{number}"] = edged[0]
    return made


def as_published(path: Path) -> None:
    """Name the codebooks as in z-lab's files; the class names them otherwise and renames when it loads."""
    stored = load_file(path / "model.safetensors")
    renamed = {name.replace("codebook.weight", "codebook"): value for name, value in stored.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def selected(model: Any, root: Tensor, hidden: Tensor, head: Any, number: int) -> dict[str, Tensor]:
    """The tokens before each depth on a sampled path, and the log-probabilities of the selector's candidates."""
    torch.manual_seed(number)
    path, ids, probabilities = model.propose(hidden[None], root, head, temperature=1.0)
    before = torch.cat((root, path[0, :-1]))
    return {f"before.{number}": before, f"edged.{number}": scattered(ids[0], probabilities[0].log())}


def scattered(ids: Tensor, scores: Tensor) -> Tensor:
    """[depths, vocabulary]: the scores of candidates, -inf for other tokens."""
    return scores.new_full((len(ids), VOCAB), -torch.inf).scatter(1, ids, scores)


def random_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(5))


def run_speculators(case: dict[str, Any], path: Path, target: Any, seed: int) -> dict[str, Tensor]:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    kinds = {
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
        "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    }
    model_class, config_class = kinds[case["source"]]
    fields = {name: value for name, value in case.items() if name not in ("source", "layer")}
    layer = Qwen3Config(
        **SHAPE, num_hidden_layers=DRAFT_LAYERS, bos_token_id=None, eos_token_id=None, **case.get("layer", {})
    )
    layer._attn_implementation = "eager"
    ids = [2, 5]
    config = config_class(
        transformer_layer_config=layer,
        block_size=BLOCK,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=ids,
        speculators_config=SpeculatorsConfig(
            algorithm=case["source"],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **{"draft_vocab_size": VOCAB, **fields},
    )
    model = model_class(config).eval()
    randomise(model, seed)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(target.lm_head.weight)
    if model.use_draft_vocab:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[kept] = True
        model.load_vocab_mappings(known, kept - torch.arange(DRAFT_VOCAB))
    model.save_pretrained(path)
    (path / "config.py").unlink(missing_ok=True)  # the package's own source
    tokens = random_tokens()
    captured = features(target, tokens, ids)
    anchors = torch.tensor(ANCHORS)
    core.select_anchors = lambda *_: (anchors, torch.ones(len(ANCHORS), dtype=torch.bool))
    hidden, logits, *_, places = model._backbone_forward(
        captured,
        tokens,
        torch.ones(1, LENGTH),
        torch.zeros(1, LENGTH, HIDDEN),
        torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=len(ANCHORS),
    )
    first = 0 if config.sample_from_anchor else 1
    made = {"tokens": tokens, "captured": captured, "ids": torch.tensor(ids)}
    for number, anchor in enumerate(ANCHORS):
        rows = slice(number * BLOCK + first, (number + 1) * BLOCK)
        made[f"logits.{number}"] = logits[0, rows]
        if case["source"] == "dflash2":
            before = model._predecessor_ids(tokens, places).flatten()[rows]
            ids, scores = model.candidate_selector.select(logits[0, rows], hidden[0, rows], before)
            made[f"before.{number}"], made[f"edged.{number}"] = before, scattered(ids, scores)
        if getattr(model, "markov_head", None) is not None:
            # The training pass is fed the text, so the token before depth d is the text's.
            before = tokens[0, anchor : anchor + BLOCK - first]
            bias = model.markov_head.block_bias(prev_token_ids=before[None], hidden_states=hidden[0, rows][None])
            made[f"before.{number}"], made[f"edged.{number}"] = before, logits[0, rows] + bias[0]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name in ("zlab", "jetspec", "deepspec"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    sys.path.insert(0, str(args.deepspec))
    model_classes = {
        "zlab": lambda: imported("zlab_dflash", args.zlab).DFlashDraftModel,
        "zlab2": lambda: importlib.import_module("dflash.model").DFlash2DraftModel,
        "jetspec": lambda: imported("jetspec_head", args.jetspec).DFlashDraftModel,
        "deepspec": lambda: importlib.import_module("deepspec.modeling.dspark.qwen3").Qwen3DSparkModel,
    }
    for stale in (args.out / name for name in ("target", *args.cases)):
        shutil.rmtree(stale, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    target = make_target(args.out / "target")
    with torch.no_grad():
        for seed, (name, case) in enumerate(CASES.items(), start=10):
            if name not in args.cases:
                continue
            path = args.out / name
            run = (
                run_published(case, path, target, model_classes[case["source"]](), seed)
                if case["source"] in model_classes
                else run_speculators(case, path, target, seed)
            )
            assert not any(value.isnan().any() for value in run.values()), name
            save_file({key: value.clone() for key, value in run.items()}, path / "expected.safetensors")
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "dflash", "transformers", "torch")}
    origin = {"versions": versions, "anchors": ANCHORS, "cases": CASES}
    (args.out / "origin.json").write_text(json.dumps(origin, indent=1) + "\n")


if __name__ == "__main__":
    main()
