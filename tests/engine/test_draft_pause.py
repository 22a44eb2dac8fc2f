"""On a CPU guesses that find nothing cost nothing: a round has as many rows as guesses, and none that does not pay."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.config import EngineConfig, SpeculationConfig
from espalier.engine.draft_pause import LONGEST, LOOKUP, MOST, ROW, SHORTEST, TRIAL, DraftPause
from espalier.request import SamplingParams
from espalier.speculate import round as of_round
from espalier.speculate.round import Proposed, Verified
from espalier.speculate.tree import VOID
from espalier.startup.build import assemble
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.startup.load import Loaded, find, resolve_config
from tests.engine.alone import plainly
from tests.harness import Setup, prompts, request

SETUP = Setup(steps=3, topk=2, num_draft_tokens=8, max_batch=3)
EACH = pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    """What is verified, round by round."""
    found: list[Proposed] = []
    verify = of_round.verify

    def watched(proposed: Proposed) -> Verified:
        found.append(proposed)
        return verify(proposed)

    monkeypatch.setattr(of_round, "verify", watched)
    return found


@EACH
def test_a_round_has_no_more_rows_than_guesses(algorithm: str, verified: list[Proposed]) -> None:
    setup = replace(SETUP, algorithm=algorithm, overlap=True)
    wishes = [{}, {"speculation": False}, {"max_draft_depth": 1}, {"temperature": 1.0}, {"max_tokens": 3}]
    requests = [
        request(i, p, SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **wish}))
        for i, (p, wish) in enumerate(zip(prompts(1, (9, 4, 12, 7, 1)), wishes, strict=True))
    ]
    engine = setup.engine()
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    for r in requests:
        assert r.output == plainly(setup, r).tokens
    widths = {proposed.tree.tokens.shape[1] for proposed in verified}
    assert 1 in widths and len(widths) > 2
    for proposed in verified:
        tree, most = proposed.tree, proposed.slots.max_accept_depth
        offered = (tree.tokens[:, -1] != VOID) & (tree.depths[:, -1] <= most)
        assert tree.tokens.shape[1] == 1 or bool(offered.any())


@EACH
def test_a_batch_in_which_nobody_speculates_drafts_nothing(algorithm: str, verified: list[Proposed]) -> None:
    setup = replace(SETUP, algorithm=algorithm)
    requests = [
        request(i, p, SamplingParams(max_tokens=8, speculation=False)) for i, p in enumerate(prompts(2, (5, 9)))
    ]
    engine = setup.engine()
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    assert verified and all(proposed.runner.layout.steps == 0 for proposed in verified)
    assert [r.output for r in requests] == [plainly(setup, r).tokens for r in requests]


@pytest.mark.parametrize("pauses", [False, True])
def test_an_engine_pauses_guesses_that_do_not_pay(pauses: bool, verified: list[Proposed]) -> None:
    setup = replace(SETUP, algorithm="ngram", max_context=128)
    config = replace(setup.config(), pauses_draft=pauses)
    engine = assemble(Loaded(config, *setup.models(setup.layout.position_rows)))
    r = request(0, prompts(3, (40,))[0], SamplingParams(max_tokens=80, temperature=6.0))
    engine.add(r)
    while engine.has_work:
        engine.step()
    drafting = sum(proposed.runner.layout.steps > 0 for proposed in verified)
    assert drafting < len(verified) / 2 if pauses else drafting == len(verified)
    assert r.output == plainly(setup, r).tokens


@pytest.mark.parametrize(
    ("speculation", "pauses"),
    [("auto", True), (SpeculationConfig(), True), (SpeculationConfig(topk=2), False), (None, False)],
)
def test_a_tree_that_is_named_does_not_pause(speculation: Any, pauses: bool, tmp_path: Path) -> None:
    # A bundled model by another path has no draft.
    shutil.copytree(BUNDLED_FILES / "target", tmp_path / "target")
    config = EngineConfig(model=tmp_path / "target", speculation=speculation, device="cpu")
    assert resolve_config(config, find(config)).pauses_draft is pauses


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 3)), max_size=400), st.integers(1, 8))
def test_guesses_never_cost_more_than_their_trials(rounds: list[tuple[int, int]], batch: int) -> None:
    """Of each pause and the trial before it, the loss is one trial's."""
    pause, lost, trials = DraftPause(), 0.0, 1
    for guesses, accepted in rounds:
        if pause.next_drafts():
            rows, accepted = guesses * batch, min(guesses, accepted) * batch
            pause.add(batch, rows, accepted)
            lost += (LOOKUP + ROW * rows) / (1 + ROW * (batch - 1)) - accepted / batch
            trials += pause.left > 0
    # Below the limit by one round at most, from as high as the balance can be.
    assert lost <= trials * (TRIAL + MOST + LOOKUP + 15 * ROW * batch)


def test_pauses_grow_while_nothing_is_accepted_and_a_new_request_ends_them() -> None:
    pause, pauses, drafted = DraftPause(), [], 0
    for _ in range(2000):
        if pause.next_drafts():
            drafted += 1
            pause.add(1, 15, 0)
            pauses += [pause.left - 1] if pause.left else []
    assert pauses[:5] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST, 8 * SHORTEST, LONGEST] and pauses[-1] == LONGEST
    assert drafted < 40
    pause.restart()
    assert pause.next_drafts()
    for _ in range(50):
        assert pause.next_drafts()
        pause.add(1, 15, 3)
