"""Which tree is fastest at each batch: every bucket is run with every candidate, by the engine's own launches, and what
a round brings is measured as well, or foretold for one accept length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from espalier.bench.drive import contexts, drive, full_steps
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import PLAIN, TreeShape
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.startup.build import engine_of
from espalier.stats import SpeculationStats
from espalier.synthetic.chain import predicted_accept_length
from espalier.synthetic.checkpoint import Recipe
from espalier.synthetic.shapes import find_shape

CANDIDATES = (TreeShape(5, 8, 64), TreeShape(5, 4, 16), TreeShape(3, 2, 8))
# Whose vocabulary the planted chain has that accept lengths are foretold from.
FORETOLD_BY = "llama-3.1-8b"


@dataclass(frozen=True)
class Timed:
    """A candidate at a batch."""

    batch: int
    shape: TreeShape
    round_ms: float
    accept_length: float

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.batch * self.accept_length / self.round_ms

    def as_dict(self) -> dict[str, Any]:
        own = {"round_ms": self.round_ms, "accept_length": self.accept_length}
        return {"batch": self.batch, **asdict(self.shape), **own, "tokens_per_second": self.tokens_per_second}


def without_table(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's settings where nothing but the configured tree is set."""
    asked = settings.get("speculation")
    asked = asked if isinstance(asked, SpeculationConfig) else SpeculationConfig()
    return {**settings, "speculation": replace(asked, by_batch={})}


def candidates_of(configured: TreeShape, given: Sequence[TreeShape]) -> list[TreeShape]:
    """What is given, each once; else the configured tree, those of CANDIDATES that fit in it, and plain decoding.

    Raises EspalierError for one that is above the configured tree.
    """
    for shape in given:
        configured.require(shape)
    fitting = [shape for shape in CANDIDATES if _fits(configured, shape)]
    return list(dict.fromkeys(given or (configured, *fitting, PLAIN)))


def _fits(configured: TreeShape, shape: TreeShape) -> bool:
    try:
        configured.require(shape)
    except EspalierError:
        return False
    return True


def predicted_accept_lengths(
    accept_length: float, configured: TreeShape, shapes: Sequence[TreeShape]
) -> dict[TreeShape, float]:
    """Accept length of each shape with a draft that gives the configured tree this one, on the foundry's chain.

    Raises EspalierError where no draft gives that.
    """
    recipe = Recipe(find_shape(FORETOLD_BY)).with_accept_length(accept_length, **asdict(configured))
    chain = recipe.chain()
    known = {configured: accept_length}
    return {shape: known.get(shape) or predicted_accept_length(chain, **asdict(shape)) for shape in shapes}


@dataclass(frozen=True)
class Runs:
    """What is run: prompts by batch, each continued by num_tokens greedy tokens, `repeats` times after once to warm
    up."""

    prompts: Mapping[int, Sequence[Sequence[int]]]
    num_tokens: int
    repeats: int

    @classmethod
    def of(cls, llm: LLM, context: int, num_tokens: int, repeats: int) -> "Runs":
        """Prompts of `context` tokens for every batch that rounds are padded to; on a CPU, which pads none, for those
        that a GPU would have."""
        buckets = llm.engine.layout.batch_buckets(llm.config.graph_batch or llm.config.max_batch)
        return cls({batch: contexts(llm, batch, context) for batch in buckets}, num_tokens, repeats)


def measure(
    engine: Engine,
    graph_batch: int,
    runs: Runs,
    shapes: Sequence[TreeShape],
    accept_lengths: Mapping[TreeShape, float] | None,
    advance: Callable[[], None],
) -> list[Timed]:
    """Every batch with every shape, each on an engine of its own around the models and buffers of this one, which is
    closed; its prefix cache lets prompts that ran once enter together, however long they are.

    graph_batch: the engine's; accept_lengths: by shape; None: of these runs, over all batches.  Raises EspalierError
    where a batch never runs whole.
    """
    runner, overlap = engine.executor.runner, engine.in_flight.overlap
    engine.close()
    timed = []
    for shape in shapes:
        of_shape = replace(runner, layout=replace(runner.layout, trees=((1, shape),)))
        one = engine_of(of_shape, overlap, prefix_cache=True, graph_batch=graph_batch)
        stats, cells = SpeculationStats(), []
        for batch in runs.prompts:
            cells.append((batch, _round_ms(one, batch, runs, stats)))
            advance()
        one.close()
        length = stats.accept_length if accept_lengths is None else accept_lengths[shape]
        timed += [Timed(batch, shape, ms, length) for batch, ms in cells]
    return timed


def _round_ms(engine: Engine, batch: int, runs: Runs, stats: SpeculationStats) -> float:
    """The median of the rounds that held the whole batch; what they brought is added to stats."""
    params = SamplingParams(temperature=0.0, max_tokens=runs.num_tokens)
    driven = [drive(engine, runs.prompts[batch], params) for _ in range(runs.repeats + 1)][1:]
    for each in driven:
        stats.merge(each.stats)
    return 1000 * median(full_steps(driven))


def best(timed: Sequence[Timed]) -> dict[int, Timed]:
    """The fastest of each batch, the first of equals."""
    found: dict[int, Timed] = {}
    for one in timed:
        if one.batch not in found or one.tokens_per_second > found[one.batch].tokens_per_second:
            found[one.batch] = one
    return dict(sorted(found.items()))


def table(timed: Sequence[Timed]) -> dict[int, TreeShape]:
    """For SpeculationConfig.by_batch: the fastest tree from each batch on where it changes."""
    trees: dict[int, TreeShape] = {}
    for batch, fastest in best(timed).items():
        if not trees or next(reversed(trees.values())) != fastest.shape:
            trees[batch] = fastest.shape
    return trees
