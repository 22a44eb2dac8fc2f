"""Sources beside a drafter change how fast tokens come, never which: with true, random and lying guesses."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from espalier.engine.guesses import GuessSources
from espalier.engine.round_times import CpuCosts
from espalier.layout import PLAIN_TREE
from espalier.request import Request, SamplingParams
from espalier.slots import UNDRAFTED_OFFSET, Guess
from espalier.speculate import round as of_round
from espalier.speculate.sources.survival import SurvivalCounts
from espalier.startup.build import assemble_engine
from espalier.startup.load import LoadedModels
from tests.harness import VOCAB, Ran, Setup, prompts, request, run
from tests.properties.test_tokens import STYLES

TREE = Setup(
    steps=4, topk=2, num_draft_tokens=9, page_size=3, max_context=64, max_batch=3, num_text_paths=2, num_sent_paths=2
)
# Whether rounds overlap, what is said, and how many rows a request has if they are shared out (0: they are not).
RUNS = ((False, "true", 0), (True, "true", 0), (True, "random", 3), (False, "late", 3))


class Told:
    """A host source that knows what plain decoding gave, and says it, something else, or what came before."""

    def __init__(self, outputs: dict[str, list[int]], says: str) -> None:
        self.outputs, self.says, self.random = outputs, says, Random(0)

    def add_request(self, request: Request) -> None:
        pass

    def add_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        pass

    def remove_request(self, request: Request) -> None:
        pass

    def guesses(self, request: Request, width: int) -> list[Guess]:
        known, start = len(request.output), request.num_tokens - 1
        true = self.outputs[request.id][known : known + width]
        if self.says == "random":
            true = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, width))]
        # Of a place that the host should have moved on from.
        start -= self.says == "late"
        kind = self.random.randint(1, UNDRAFTED_OFFSET)
        return [Guess(max(start, 0), kind, tuple(true))] if true else []


def traffic(temperature: float | None) -> list[Request]:
    """Requests of one temperature, or of every style."""
    styles = [{"temperature": temperature}] * 4 if temperature is not None else [*STYLES.values()]
    made = prompts(3, [2 + 5 * i % 11 for i in range(len(styles))])
    params = [SamplingParams(**{"max_tokens": 14, **style}) for style in styles]
    return [request(i, *each) for i, each in enumerate(zip(made, params, strict=True))]


def told(setup: Setup, says: str, outputs: dict[str, list[int]], temperature: float | None) -> Ran:
    engine = setup.engine()
    engine.scheduler.guess_sources = GuessSources(setup.layout, [Told(outputs, says)])
    return run(engine, traffic(temperature))


FULL = pytest.mark.full
CASES = [
    pytest.param("eagle3", 0.0, id="eagle3-greedy", marks=FULL),
    pytest.param("eagle3", 1.0, id="eagle3-sampled", marks=FULL),
    pytest.param("eagle3", None, id="eagle3-styles"),
    pytest.param("ngram", 0.0, id="ngram-greedy"),
    pytest.param("ngram", 1.0, id="ngram-sampled", marks=FULL),
    pytest.param("ngram", None, id="ngram-styles", marks=FULL),
]


@pytest.mark.parametrize(("algorithm", "temperature"), CASES)
def test_tokens_are_those_of_plain_decoding(algorithm, temperature):
    plain = run(replace(TREE, num_text_paths=0, num_sent_paths=0).plain().engine(), traffic(temperature))
    outputs = {r.id: r.output for r in plain.requests}
    setup = replace(TREE, algorithm=algorithm)
    lengths = {}
    for overlap, says, rows in RUNS if temperature is not None else RUNS[2:3]:
        ran = told(replace(setup, overlap=overlap, shared_rows=rows), says, outputs, temperature)
        assert ran.tokens == plain.tokens, (overlap, says)
        lengths[overlap, says] = ran.stats.accept_length
    # What is true is followed, behind rounds in flight too: of 13 tokens behind the prompt a round may emit five, and
    # four rounds do where a likelier node of the draft takes the place of a path's end.
    if temperature is not None:
        assert min(lengths[overlap, "true"] for overlap in (False, True)) >= 13 / 4, lengths


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_without_a_prediction_rounds_are_those_of_an_engine_without_sources(algorithm, monkeypatch):
    """As on a CPU by default: the same launches, trees and rows."""
    verified, verify = [], of_round.verify
    monkeypatch.setattr(of_round, "verify", lambda proposed: (verified.append(proposed.tree), verify(proposed))[1])
    found = []
    for sources in (("prediction",), ()):
        setup = replace(TREE, algorithm=algorithm, overlap=True, num_text_paths=0, num_sent_paths=2 * len(sources))
        config = setup.config(sources=sources, round_costs=CpuCosts() if algorithm == "ngram" else None)
        config = replace(config, layout=replace(config.layout, choices=((1, (config.layout.tree, PLAIN_TREE)),)))
        engine, launches = assemble_engine(LoadedModels(config, *setup.models(setup.layout.position_rows))), []
        launch = engine.executor.launch
        engine.executor.launch = lambda sent, to=launch, noted=launches: (noted.append(sent), to(sent))[1]
        ran = run(engine, traffic(None)[::5])
        trees = [[part.tolist() for part in tree] for tree in verified]
        # Numbers of how paths survive are sent, and no paths.
        found.append((ran.tokens, trees, [repr(replace(each, survival=None, draft_skill=())) for each in launches]))
        verified.clear()
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=FULL)])
def test_rounds_whose_form_follows_from_their_guesses_say_the_same(temperature):
    """With a draft, with what the host found in the text alone, and plain."""
    setup = replace(TREE, num_text_paths=0, num_sent_paths=4)
    config = setup.config(sources=("text", "index"), round_costs=CpuCosts(draft_cost=0.15), index_bytes=2**12)
    tree = config.layout.tree
    choices = ((1, (tree, replace(tree, drafts=False), PLAIN_TREE)),)
    engine = assemble_engine(
        LoadedModels(
            replace(config, layout=replace(config.layout, choices=choices)), *setup.models(setup.layout.position_rows)
        )
    )
    params = SamplingParams(temperature=temperature, max_tokens=40)
    asked = [[request(i, prompt, params) for i, prompt in enumerate(prompts(3, [6, 9, 4, 7, 6]))] for _ in range(2)]
    plain = run(replace(setup, num_sent_paths=0).plain().engine(), asked[1])
    assert run(engine, asked[0]).tokens == plain.tokens
    assert (
        engine.scheduler.round_trees.num_rounds[choices[0][1][1]] > 5
        and len(engine.scheduler.round_trees.num_rounds) > 1
    )


def test_a_text_that_repeats_itself_is_merged_into_a_draft():
    """A draft of random weights, whose target says the same again and again."""
    params = SamplingParams(temperature=0.0, max_tokens=30)
    with_text, without = (
        run(
            replace(TREE, num_text_paths=paths, num_sent_paths=0).engine(),
            [request(i, prompt, params) for i, prompt in enumerate(prompts(3, [6, 9]))],
        )
        for paths in (2, 0)
    )
    assert with_text.tokens == without.tokens
    assert with_text.stats.accept_length > without.stats.accept_length + 0.5


@pytest.mark.parametrize("overlap", [False, True])
def test_each_path_is_counted_once(overlap, monkeypatch):
    """What was sent with a round and what the device found for it, when its result is read."""
    counted, sent, found = [], [], []
    add, ask, count = SurvivalCounts.count_path, GuessSources.ask_sources, GuessSources.count_correct_guesses

    def noted_ask(guesses, batch):
        made = ask(guesses, batch)
        sent.extend(guess.kind for _, of_slot in made.guesses_by_slot for guess in of_slot)
        return made

    def noted_count(guesses, launch, rows):
        found.extend(kind for row in rows for kind, _ in row.own_text_paths)
        count(guesses, launch, rows)

    monkeypatch.setattr(SurvivalCounts, "count_path", lambda to, kind, *of: (counted.append(kind), add(to, kind, *of)))
    monkeypatch.setattr(GuessSources, "ask_sources", noted_ask)
    monkeypatch.setattr(GuessSources, "count_correct_guesses", noted_count)
    plain = run(replace(TREE, num_text_paths=0, num_sent_paths=0).plain().engine(), traffic(0.0))
    counted.clear()
    told(replace(TREE, overlap=overlap), "true", {r.id: r.output for r in plain.requests}, 0.0)
    assert sent and found
    # A request may end while its last round is in flight; nothing is counted then.
    assert len(sent) + len(found) - len(counted) in range(4 * 4 * overlap + 1)
