"""Speculation on equals off on the device: in float64 without exception; in IEEE float32 and in bf16 the first
difference of a request must be a near-tie under teacher forcing, and each is listed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import espalier
from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.config import FP8_KV
from espalier.engine.engine import Engine
from espalier.request import Request
from espalier.text import load_tokenizer
from tests.engine.alone import replace_request
from tests.gpu.conftest import FIGURES, NEAR_TIES
from tests.gpu.engines import DeviceSetup
from tests.gpu.near_ties import ULPS, Logits, NearTie, furthest_logprob, judge, judged, oracle, report
from tests.gpu.traffic import mixed
from tests.harness import run
from tests.models.reference import load_reference, reference_logits

pytestmark = pytest.mark.gpu

PLAIN = DeviceSetup(max_batch=8, max_context=128).plain()
LAYOUTS: dict[str, dict[str, object]] = {
    "page 1, chain of 6": {"page_size": 1, "topk": 1, "steps": 5, "num_draft_tokens": 6},
    "page 3, 2 x 3, 8 nodes": {"page_size": 3, "topk": 2, "steps": 3, "num_draft_tokens": 8, "overlap": False},
    "page 16, 4 x 5, 16 nodes": {"page_size": 16, "topk": 4, "steps": 5, "num_draft_tokens": 16},
    "page 64, 8 x 5, 64 nodes": {"page_size": 64, "topk": 8, "steps": 5, "num_draft_tokens": 64, "overlap": False},
    "page 256, 8 x 4, 129 nodes": {"page_size": 256, "topk": 8, "steps": 4, "num_draft_tokens": 129},
    "page 16, 4 x 5, eager": {"page_size": 16, "topk": 4, "steps": 5, "num_draft_tokens": 16, "graph_batch": 0},
    "ngram, 3 x 4, 10 nodes": {"page_size": 4, "topk": 3, "steps": 4, "num_draft_tokens": 10, "algorithm": "ngram"},
    "window 6": {"page_size": 2, "topk": 3, "steps": 3, "num_draft_tokens": 9, "family": "mistral", "window": 6},
    "gpt_oss, window 6": {
        "page_size": 16,
        "topk": 4,
        "steps": 5,
        "num_draft_tokens": 16,
        "family": "gpt_oss",
        "window": 6,
    },
    "states": {"page_size": 16, "topk": 4, "steps": 5, "num_draft_tokens": 16, "family": "qwen3_5"},
    "draft of 11 tokens": {"page_size": 16, "topk": 4, "steps": 3, "num_draft_tokens": 16, "draft_vocab": 11},
    "page 16, 4 shared rows, text": {
        "page_size": 16,
        "topk": 4,
        "steps": 5,
        "num_draft_tokens": 16,
        "shared_rows": 4,
        "num_text_paths": 2,
    },
    "page 3, text without a draft pass": {
        "page_size": 3,
        "topk": 3,
        "steps": 4,
        "num_draft_tokens": 10,
        "num_text_paths": 2,
        "drafts": False,
    },
}
# Nothing may differ in float64; the reference is the backend that runs it.
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def traffic() -> list[Request]:
    return mixed(39, max_tokens=48)


@lru_cache
def said_plainly(setup: DeviceSetup) -> list[list[int]]:
    return run(setup.engine(), traffic()).tokens


class OwnLogits:
    """The engine's own plain pass, in its own dtype: a batch of one, eager, which notes the logits of every pick."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.noted: list[Tensor] = []
        self.said: dict[str, tuple[list[int], list[Tensor]]] = {}
        target = self.engine.executor.runner.target
        logits = target.logits

        def noting(hidden: Tensor) -> Tensor:
            self.noted.append(logits(hidden))
            return self.noted[-1]

        target.logits = noting  # type: ignore[method-assign]

    def plain(self, request: Request) -> tuple[list[int], list[Tensor]]:
        """Tokens, and the logits [V] that each was picked from."""
        if request.id not in self.said:
            self.noted.clear()
            alone = replace_request(request)
            self.engine.add(alone)
            while self.engine.has_work:
                self.engine.step()
            rows = [noted[0, 0].double().cpu() for noted in self.noted if noted.shape[:2] == (1, 1)]
            self.said[request.id] = alone.output, rows[-len(alone.output) :]
        return self.said[request.id]

    def __call__(self, request: Request, tokens: Sequence[int]) -> Tensor:
        said, rows = self.plain(request)
        at = len(tokens) - len(request.prompt)
        assert list(tokens) == [*request.prompt, *said[:at]]
        return rows[at]


@lru_cache
def own_logits(setup: DeviceSetup) -> OwnLogits:
    # With a rotary table of another size its model is its own, and no other engine notes its logits here.
    alone = replace(setup, max_batch=1, max_context=setup.max_context + 1, graph_batch=0, overlap=False)
    return OwnLogits(alone.engine())


def differences(
    requests: Sequence[Request], plain: Callable[[int], list[int]], logits: Logits, dtype: torch.dtype
) -> list[NearTie]:
    ties = [judged(r, plain(i), r.output, logits, dtype) for i, r in enumerate(requests)]
    return [tie for tie in ties if tie is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_do_not_depend_on_speculation(layout, dtype, put_on_record):
    tree = replace(PLAIN, algorithm="eagle3", dtype=DTYPES[dtype], overlap=True)
    tree = replace(tree, **LAYOUTS[layout])  # type: ignore[arg-type]
    plain = replace(PLAIN, dtype=tree.dtype, family=tree.family, window=tree.window, draft_vocab=tree.draft_vocab)
    ran = run(tree.engine(), traffic())
    if dtype == "bf16":
        own = own_logits(plain)
        ties = differences(ran.requests, lambda i: own.plain(ran.requests[i])[0], own, tree.dtype)
    else:
        expected = said_plainly(plain)
        ties = differences(ran.requests, lambda i: expected[i], oracle(plain), tree.dtype)
    tokens = sum(map(len, ran.tokens))
    name = f"{layout}, {dtype} {tree.backend}, accept length {ran.stats.accept_length:.2f}"
    put_on_record(NEAR_TIES, report(name, len(ran.requests), tokens, ties))
    assert [tie for tie in ties if not tie.is_explained] == []
    if dtype == "float64":
        assert ties == []


def test_tokens_over_fp8_rows_do_not_depend_on_speculation():
    """In float64.  In fewer bits a row's values may round to neighbours in FP8, a wider difference than a near-tie."""
    in_fp8 = replace(PLAIN, dtype=torch.float64, kv_dtype=FP8_KV, draft_kv_dtype=FP8_KV)
    for layout in LAYOUTS.values():
        if layout.keys() & {"family", "draft_vocab"}:
            continue
        tree = replace(in_fp8, algorithm="eagle3", overlap=True)
        assert run(replace(tree, **layout).engine(), traffic()).tokens == said_plainly(in_fp8)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_plain_decoding_is_the_oracles_own(dtype, put_on_record):
    """Not the first difference alone: every token of plain decoding, behind what was said before it."""
    setup = replace(PLAIN, dtype=DTYPES[dtype])
    logits, found, count = oracle(setup), [], 0
    for r, said in zip(traffic(), said_plainly(setup), strict=True):
        whole = setup.reference.scratch([*r.prompt, *said])
        assert len(whole.tokens) >= len(r.prompt) + len(said)
        for i, token in enumerate(said):
            tokens = [*r.prompt, *said[:i]]
            tie = judge(r, tokens, token, token, logits(r, tokens), setup.dtype)
            count += 1
            found += [tie] if tie.gap > 0 else []
    put_on_record(NEAR_TIES, report(f"plain against the oracle, {dtype} {setup.backend}", len(traffic()), count, found))
    assert [tie for tie in found if not tie.is_explained] == []


@pytest.mark.parametrize("algorithm", ["none", "eagle3", "ngram"])
def test_reported_log_probabilities_are_the_oracles(algorithm, put_on_record):
    """What was picked may be right while what it was picked from is not: TF32 would show here at once."""
    setup = replace(PLAIN, dtype=torch.float32)
    if algorithm != "none":
        setup = replace(setup, algorithm=algorithm, topk=4, steps=5, num_draft_tokens=16)
    ran = run(setup.engine(), mixed(26, max_tokens=32, logprobs=0))
    furthest = max(furthest_logprob(r, oracle(setup), torch.float32) for r in ran.requests)
    what = f"{algorithm} float32 {setup.backend}, {sum(map(len, ran.tokens))} log-probabilities"
    put_on_record(FIGURES, f"{what}: off by {ULPS * furthest:.2g} eps max|logit| at most (bound {ULPS})")
    assert furthest < 1


def test_where_every_choice_is_tied_only_near_ties_differ(put_on_record):
    """Tokens in pairs whose logits differ in the last place: what float32 cannot tell apart, and the judge must."""
    plain = replace(PLAIN, dtype=torch.float32, tied=True)
    tree = replace(plain, algorithm="eagle3", topk=4, steps=4, num_draft_tokens=16, page_size=4)
    ran = run(tree.engine(), traffic())
    expected = said_plainly(plain)
    ties = differences(ran.requests, lambda i: expected[i], oracle(plain), torch.float32)
    tokens = sum(map(len, ran.tokens))
    put_on_record(NEAR_TIES, report(f"tied pairs, float32 {tree.backend}", len(ran.requests), tokens, ties))
    assert [tie for tie in ties if not tie.is_explained] == []


# The bundled model, whose vocabulary and text are real, against transformers.

BUNDLED = Path(espalier.__file__).parent / "bundled"
TREES = {
    "5 x 4, 16 nodes": SpeculationConfig(steps=5, topk=4, num_draft_tokens=16),
    "5 x 8, 64 nodes": SpeculationConfig(steps=5, topk=8, num_draft_tokens=64),
    "ngram": SpeculationConfig(algorithm="ngram"),
}


def heldout(count: int, tokens: int) -> list[Request]:
    """Greedy and sampled in turn, by prompts that nobody trained on."""
    with open(BUNDLED / "heldout.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line)["prompt"] for line in file][:count]
    tokenizer = load_tokenizer(BUNDLED / "target", 6144)
    assert tokenizer is not None
    styles = ({}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "repetition_penalty": 1.1})
    return [
        Request(
            id=f"h{i}",
            prompt=tokenizer.encode(line)[:200],
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, **styles[i % 3]}).resolve({}, ()),
            seed=i,
            arrival_index=i,
            stop_ids=frozenset(),
        )
        for i, line in enumerate(lines)
    ]


@lru_cache
def transformers_model() -> torch.nn.Module:
    return load_reference(BUNDLED / "target", torch.float64).cuda()


def transformers_logits(_: Request, tokens: Sequence[int]) -> Tensor:
    return reference_logits(transformers_model(), torch.tensor([list(tokens)], device="cuda"))[0][0, -1]


def bundled_engine(dtype: str, **settings) -> Engine:
    settings = {"max_batch": 8, "max_context": 384, "num_pages": 400, **settings}
    return LLM("bundled", device="cuda", dtype=dtype, **settings).engine


@lru_cache
def bundled_plainly(dtype: str) -> list[list[int]]:
    return run(bundled_engine(dtype, speculation=None), heldout(24, 48)).tokens


@pytest.mark.parametrize("tree", TREES)
def test_the_bundled_model_in_float32(tree, put_on_record):
    ran = run(bundled_engine("float32", speculation=TREES[tree]), heldout(24, 48))
    expected = bundled_plainly("float32")
    ties = differences(ran.requests, lambda i: expected[i], transformers_logits, torch.float32)
    name = f"bundled, {tree}, float32, accept length {ran.stats.accept_length:.2f}"
    put_on_record(NEAR_TIES, report(name, len(ran.requests), sum(map(len, ran.tokens)), ties))
    assert [tie for tie in ties if not tie.is_explained] == []


def test_the_bundled_model_in_bf16(put_on_record):
    own = OwnLogits(bundled_engine("bfloat16", speculation=None, max_batch=1, graph_batch=0, overlap=False))
    ran = run(bundled_engine("bfloat16", speculation=TREES["5 x 4, 16 nodes"]), heldout(12, 40))
    ties = differences(ran.requests, lambda i: own.plain(ran.requests[i])[0], own, torch.bfloat16)
    name = f"bundled, 5 x 4, 16 nodes, bf16, accept length {ran.stats.accept_length:.2f}"
    put_on_record(NEAR_TIES, report(name, len(ran.requests), sum(map(len, ran.tokens)), ties))
    assert [tie for tie in ties if not tie.is_explained] == []


def test_the_bundled_model_speaks_as_transformers_does(put_on_record):
    """Every greedy token of the tree's text is the oracle's best, or as good."""
    ran = run(bundled_engine("float32", speculation=TREES["5 x 4, 16 nodes"]), heldout(24, 48))
    found, count = [], 0
    for r in ran.requests[::3]:
        row = torch.tensor([[*r.prompt, *r.output]], device="cuda")
        logits = reference_logits(transformers_model(), row)[0][0, len(r.prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits.gather(-1, row[0, len(r.prompt) :, None])[:, 0]
        count += len(r.output)
        for i in gaps.nonzero()[:, 0].tolist():
            found.append(judge(r, [*r.prompt, *r.output[:i]], r.output[i], r.output[i], logits[i], torch.float32))
    put_on_record(NEAR_TIES, report("bundled, greedy against transformers, float32", 8, count, found))
    assert [tie for tie in found if not tie.is_explained] == []
    assert count == 8 * 48


def test_ieee_float32_is_what_users_get_unasked(put_on_record):
    """TF32 keeps 10 bits of a factor: its products would be off by 1e-3 and more."""
    a, b = (torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in range(2))
    error = float((a @ b.T - (a.double() @ b.double().T)).abs().max())
    put_on_record(FIGURES, f"float32 products of 512 terms are off by {error:.2g} at most (TF32: some 3e-2)")
    assert error < 1e-3
