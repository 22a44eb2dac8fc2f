"""What users get does not depend on speculation, batch, backend or loop; and a draft that agrees is always followed."""

from dataclasses import replace
from functools import cache
from itertools import product, takewhile
from typing import Any

import pytest

from espalier.engine.launch_input import RoundTrace
from espalier.kernels.ops.tree import VOID
from espalier.request import Request, SamplingParams
from tests.harness import Ran, Setup, prompts, request, run
from tests.pairwise import fewer, in_turn_params
from tests.properties.agreeing import agree
from tests.properties.layouts import reference_of
from tests.properties.watch import SCORE

TREE = Setup(steps=4, topk=3, num_draft_tokens=24, page_size=3, max_context=64, max_batch=5)
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 1e-4},
    "hot": {"temperature": 5.0},
    "top_k": {"temperature": 2.0, "top_k": 3},
    "top_p": {"temperature": 2.0, "top_p": 0.6},
    "min_p": {"temperature": 2.0, "min_p": 0.2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "presence": {"temperature": 0.7, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.1},
    "logit_bias": {"temperature": 1.0, "logit_bias": {2: 3.0, 5: -100.0, 9: -100.0}},
    "min_tokens": {"temperature": 4.0, "min_tokens": 9, "stop_token_ids": [1, 4, 6]},
    "opted_out": {"temperature": 3.0, "speculation": False},
    "shallow": {"temperature": 6.0, "max_draft_depth": 1},
    "everything": {
        "temperature": 2.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {0: 2.0},
        "min_tokens": 4,
        "stop_token_ids": [3],
        "logprobs": 2,
    },
}


def traffic(style: dict[str, Any], lengths: tuple[int, ...] = (2, 5, 9), max_tokens: int = 16) -> list[Request]:
    return [
        request(i, prompt, SamplingParams(**{"logprobs": 0, "max_tokens": max_tokens, **style}), seed=1000 * i + 7)
        for i, prompt in enumerate(prompts(11, lengths))
    ]


def mixed() -> list[Request]:
    """One request of each style, ragged."""
    lengths = [2 + 3 * i % 17 for i in range(len(STYLES))]
    return [
        request(i, prompt, SamplingParams(**{"max_tokens": 11, **style}), seed=i)
        for i, (prompt, style) in enumerate(zip(prompts(13, lengths), STYLES.values(), strict=True))
    ]


def traced(setup: Setup, requests: list[Request]) -> tuple[Ran, dict[str, list[RoundTrace]]]:
    """The run, and every request's rounds."""
    engine = setup.engine()
    rounds: dict[str, list[RoundTrace]] = {r.id: [] for r in requests}
    engine.scheduler.on_round = lambda trace: rounds[trace.request_id].append(trace)
    return run(engine, requests), rounds


@cache
def traced_mix(algorithm: str, family: str = "llama") -> tuple[Ran, dict[str, list[RoundTrace]]]:
    """The mixed requests in the tree that the others are compared with."""
    return traced(replace(TREE, algorithm=algorithm, family=family), mixed())


def same_rounds(one: list[RoundTrace], other: list[RoundTrace]) -> None:
    """Equal trees and paths; scores to a rounding of float32, as sums of another order stand behind them.

    On a CPU nodes at the end that no request of the batch can accept do not run, so they depend on the batch.
    """
    assert [r.emitted for r in one] == [r.emitted for r in other]
    for a, b in zip((r.tree for r in one), (r.tree for r in other), strict=True):
        run = min(len(a.tokens) - _void_at_end(each.tokens) for each in (a, b))
        assert run > max(a.path_rows) and a.path_rows == b.path_rows
        assert (a.tokens[:run], a.parents[:run]) == (b.tokens[:run], b.parents[:run])
        assert a.scores[:run] == pytest.approx(b.scores[:run], abs=SCORE)


def _void_at_end(tokens: list[int]) -> int:
    return len(list(takewhile(lambda token: token == VOID, reversed(tokens))))


@cache
def plainly(style: str) -> Ran:
    return run(TREE.plain().engine(), traffic(STYLES[style]))


@pytest.mark.parametrize(
    ("style", "algorithm"),
    # All styles meet in one batch, below.  The target's pass does not know who proposed its tree.
    fewer(
        product(STYLES, ("eagle3", "ngram")),
        lambda style, algorithm: style in ("greedy", "opted_out", "everything") and algorithm == "eagle3",
    ),
)
def test_tokens_do_not_depend_on_speculation(style, algorithm):
    tree, plain = traffic(STYLES[style]), plainly(style)
    ran = run(replace(TREE, algorithm=algorithm).engine(), tree)
    assert ran.tokens == plain.tokens
    for a, b in zip(tree, plain.requests, strict=True):
        assert [entry.token_id for entry in a.logprobs] == a.output
        assert [entry.logprob for entry in a.logprobs] == pytest.approx(
            [entry.logprob for entry in b.logprobs], abs=1e-9
        )
        assert a.finish_reason == b.finish_reason and len(a.from_draft) == len(a.output)


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [("eagle3", "llama"), ("ngram", "llama"), pytest.param("eagle3", "gemma3", marks=pytest.mark.full)],
)
def test_tokens_of_all_styles_together_do_not_depend_on_speculation(algorithm, family):
    ran, plain = traced_mix(algorithm, family)[0], run(replace(TREE, family=family).plain().engine(), mixed())
    assert ran.tokens == plain.tokens
    for a, b in zip(ran.requests, plain.requests, strict=True):
        assert a.finish_reason == b.finish_reason and len(a.from_draft) == len(a.output)
        assert [e.token_id for e in a.logprobs] == [e.token_id for e in b.logprobs]
        assert [e.logprob for e in a.logprobs] == pytest.approx([e.logprob for e in b.logprobs], abs=1e-9)


@pytest.mark.parametrize("family", fewer(["llama", "gemma3", "gpt_oss", "phi3"], lambda family: family == "llama"))
def test_native_and_transformers_give_the_same(family):
    """By different roundings, of float32 in places, so log-probabilities are nearly equal."""
    native, hosted = (
        run(replace(TREE, family=family, model_impl=model_impl).engine(), mixed())
        for model_impl in ("native", "transformers")
    )
    assert hosted.tokens == native.tokens
    for a, b in zip(hosted.requests, native.requests, strict=True):
        assert [e.logprob for e in a.logprobs] == pytest.approx([e.logprob for e in b.logprobs], abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_a_batch_of_many_is_many_batches_of_one(algorithm):
    setup = replace(TREE, algorithm=algorithm)
    together, rounds = traced_mix(algorithm)
    for index, alone in enumerate(mixed()):
        ran, own = traced(replace(setup, max_batch=1), [alone])
        assert ran.tokens == [together.tokens[index]]
        same_rounds(own[alone.id], rounds[alone.id])


CHANGES = ({"attention": "reference"}, {"overlap": True}, {"page_size": 512}, {"page_size": 1, "prefix_cache": False})


@pytest.mark.parametrize(
    ("change", "algorithm"),
    fewer(
        in_turn_params(CHANGES, ["eagle3", "ngram"]), lambda change, _: "overlap" in change or "prefix_cache" in change
    ),
)
def test_backend_loop_and_pages_change_nothing(change, algorithm):
    as_it_is, rounds = traced_mix(algorithm)
    changed, others = traced(replace(TREE, algorithm=algorithm, **change), mixed())
    assert as_it_is.tokens == changed.tokens
    for name in rounds:
        same_rounds(rounds[name], others[name])


AGREE: dict[str, dict[str, Any]] = {
    **{f"temperature {t}": {"temperature": t} for t in (0.0, 0.01, 0.5, 1.0, 2.0, 10.0)},
    "shaped": {**STYLES["everything"], "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}
# The least, one between, the most, and all parameters.
AGREE_USUAL = ("temperature 0.0", "temperature 1.0", "temperature 10.0", "shaped")


@pytest.mark.parametrize(
    ("style", "steps"),
    # Eight steps have the depths of fewer: how many steps there are does not depend on the style.
    fewer(product(AGREE, (1, 3, 8)), lambda style, steps: steps == 8 and style in AGREE_USUAL),
)
def test_a_draft_that_agrees_is_followed_to_every_depth(style, steps):
    """A chain, so that the target's own path is sure to be in it.  Filters left out: the draft's scores do not know
    them."""
    setup = replace(TREE, steps=steps, topk=1, num_draft_tokens=steps + 1)
    engine = setup.engine()
    agree(engine, reference_of(setup))
    rounds: list[RoundTrace] = []
    engine.scheduler.on_round = rounds.append
    requests = traffic({**AGREE[style], "stop_token_ids": []}, lengths=(2, 9), max_tokens=20)
    run(engine, requests)
    ends = {r.id: r.max_num_tokens(setup.max_context) for r in requests}
    assert [len(r.emitted) for r in rounds] == [min(steps + 1, ends[r.request_id] - 1 - r.prefix_len) for r in rounds]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_a_tree_too_a_draft_that_agrees_is_followed(temperature):
    """Beams may crowd out the target's path, but not often: far more is accepted than from a draft that guesses."""
    setup = replace(TREE, topk=4, steps=4, num_draft_tokens=53)
    guessing = run(setup.engine(), traffic({"temperature": temperature})).stats.accept_length
    engine = setup.engine()
    agree(engine, reference_of(setup))
    agreeing = run(engine, traffic({"temperature": temperature})).stats.accept_length
    assert agreeing > max(4.0, 1.5 * guessing)
