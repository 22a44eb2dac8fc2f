"""On a CPU guesses that find nothing cost nothing: a round has as many rows as guesses, and none that does not pay."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.config import EngineConfig, SpeculationConfig
from espalier.engine.round_times import CpuCosts
from espalier.layout import PLAIN_TREE
from espalier.request import SamplingParams
from espalier.speculate import round as of_round
from espalier.speculate.round import ProposedRound, VerifiedRound
from espalier.speculate.tree import VOID
from espalier.startup.build import assemble_engine
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.startup.load import LoadedModels, find_checkpoint, resolve_config
from tests.engine.alone import plainly
from tests.harness import Setup, prompts, request

SETUP = Setup(steps=3, topk=2, num_draft_tokens=8, max_batch=3)
EACH = pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[ProposedRound]:
    found: list[ProposedRound] = []
    verify = of_round.verify

    def watched(proposed: ProposedRound) -> VerifiedRound:
        found.append(proposed)
        return verify(proposed)

    monkeypatch.setattr(of_round, "verify", watched)
    return found


@EACH
def test_a_round_has_no_more_rows_than_guesses(algorithm: str, verified: list[ProposedRound]) -> None:
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
def test_a_batch_in_which_nobody_speculates_drafts_nothing(algorithm: str, verified: list[ProposedRound]) -> None:
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
def test_an_engine_pauses_guesses_that_do_not_pay(pauses: bool, verified: list[ProposedRound]) -> None:
    """Noise, in which a vocabulary of 16 makes some guess true now and then.

    The tree has 16 nodes, whose guesses take half a round.  Fewer take so much less that what is assumed at first, as
    much as three rounds say, holds out for a dozen rounds, in each trial again.
    """
    setup = Setup(steps=5, topk=4, num_draft_tokens=16, algorithm="ngram", max_context=128)
    config = setup.config(round_costs=CpuCosts() if pauses else None)
    config = replace(config, layout=replace(config.layout, choices=((1, (config.layout.tree, PLAIN_TREE)),)))
    engine = assemble_engine(LoadedModels(config, *setup.models(setup.layout.position_rows)))
    r = request(0, prompts(3, (40,))[0], SamplingParams(max_tokens=80, temperature=6.0))
    engine.add(r)
    while engine.has_work:
        engine.step()
    drafting = sum(proposed.runner.layout.steps > 0 for proposed in verified)
    assert drafting < len(verified) / 3 if pauses else drafting == len(verified)
    assert r.output == plainly(setup, r).tokens


@pytest.mark.parametrize(
    ("speculation", "pauses"),
    [("auto", True), (SpeculationConfig(), True), (SpeculationConfig(topk=2), False), (None, False)],
)
def test_a_tree_that_is_named_does_not_pause(speculation: Any, pauses: bool, tmp_path: Path) -> None:
    # A bundled model by another path has no draft.
    shutil.copytree(BUNDLED_FILES / "target", tmp_path / "target")
    config = EngineConfig(model=tmp_path / "target", speculation=speculation, device="cpu")
    assert (resolve_config(config, find_checkpoint(config)).round_costs is not None) is pauses
