"""Gemma 4's assistants: the logits of transformers' own, and trees that change no token."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from espalier.config import FP8_KV
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.models import load_target, read_config
from espalier.models.base import CausalLM
from espalier.models.gemma4_assistant import Assistant
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters.registry import load_draft, read_draft
from espalier.startup.build import LoadedModels, assemble_engine, cache_specs
from tests.builders import draw_weights, make_target
from tests.harness import CPU, DTYPE, MAX_POSITIONS, VOCAB, Setup, new_folder, prompts, request, run
from tests.models.reference import in_float64, load_reference

WINDOW = 5
CHAIN = Setup(algorithm="assistant", steps=3, topk=1, num_draft_tokens=4)


def make_assistant(path: Path, target: Path, ordered: bool = False, **changes: Any) -> Path:
    """A random assistant of two layers, one of each kind, with the heads of this target's layers."""
    of_target = json.loads((target / "config.json").read_text())
    sizes = {name: of_target[name] for name in ("num_key_value_heads", "head_dim", "sliding_window")}
    full_layer = of_target["layer_types"].index("full_attention")
    own = {int(layer): each for layer, each in (of_target.get("per_layer_config") or {}).items()}
    of_full = own.get(full_layer)
    text = Gemma4TextConfig(
        **{**sizes, **changes},
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
        rope_parameters=of_target["rope_parameters"],
        per_layer_config={"1": of_full} if of_full else None,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=of_target["hidden_size"],
        use_ordered_embeddings=ordered,
        num_centroids=4,
        centroid_intermediate_top_k=2,
    )
    model = Gemma4AssistantForCausalLM(config).double()
    draw_weights(model, 3)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(path)
    return path


@lru_cache
def pair(family: str, ordered: bool = False) -> tuple[Path, Path]:
    root = new_folder("assistant-")
    target = make_target(root / "target", family=family, vocab=VOCAB, sliding_window=WINDOW)
    return target, make_assistant(root / "draft", target, ordered)


@lru_cache
def loaded(family: str, ordered: bool = False) -> tuple[CausalLM, Assistant]:
    target_path, path = pair(family, ordered)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": MAX_POSITIONS}
    target = load_target(target_path, **how)
    return target, load_draft(path, target, **how)


@dataclass
class Led:
    """Notes a draft's logits, and proposes what the target will say: of every second round, but for the last depth."""

    score: Any
    asked: Request
    output: list[int]
    steps: int
    seen: list[tuple[list[int], Tensor]] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        logits, rounds = self.score(x), len(self.seen) // self.steps
        known, depth = len(self.asked.output), len(self.seen) % self.steps
        self.seen.append((self.output[: known + depth], logits[0, 0]))
        token = self.output[known + depth]
        if rounds % 2 and depth == self.steps - 1:
            token = (token + 1) % VOCAB
        return 9.0 * one_hot(torch.tensor([[token]]), VOCAB).to(logits.dtype)


def an_engine(setup: Setup, family: str, ordered: bool = False) -> Engine:
    target, draft = loaded(family, ordered)
    return assemble_engine(LoadedModels(setup.config(), target, copy.copy(draft) if setup.steps else None))


@lru_cache
def references(family: str, ordered: bool) -> tuple[Any, Any]:
    target, path = pair(family, ordered)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(path, dtype=DTYPE).to(DTYPE).eval()
    return load_reference(target, DTYPE), in_float64(assistant)


def reference_logits(family: str, ordered: bool, text: Sequence[int], drafted: Sequence[int]) -> list[Tensor]:
    """Behind `text`, whose last token is the root, and then each drafted token: as transformers computes them."""
    target, assistant = references(family, ordered)
    found = []
    with torch.no_grad():
        out = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        hidden = out.hidden_states[-1][:, -1:]
        for token in (text[-1], *drafted):
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            given = assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=out.shared_kv_states,
            )
            found.append(given.logits[0, 0])
            hidden = given.last_hidden_state
    return found


@pytest.mark.parametrize(
    ("family", "ordered", "length"),
    [
        pytest.param("gemma4", False, 2, marks=pytest.mark.full),
        ("gemma4", True, WINDOW + 1),
        ("gemma4_e", False, 23),
        pytest.param("gemma4_moe", True, 23, marks=pytest.mark.full),
        pytest.param("gemma4_e", True, WINDOW, marks=pytest.mark.full),
    ],
)
def test_logits_are_those_of_transformers(family: str, ordered: bool, length: int) -> None:
    """Along a chain in every round, behind prompts shorter and longer than the window; all or some of it accepted."""
    [prompt], steps = prompts(5, (length,)), CHAIN.steps
    [output] = run(an_engine(CHAIN.plain(), family), [request(0, prompt, greedy(30))]).tokens
    asked, engine = request(0, prompt, greedy(18)), an_engine(CHAIN, family, ordered)
    draft = engine.executor.runner.drafter.draft
    draft.head = led = Led(draft.head, asked, output, steps)
    assert run(engine, [asked]).stats.accept_length > 2
    rounds = [led.seen[at : at + steps] for at in range(0, len(led.seen), steps)]
    for of_round in rounds:
        (known, _), (longest, _) = of_round[0], of_round[-1]
        wanted = reference_logits(family, ordered, [*prompt, *known], longest[len(known) :])
        for (_, ours), theirs in zip(of_round, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count)


@pytest.mark.parametrize(
    ("family", "steps", "topk", "nodes"),
    [
        ("gemma4", 4, 3, 16),
        pytest.param("gemma4_e", 2, 2, 6, marks=pytest.mark.full),
        *(pytest.param("gemma4_moe", *tree, marks=pytest.mark.full) for tree in ((4, 3, 16), (1, 2, 3), (5, 1, 6))),
    ],
)
def test_a_tree_changes_no_token(family: str, steps: int, topk: int, nodes: int) -> None:
    """With prefix hits, pieces of prompts and preemption, overlapped or not."""
    asked = [*prompts(7, (5, 19, 41, 12)), prompts(7, (5, 19, 41))[2]]
    expected = None
    for page_size, overlap, num_pages in ((1, False, 120), (4, True, None)):
        setup = Setup(
            algorithm="assistant",
            steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            page_size=page_size,
            overlap=overlap,
            num_pages=num_pages,
            max_batch=3,
        )
        requests = [request(i, p) for i, p in enumerate(asked)]
        expected = expected or run(an_engine(setup.plain(), family), requests).tokens
        assert run(an_engine(setup, family), [request(i, p) for i, p in enumerate(asked)]).tokens == expected


def test_it_keeps_no_rows_and_reads_fp8_as_the_target_stores_it() -> None:
    target, draft = loaded("gemma4_e")
    specs = cache_specs(target.layer_specs, draft.layer_specs, FP8_KV, "float64")
    own = [spec for spec in specs if spec.shares_with is None]
    assert all(spec.values_per_token == 0 for spec in specs[len(target.layer_specs) :])
    assert {spec.cache_spec.dtype for spec in specs} == {FP8} and len(own) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": 12}, "its layers read KVHeads.*use the draft trained for it"),
        ({"backbone_hidden_size": 99}, "hidden size 99, the target has"),
        ({"vocab_size": 32}, "vocabulary 32, the target has 16"),
        ({"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input = 4 is not supported in an assistant"),
        ({"use_ordered_embeddings": True, "num_centroids": 5}, "num_centroids = 5 does not divide 16"),
        ({"use_ordered_embeddings": True, "centroid_intermediate_top_k": 9}, "centroid_intermediate_top_k = 9; 1 to 4"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    target, path = pair("gemma4")
    raw = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        (raw if name in raw else raw["text_config"])[name] = value
    raw["text_config"].pop("per_layer_config" if "head_dim" in changes else "", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(EspalierError, match=says):
        read_draft(tmp_path, read_config(target))


def test_an_order_that_leaves_a_token_out_is_refused(tmp_path: Path) -> None:
    path, (model, _) = pair("gemma4", True)[1], loaded("gemma4", True)
    tensors = load_file(path / "model.safetensors")
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(EspalierError, match="does not name each token once"):
        load_draft(tmp_path, model, dtype=DTYPE, device=CPU, position_rows=64)
