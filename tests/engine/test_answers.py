"""What a parameter promises is in the answer, and what is counted adds up."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from espalier.engine.launch_input import RoundTrace
from espalier.request import Request, SamplingParams, sample_seed
from espalier.stats import SpeculationStats
from tests.engine.alone import alone, plainly, replace_request
from tests.engine.test_disturbance import WISHES, all_undisturbed, mixed, some_trees
from tests.engine.watching import run_watched
from tests.harness import Setup, models, prompts, request
from tests.oracles.dense import DensePass
from tests.pages import check_pages
from tests.pairwise import in_turn_params

TREE = Setup(page_size=2, topk=4, steps=4, num_draft_tokens=16, max_batch=3)
LOOPS = ["lockstep", "overlap"]
# Where stops are read a round late.
in_overlap = pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=LOOPS)


def ran(setup: Setup, requests: list[Request]) -> list[Request]:
    run_watched(setup.engine(), [(0, r) for r in requests])
    return requests


@in_overlap
def test_max_tokens_is_exact(overlap: bool) -> None:
    """Whatever a round could bring, no more is decided, and the reason is the length."""
    limits = (1, 2, 5, 6, 13)
    wishes = [SamplingParams(temperature=1.0, max_tokens=n) for n in limits]
    requests = [request(i, p, w) for i, (p, w) in enumerate(zip(prompts(51, (7,) * len(limits)), wishes, strict=True))]
    ran(replace(TREE, overlap=overlap), requests)
    assert [(len(r.output), r.finish_reason) for r in requests] == [(n, "length") for n in limits]
    all_undisturbed(TREE, requests)


@in_overlap
def test_stops_wherever_the_token_falls(overlap: bool) -> None:
    """In the prompt pass, first, in the middle and last of a round: the end token is the last, and what is behind it is
    dropped."""
    prompt = prompts(52, (9,))[0]
    said = plainly(TREE, request(0, prompt, SamplingParams(temperature=1.0, max_tokens=24), seed=3)).tokens
    wishes = [SamplingParams(temperature=1.0, max_tokens=24, stop_token_ids=[t]) for t in range(16)]
    requests = ran(replace(TREE, overlap=overlap), [request(i, prompt, w, seed=3) for i, w in enumerate(wishes)])
    for token, r in enumerate(requests):
        if token in said:
            assert (r.output, r.finish_reason) == (said[: said.index(token) + 1], "stop")
        else:
            assert (r.output, r.finish_reason) == (said, "length")


@in_overlap
def test_min_tokens_holds_the_end_back(overlap: bool) -> None:
    """Every token ends it: it stops at the first that is allowed to, and none of them is drawn before."""
    everything = list(range(16))
    for least in (1, 2, 5, 9):
        wishes = SamplingParams(temperature=0.0, min_tokens=least, max_tokens=12, stop_token_ids=everything[1:])
        r = ran(replace(TREE, overlap=overlap), [request(0, [1, 2, 3], wishes)])[0]
        assert r.output[:least] == [0] * least
        assert len(r.output) > least
        assert r.output == plainly(TREE, r).tokens


@in_overlap
def test_samples_of_one_prompt(overlap: bool) -> None:
    """n > 1 is n requests: the first is what n = 1 gives, each has a seed of its own, each says what it says alone."""
    prompt = prompts(53, (21,))[0]
    wish = SamplingParams(temperature=1.0, max_tokens=12)
    requests = [request(i, prompt, wish, seed=sample_seed(77, i)) for i in range(5)]
    for index, r in enumerate(requests):
        r.index, r.id = index, f"one.{index}"
        r.prefix_leader = requests[0] if index else None
    engine = replace(TREE, overlap=overlap).engine()
    for r in requests:
        engine.add(r)
    pieces = []
    while engine.has_work:
        pieces += engine.step()
        check_pages(engine)
    engine.close()
    for r in requests:
        assert [t for p in pieces if p.index == r.index for t in p.token_ids] == r.output
    assert len({tuple(r.output) for r in requests}) > 1
    all_undisturbed(TREE, requests)


@pytest.mark.parametrize(("overlap", "family"), in_turn_params([False, True], ["llama", "mistral"]))
def test_logprobs_are_the_raw_targets(overlap: bool, family: str) -> None:
    """log_softmax of one plain pass over prompt and answer, before bias, temperature and penalties, at every token."""
    setup = replace(TREE, overlap=overlap, family=family)
    counts = [0, 1, 5, 16, None]
    requests = [
        request(i, p, replace(WISHES[3 + i % 3], logprobs=count, logit_bias={4: 2.0}))
        for i, (p, count) in enumerate(zip(prompts(54, (5, 17, 30, 2, 8)), counts, strict=True))
    ]
    target, _ = models(family, 0, True)
    for r, count in zip(ran(setup, requests), counts, strict=True):
        if count is None:
            assert r.logprobs == []
            continue
        tokens = torch.tensor([r.tokens])
        out = target(DensePass(tokens, target.layer_specs, torch.arange(len(r.tokens))[None]))
        expected = torch.log_softmax(target.logits(out.hidden), -1)[0, len(r.prompt) - 1 : -1]
        assert [entry.token_id for entry in r.logprobs] == r.output
        for entry, row in zip(r.logprobs, expected, strict=True):
            assert abs(entry.logprob - float(row[entry.token_id])) < 1e-10
            best = row.topk(count)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert torch.allclose(torch.tensor([v for _, v in entry.top], dtype=row.dtype), best.values, atol=1e-10)


@some_trees
def test_what_is_counted_adds_up(tree: Setup) -> None:
    """Rounds, histogram, acceptance by depth and the flags of tokens tell one story; so do the engine's totals.  In
    lock-step a request's counts are the same (test_disturbance.py)."""
    setup = replace(tree, overlap=True)
    engine, requests = setup.engine(), mixed()
    offered: Counter[str] = Counter()

    def count(trace: RoundTrace) -> None:
        r = next(each for each in requests if each.id == trace.request_id)
        left = setup.layout.max_accept_depth(r.max_num_tokens(setup.max_context), trace.prefix_len)
        most = min(r.params.depth_limit(setup.steps), left)
        nodes = zip(trace.tree.tokens, trace.tree.depths, strict=True)
        offered[r.id] += (left >= -1) * sum(token >= 0 and 0 < depth <= most for token, depth in nodes)

    engine.scheduler.on_round = count
    run_watched(engine, [(2 * i, r) for i, r in enumerate(requests)])
    total = SpeculationStats()
    for r in requests:
        stats = r.stats
        assert stats.emitted == len(r.output) - 1, "all but the prompt pass's token, and no round that was thrown away"
        assert stats.accepted == sum(r.from_draft)
        assert stats.rounds == sum(stats.histogram) >= 1
        assert stats.emitted == sum(n * rounds for n, rounds in enumerate(stats.histogram))
        assert len(stats.histogram) <= setup.layout.extend_width + 1
        tree_size, taken = ([pair[i] for pair in stats.acceptance_by_depth] for i in (0, 1))
        assert all(a >= b for a, b in zip(tree_size, taken, strict=True))
        assert all(a <= b for a, b in zip(tree_size[1:], taken, strict=False)), (
            "a depth is tried where the one above was taken"
        )
        assert sum(taken) == stats.accepted
        most = 0 if not r.params.speculation else r.params.max_draft_depth
        assert most is None or len(tree_size) <= most
        assert stats.drafted == offered[r.id], "what was deeper than the request allows was not offered"
        assert stats.accept_length == pytest.approx(stats.emitted / stats.rounds)
        assert r.from_draft[0] is False
        total.merge(stats)
    assert engine.totals == total


def test_a_stop_inside_a_round_counts_what_it_kept() -> None:
    """A round cut short by an end token: its kept tokens all came from the draft, and count so."""
    prompt = prompts(55, (9,))[0]
    cut = 0
    wish = SamplingParams(temperature=1.0, max_tokens=30, stop_token_ids=[2, 9])
    for r in ran(TREE, [request(seed, prompt, wish, seed=seed) for seed in range(20)]):
        assert r.stats.accepted == sum(r.from_draft)
        cut += r.finish_reason == "stop" and r.from_draft[-1]
    assert cut > 3


def test_who_opts_out_decodes_plainly() -> None:
    """speculation=False and max_draft_depth bound what a round may accept, beside mates that are not bound."""
    wish = SamplingParams(temperature=0.0, max_tokens=20)
    wishes = [replace(wish, speculation=False), replace(wish, max_draft_depth=1), wish]
    prompt = prompts(56, (12,))[0]
    requests = ran(TREE, [request(i, prompt, w, seed=0) for i, w in enumerate(wishes)])
    assert requests[0].output == requests[1].output == requests[2].output
    assert not any(requests[0].from_draft)
    assert requests[0].stats.rounds == 19
    assert all(not (a and b) for a, b in zip(requests[1].from_draft, requests[1].from_draft[1:], strict=False))


def test_pieces_come_as_they_are_decided() -> None:
    """What a step hands out is what its harvest decided: the prompt's token first, then a round's."""
    r = request(0, prompts(57, (20,))[0], SamplingParams(temperature=0.0, max_tokens=12, logprobs=1))
    engine = TREE.engine()
    engine.add(r)
    seen: list[int] = []
    while engine.has_work:
        for piece in engine.step():
            seen += piece.token_ids
            assert seen == r.output
            assert piece.logprobs is not None
            assert [entry.token_id for entry in piece.logprobs] == piece.token_ids
            assert piece.finish_reason == r.finish_reason
    assert seen == alone(TREE, replace_request(r)).tokens
