"""Make tests/fixtures/eagle3: the results of the `speculators` package for small random EAGLE-3 heads.

A script for maintainers; tests do not need the package.  In a separate environment:

    pip install speculators
    python scripts/make_eagle3_fixtures.py tests/fixtures/eagle3

The package's Eagle3DraftModel runs two chained steps on each checkpoint.  Forward hooks record its logits and the
features that it passes on.  Its first features are transformers' hidden_states of a small random target, at the layer
ids that the package chose.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

VOCAB, HIDDEN, LAYERS, DRAFT_VOCAB, LENGTH = 24, 16, 8, 10, 9
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PLAIN = {"norm_before_residual": False, "own_head": True, "layer_ids": None}
CASES: dict[str, dict[str, Any]] = {
    f"residual_{residual}_norm-{head}_head-{ids}_ids": {
        "norm_before_residual": residual == "after",
        "own_head": head == "own",
        "layer_ids": [1, 3, 6] if ids == "explicit" else None,
    }
    for residual in ("before", "after")
    for head in ("own", "borrowed")
    for ids in ("default", "explicit")
} | {
    "norm_output": {**PLAIN, "norm_output": True},
    "norm_before_fc": {**PLAIN, "norm_before_fc": True},
    "fc_norm": {**PLAIN, "fc_norm": True},
    "four_layers": {**PLAIN, "layer_ids": [0, 2, 4, 7]},
    "qwen3_layer": {**PLAIN, "model_type": "qwen3"},
    "eagle3_1": {**PLAIN, "fc_norm": True, "norm_output": True},
}


def draw(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.3 * drawn
    return drawn if "embed" in name else drawn * 1.3 / shape[-1] ** 0.5


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape, generator))


def make_target(path: Path) -> Any:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    )
    randomise(model, seed=1)
    model.save_pretrained(path)
    return model.eval()


def make_checkpoint(path: Path, case: dict[str, Any], seed: int) -> None:
    """Save a head with the package, then remove the tensors that it borrows from the target."""
    options = {name: case[name] for name in ("norm_output", "norm_before_fc", "fc_norm") if name in case}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=AutoConfig.for_model(case.get("model_type", "llama"), **SHAPE, num_hidden_layers=1),
        draft_vocab_size=DRAFT_VOCAB if case["own_head"] else VOCAB,
        norm_before_residual=case["norm_before_residual"],
        eagle_aux_hidden_state_layer_ids=case["layer_ids"],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = Eagle3DraftModel(config)
    randomise(model, seed)
    if case["own_head"]:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
        model.load_vocab_mappings(known, ids - torch.arange(DRAFT_VOCAB))
    model.save_pretrained(path)
    (path / "config.py").unlink(missing_ok=True)  # the package's own source
    borrowed = {"embed_tokens.weight"} | (set() if case["own_head"] else {"lm_head.weight"})
    weights = {name: value for name, value in load_file(path / "model.safetensors").items() if name not in borrowed}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def restore_borrowed(model: Eagle3DraftModel, path: Path) -> None:
    """Let the package load the missing tensors from the target.

    It recognises them by NaN, but with transformers 5.19 from_pretrained leaves uninitialised memory instead.
    """
    missing = {"embed_tokens.weight", "lm_head.weight"} - set(load_file(path / "model.safetensors"))
    for name, parameter in model.named_parameters():
        if name in missing:
            torch.nn.init.constant_(parameter, torch.nan)
    model.load_verifier_weights()


def run(path: Path, target: Any) -> tuple[dict[str, Tensor], list[int]]:
    """(tensors, layer ids) of two chained steps of the package's model: its inputs, and each step's logits and
    passed-on features."""
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # its flex attention needs multiples of 128 tokens
    model = Eagle3DraftModel.from_pretrained(path, config=config).eval()
    restore_borrowed(model, path)
    ids = list(model.config.eagle_aux_hidden_state_layer_ids)
    kept: dict[str, list[Tensor]] = {"logits": [], "handed_on": []}
    model.lm_head.register_forward_hook(lambda _, inputs, output: kept["logits"].append(output))
    # With norm_output the package passes the normed output on, which its head reads too.
    source = model.norm if model.config.norm_output else model.layers[-1]
    source.register_forward_hook(lambda _, inputs, output: kept["handed_on"].append(output))
    tokens = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        captured = torch.cat([target(tokens, output_hidden_states=True).hidden_states[i] for i in ids], dim=-1)
        # A row is (token at p + 1, feature at p).  The second step reads tokens that are shifted by one more.
        model(
            hidden_states=captured[:, :-1],
            input_ids=tokens[:, 1:],
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            ttt_steps=2,
        )
    tensors = {"tokens": tokens, "captured": captured}
    for step in range(2):
        tensors |= {f"{name}.{step}": values[step].contiguous() for name, values in kept.items()}
    assert all(t.isfinite().all() for t in tensors.values())
    return tensors, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    for stale in (out / name for name in ("target", *CASES)):
        shutil.rmtree(stale, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # the heads' configs name the verifier by the relative path "target"
    target = make_target(Path("target"))
    cases = {}
    for seed, (name, case) in enumerate(CASES.items(), start=10):
        make_checkpoint(Path(name), case, seed)
        tensors, ids = run(Path(name), target)
        save_file(tensors, Path(name) / "expected.safetensors")
        cases[name] = {**case, "resolved_layer_ids": ids}
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
    Path("origin.json").write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
