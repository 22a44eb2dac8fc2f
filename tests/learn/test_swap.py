"""A swap between rounds changes guesses and no token, and leaves the draft as if it had been loaded at start."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import EspalierError
from espalier.learn.swap import Swap, held_tensors
from espalier.request import SamplingParams
from espalier.speculate.drafters.registry import load_draft
from espalier.startup.checkpoints import BUNDLED, find_draft, find_target
from tests.checkpoints import load_pair
from tests.learn.pair import draft, engine
from tests.pages import check_pages
from tests.pairwise import in_turn_params

PROMPTS = [[1, 2, 3], [7, 9, 4, 13, 12, 2, 2], [5] * 40]
PARAMS = [SamplingParams(temperature=t, ignore_eos=True, seed=3) for t in (0.0, 1.0, 0.7)]


def loaded(llm, directory):
    how = {"dtype": torch.float64, "device": "cpu", "position_rows": llm.config.layout.position_rows}
    return load_draft(directory, llm.engine.executor.runner.target, **how)


def swap(llm, directory):
    runner = llm.engine.executor.runner
    llm.engine.drain()
    assert llm.engine.in_flight.unread_launch is llm.engine.in_flight.unsettled_round is None
    Swap(getattr(runner.drafter, "drafter", runner.drafter).draft, loaded(llm, directory)).copy_weights()


def run(llm, after=lambda step: None, max_tokens=40):
    """(tokens, statistics) of every prompt; `after` is called after every step."""
    wishes = [replace(params, max_tokens=max_tokens) for params in PARAMS]
    groups = [
        llm.new_requests(p, params, detokenize=False)
        for p, params in zip(PROMPTS, map(llm.inputs.resolve, wishes), strict=True)
    ]
    requests = [request for group in groups for request in group]
    for request in requests:
        llm.engine.add(request)
    step = 0
    while llm.engine.has_work:
        llm.step()
        check_pages(llm.engine)
        after(step := step + 1)
    return [r.output for r in requests], [r.stats for r in requests]


@pytest.fixture(scope="module")
def expected():
    """The tokens of plain decoding."""
    with engine(speculation=None) as plain:
        return run(plain)[0]


@pytest.mark.parametrize(("overlap", "every"), [(False, 1), pytest.param(True, 1, marks=pytest.mark.full), (True, 3)])
def test_no_token_changes_while_drafts_are_swapped(overlap, every, expected):
    swaps = []

    def swap_at(step):
        if step % every == 0:
            swap(llm, draft(1 + len(swaps) % 2))
            swaps.append((llm.engine.totals.rounds, llm.engine.totals.accepted))

    with engine(1, overlap=overlap) as llm:
        tokens, _ = run(llm, swap_at)
    assert tokens == expected
    assert len(swaps) > 10 and swaps[-1][1] > 0


def test_a_swapped_draft_guesses_like_one_that_was_loaded_at_start():
    with engine(2, prefix_cache=False) as other, engine(1, prefix_cache=False) as llm:
        answer = partial(run, max_tokens=16)
        expected, before = answer(other), answer(llm)
        swap(llm, draft(2))
        assert answer(llm) == expected and before[1] != expected[1]
        swap(llm, draft(1))
        assert answer(llm) == before


@pytest.mark.parametrize(
    ("algorithm", "dtype"), in_turn_params(["eagle3", "mtp", "block"], [torch.float32, torch.bfloat16])
)
def test_every_tensor_of_a_draft_is_the_new_ones(algorithm, dtype, tmp_path):
    """Also what is packed for the CPU, stacked, or computed from the weights."""
    directory = find_draft(BUNDLED, algorithm)
    target_dir = find_target(BUNDLED)
    how = {"dtype": dtype, "device": "cpu", "position_rows": 64}
    target, served = load_pair(target_dir, directory, **how)
    shutil.copytree(directory, learned := tmp_path / "learned")
    weights = load_file(directory / "model.safetensors")
    floating = {name: -value if value.is_floating_point() else value for name, value in weights.items()}
    save_file(floating, learned / "model.safetensors")
    Swap(served, load_draft(learned, target, **how)).copy_weights()
    fresh = load_draft(learned, target, **how)

    def plain(tensor):
        return tensor.to_dense() if tensor.is_mkldnn else tensor

    found = list(held_tensors(served))
    assert all(
        torch.equal(plain(one.tensor), plain(two.tensor)) for one, two in zip(found, held_tensors(fresh), strict=True)
    )
    own = sum(plain(place.tensor).numel() for place in found)
    assert own >= sum(value.numel() for name, value in weights.items() if name not in ("t2d", "d2t"))


def test_another_form_is_refused_by_name():
    with engine(1) as llm:
        served, before = loaded(llm, draft(1)), loaded(llm, draft(1))
        with pytest.raises(EspalierError, match=r"draft.head.weight.*\[16, 16\].*\[12, 16\]|other parts"):
            Swap(served, loaded(llm, draft(1, vocab=12)))
        assert all(
            torch.equal(a.tensor, b.tensor) for a, b in zip(held_tensors(served), held_tensors(before), strict=True)
        )
