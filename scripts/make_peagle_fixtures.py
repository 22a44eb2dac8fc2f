"""Make tests/fixtures/peagle: what the `speculators` package computes for small random P-EAGLE heads.

A script for maintainers; tests do not need the package.  In a separate environment:

    pip install speculators
    python scripts/make_peagle_fixtures.py tests/fixtures/peagle

The package has only a training pass.  It runs all rows of the text once, and mask rows behind rows that it draws; here
these are the roots of two rounds.  A hook records what its head says of them.
"""

import argparse
import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from make_eagle3_fixtures import HIDDEN, SHAPE, VOCAB, make_target, randomise
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig

DRAFT_VOCAB, STEPS, MASK, LENGTH = 10, 5, 7, 16
# The root tokens of the two rounds.
ROOTS = (6, 9)
CASES: dict[str, dict[str, Any]] = {
    "llama": {"layers": 4},
    "one_layer": {"layers": 1, "draft_vocab_size": VOCAB},
    "qwen3": {"layers": 2, "model_type": "qwen3", "norm_before_residual": True},
    "fc_norm": {"layers": 2, "fc_norm": True, "norm_output": True},
    "norm_before_fc": {"layers": 2, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 6]},
    "slides": {
        "layers": 2,
        "model_type": "qwen3",
        "layer": {
            "sliding_window": STEPS + 1,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
}


def make_head(path: Path, case: dict[str, Any], seed: int) -> PEagleDraftModel:
    options = {name: value for name, value in case.items() if name not in ("layers", "model_type", "layer")}
    kind = case.get("model_type", "llama")
    layer = AutoConfig.for_model(kind, **SHAPE, num_hidden_layers=case["layers"], **case.get("layer", {}))
    layer._attn_implementation = "eager"  # its flex attention needs multiples of 128 tokens
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **{"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], **options},
    )
    model = PEagleDraftModel(config).eval()
    randomise(model, seed)
    if config.draft_vocab_size != VOCAB:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
        model.load_vocab_mappings(known, ids - torch.arange(DRAFT_VOCAB))
    model.save_pretrained(path)
    (path / "config.py").unlink(missing_ok=True)  # the package's own source
    return model


def run(model: PEagleDraftModel, target: Any) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    ids = list(model.config.eagle_aux_hidden_state_layer_ids)
    captured = torch.cat([target(tokens, output_hidden_states=True).hidden_states[i] for i in ids], dim=-1)
    # Row i is (token i + 1, feature i), so the root's row is one below its token.
    rows = torch.tensor([root - 1 for root in ROOTS])
    depths = torch.arange(1, STEPS).repeat_interleave(len(ROOTS))
    drawn = torch.cat((torch.arange(LENGTH), rows.repeat(STEPS - 1))), torch.cat((torch.zeros(LENGTH).long(), depths))
    core.generate_cod_sample_indices = lambda **_: drawn
    core.compute_metrics = lambda **_: (torch.zeros(()), {})  # no loss is needed
    said: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: said.append(output[0]))
    model(
        hidden_states=captured[:, :-1],
        input_ids=tokens[:, 1:],
        document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, LENGTH, HIDDEN),
    )
    made = {"tokens": tokens, "captured": captured, "ids": torch.tensor(ids)}
    for number, row in enumerate(rows):
        made[f"logits.{number}"] = said[0][[int(row), *range(LENGTH + number, len(said[0]), len(ROOTS))]]
    assert all(value.isfinite().all() for value in made.values())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    for stale in (out / name for name in ("target", *CASES)):
        shutil.rmtree(stale, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    target = make_target(out / "target")
    with torch.no_grad():
        for seed, (name, case) in enumerate(CASES.items(), start=10):
            save_file(run(make_head(out / name, case, seed), target), out / name / "expected.safetensors")
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
    (out / "origin.json").write_text(
        json.dumps({"versions": versions, "roots": ROOTS, "cases": CASES}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
