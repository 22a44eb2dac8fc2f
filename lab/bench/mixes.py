"""`python -m lab mixes`: batches of requests whose draft is better for some than for others, on a synthetic model.

The draft's skill depends on the place in the text, so a request's skill follows from where its prompt begins.  One
engine has all trees.  For each batch it first runs rounds in which it finds the best trees.  Then it runs the same
requests from the places that these rounds reached, with chosen trees and with every fixed tree.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from espalier.engine.engine import Engine
from espalier.engine.round_trees import tree_label
from espalier.engine.tree_choice import LookupGain, MeasuredTreeChooser, TreeChooser
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, RoundLayout, TreeShape, padded_batch
from espalier.request import Request
from espalier.startup.resolve import DEFAULT_NUM_DRAFT_TOKENS, DEFAULT_PAGE_SIZE, DEFAULT_STEPS, DEFAULT_TOPK
from espalier.startup.tree_cost import measure_chip, pass_weights, smaller_trees
from espalier.startup.tree_policy import PredictedCosts, tree_sets
from espalier.terminal.console import print_header, require_gpu, stdout, write_json
from lab.bench.engines import dtype_on
from lab.bench.full_rounds import abort_requests, enter_requests
from lab.bench.synthetic_models import SyntheticModels, recipe_of_shape
from lab.synthetic.checkpoint import Recipe

# How often the draft's first guess is right, by kind of text.  A text of two skills changes every BURST_TOKENS tokens.
SKILLS_BY_KIND = {"even": (0.8,), "sure": (0.95,), "unsure": (0.3,), "bursts": (0.95, 0.3), "noise": (0.05,)}
BURST_TOKENS = 32
# The kinds of a batch's requests: request i has kind i modulo the number of kinds.
MIXES = {
    "all 0.8": ("even",),
    "half 0.95, half 0.3": ("sure", "unsure"),
    "bursts": ("bursts",),
    "a tenth noise": (*("even",) * 4, "noise", *("even",) * 5),
}
CHUNK_SIZE = 4096
# A fixed tree with more rows in a batch is not measured, unless the engine may choose it.
MAX_FIXED_TREE_ROWS = 1024
WARM_UP_ROUNDS = 4
# Rounds that requests may run while others enter.
MAX_ENTERING_ROUNDS = 64
CONFIGURED_TREE = TreeShape(DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_NUM_DRAFT_TOKENS)
# With so few rows, a deeper tree would cost more draft time than it gains (docs/log.md).
SHARED_ROWS_TREES = (TreeShape(3, 2, 8, shared_rows=4), TreeShape(3, 2, 8, shared_rows=3))
ADAPTIVE_LABEL, SHARED_ROWS_LABEL = "adaptive", "adaptive, shared rows"


@dataclass(frozen=True)
class LayoutWithBuckets(RoundLayout):
    """batches: the sizes that rounds are padded to."""

    batches: tuple[int, ...] = ()

    def batch_buckets(self, max_batch_size: int) -> tuple[int, ...]:
        return self.batches if max_batch_size else ()


@dataclass
class FixedTreeChooser(TreeChooser):
    """Chooses one tree, or plain decoding at a batch that has no graph of it."""

    layout: RoundLayout
    tree: TreeShape

    def choose(self, batch: int, drafting: int, context: float, lookup: LookupGain | None = None) -> TreeShape:
        has = self.layout.tree_choices_for(padded_batch(batch, self.layout.batch_buckets(self.layout.max_batch)))
        return self.tree if self.tree in has else PLAIN_TREE


@dataclass(frozen=True)
class MixSizes:
    """batches: ascending; context: tokens of a prompt; search_rounds: rounds in which the engine finds the best
    trees; timed_rounds: the rounds whose time is taken."""

    batches: tuple[int, ...]
    context: int
    search_rounds: int
    timed_rounds: int

    @property
    def max_tokens(self) -> int:
        return (MAX_ENTERING_ROUNDS + self.search_rounds + self.timed_rounds) * (DEFAULT_STEPS + 1)


@dataclass
class TimedRounds:
    """tokens_per_round: for one request; num_following: requests with the expected tokens; trees: rounds by tree."""

    tokens_per_second: float
    tokens_per_round: float
    num_following: int
    trees: Counter[TreeShape] = field(default_factory=Counter)


def run(args: Namespace) -> int:
    mixes = tuple(MIXES) if args.mix is None else tuple(args.mix)
    if unknown := sorted(set(mixes) - set(MIXES)):
        raise EspalierError(f"--mix {unknown[0]!r} is unknown; use one of {', '.join(map(repr, MIXES))}")
    device = require_gpu("mixes")
    sizes = MixSizes(tuple(sorted(args.batch)), args.context, args.finding, args.rounds)
    recipe = mixed_recipe(recipe_of_shape(args.shape, 0, layers=args.layers))
    costs = PredictedCosts(pass_weights(recipe.shape.target, recipe.draft_config), measure_chip(device))
    print_header()
    cells = []
    for cell in measure_mixes(recipe, sizes, costs, device, args.batch, mixes, not args.even):
        cells.append(cell)
        stdout().print(cell_line(cell), soft_wrap=True)
        write_json(args.json, {"mixes": cells})
    return 0


def mixed_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe with an equal part of its text for each kind of SKILLS_BY_KIND."""
    tokens = recipe.shape.draft_vocab_size // len(SKILLS_BY_KIND)
    stretches: list[tuple[int, float]] = []
    for skills in SKILLS_BY_KIND.values():
        unit = BURST_TOKENS if len(skills) > 1 else tokens
        stretches += [(min(unit, tokens - at), skills[at // unit % len(skills)]) for at in range(0, tokens, unit)]
    return replace(recipe, stretches=tuple(stretches))


def measure_mixes(
    recipe: Recipe,
    sizes: MixSizes,
    costs: PredictedCosts,
    device: torch.device,
    order: Sequence[int],
    mixes: Sequence[str],
    shares: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yields a cell for each batch, in this order, and each of `mixes`.  shares: whether trees with shared rows run."""
    layout, chosen = make_layouts(recipe, sizes, costs, shares)
    models = SyntheticModels(recipe, dtype_on(device), device, layout.position_rows)
    adaptive = {name: MeasuredTreeChooser(of_name, costs, is_lookup=False) for name, of_name in chosen.items()}
    on_gpu = device.type == "cuda"
    with models.engine(layout, None, on_gpu, all_buckets=True, prefix_cache=True) as (engine, start):
        stdout().print(f"{models.title}; started in {start.seconds:.0f} s", soft_wrap=True)
        for batch in order:
            for mix in mixes:
                if batch == 1 and len(MIXES[mix]) > 1:
                    continue
                fixed: dict[str, TreeChooser] = {
                    tree_label(tree): FixedTreeChooser(layout, tree) for tree in layout.tree_choices_for(batch)
                }
                # A lone request shares rows with nobody.
                choosers: dict[str, TreeChooser] = {
                    name: chooser for name, chooser in adaptive.items() if batch > 1 or name != SHARED_ROWS_LABEL
                }
                prompts = prompts_of(models, MIXES[mix], [sizes.context] * batch, sizes)
                reached = {name: search_trees(engine, chooser, prompts, sizes) for name, chooser in choosers.items()}
                prompts = prompts_of(models, MIXES[mix], reached[ADAPTIVE_LABEL], sizes)
                all_choosers = choosers | fixed
                found = {
                    name: time_rounds(engine, models, chooser, prompts, sizes) for name, chooser in all_choosers.items()
                }
                yield {"mix": mix, "batch": batch, **cell_figures(found, list(fixed), list(choosers))}


def make_layouts(
    recipe: Recipe, sizes: MixSizes, costs: PredictedCosts, shares: bool = True
) -> tuple[RoundLayout, dict[str, RoundLayout]]:
    """Returns the engine's layout, with all trees, and by label the layouts whose trees a chooser may choose."""
    least = dict(zip(sizes.batches, (1, *(batch + 1 for batch in sizes.batches)), strict=False))
    names = (ADAPTIVE_LABEL, SHARED_ROWS_LABEL) if shares else (ADAPTIVE_LABEL,)
    chosen = {
        name: {batch: _adaptive_trees(costs, batch, name == SHARED_ROWS_LABEL) for batch in least} for name in names
    }
    small = (CONFIGURED_TREE, *smaller_trees(CONFIGURED_TREE, costs.weights))
    every = {
        batch: tuple(
            dict.fromkeys(
                (
                    *(tree for name in names for tree in chosen[name][batch]),
                    *(tree for tree in small if batch * tree.num_draft_tokens <= MAX_FIXED_TREE_ROWS),
                )
            )
        )
        for batch in least
    }
    spec = recipe.draft_config.spec
    max_context = sizes.context + sizes.max_tokens + 1
    layout = LayoutWithBuckets(
        max_batch=sizes.batches[-1],
        **CONFIGURED_TREE.sizes,
        page_size=DEFAULT_PAGE_SIZE,
        max_context=max_context,
        num_recomputed_tokens=spec.num_recomputed_tokens,
        chunk_size=CHUNK_SIZE,
        batches=sizes.batches,
    )

    def with_choices(trees: Mapping[int, tuple[TreeShape, ...]]) -> RoundLayout:
        return replace(layout, choices=tuple((first, trees[batch]) for batch, first in least.items()))

    return with_choices(every), {name: with_choices(trees) for name, trees in chosen.items()}


def _adaptive_trees(costs: PredictedCosts, batch: int, shares: bool) -> tuple[TreeShape, ...]:
    """Returns the trees from which a chooser chooses at this batch.  shares: whether to add SHARED_ROWS_TREES."""
    trees = tree_sets(CONFIGURED_TREE, costs, batch)[-1][1]
    return (*trees, *SHARED_ROWS_TREES) if shares and batch > 1 else trees


def prompts_of(
    models: SyntheticModels, kinds: Sequence[str], lengths: Sequence[int], sizes: MixSizes
) -> list[list[int]]:
    """Prompts of these lengths for requests of these kinds, each from its own place of the kind's text.

    A longer prompt begins with the shorter one."""
    chain, names = models.chain, list(SKILLS_BY_KIND)
    part = chain.size // len(names)
    room = max(part - sizes.context - sizes.max_tokens, 1)
    generator = torch.Generator().manual_seed(len(lengths))
    found = []
    for at, length in enumerate(lengths):
        first = names.index(kinds[at % len(kinds)]) * part + int(torch.randint(0, room, (), generator=generator))
        found.append(chain.token_at((first + torch.arange(length)) * chain.shifts[0]).tolist())
    return found


def search_trees(engine: Engine, chooser: TreeChooser, prompts: Sequence[Sequence[int]], sizes: MixSizes) -> list[int]:
    """Runs rounds in which the chooser finds the best trees.  Returns the tokens that each request then has."""
    requests = enter_and_step(engine, chooser, prompts, sizes, sizes.search_rounds)
    lengths = [request.num_tokens for request in requests]
    abort_requests(engine, requests)
    engine.drain()
    return lengths


def enter_and_step(
    engine: Engine, chooser: TreeChooser, prompts: Sequence[Sequence[int]], sizes: MixSizes, rounds: int
) -> list[Request]:
    """Enters a request for each prompt and runs this many rounds."""
    engine.scheduler.round_trees.chooser = chooser
    requests = enter_requests(engine, prompts, sizes.context + sizes.max_tokens - max(map(len, prompts)))
    for _ in range(rounds):
        engine.step()
    return requests


def time_rounds(
    engine: Engine, models: SyntheticModels, chooser: TreeChooser, prompts: Sequence[Sequence[int]], sizes: MixSizes
) -> TimedRounds:
    """Times rounds of all these requests.  The prefix cache keeps the prompts for the next chooser."""
    requests, num_rounds = (
        enter_and_step(engine, chooser, prompts, sizes, WARM_UP_ROUNDS),
        engine.scheduler.round_trees.num_rounds,
    )
    before, ran = sum(request.num_tokens for request in requests), num_rounds.copy()
    begun = perf_counter()
    for _ in range(sizes.timed_rounds):
        engine.step()
    seconds = perf_counter() - begun
    tokens = sum(request.num_tokens for request in requests) - before
    assert len(engine.scheduler.running) == len(requests), "all requests ran in all rounds"
    follows = sum(models.follows(request.prompt, request.output) for request in requests)
    abort_requests(engine, requests)
    engine.drain()
    return TimedRounds(tokens / seconds, tokens / sizes.timed_rounds / len(requests), follows, num_rounds - ran)


def cell_figures(found: Mapping[str, TimedRounds], fixed: Sequence[str], adaptive: Sequence[str]) -> dict[str, Any]:
    """The figures of a cell.  fixed, adaptive: names in `found`.  The best fixed tree shares no rows out."""
    rates = {name: each.tokens_per_second for name, each in found.items()}
    unshared = [name for name in fixed if "sharing" not in name]
    plain, best = rates[tree_label(PLAIN_TREE)], max(unshared, key=lambda name: rates[name])
    shared = [name for name in fixed if name not in unshared]
    return {
        "plain tokens/s": round(plain, 1),
        "best fixed": best,
        "best over plain": round(rates[best] / plain, 3),
        "over plain": {name: round(rates[name] / plain, 3) for name in (*shared, *adaptive)},
        "over best": {name: round(rates[name] / rates[best], 3) for name in (*shared, *adaptive)},
        "accept length": {name: round(found[name].tokens_per_round, 2) for name in (best, *shared, *adaptive)},
        "trees": {
            name: {tree_label(tree): count for tree, count in found[name].trees.items()}
            for name in (*shared, *adaptive)
        },
        "tokens/s": {name: round(rate, 1) for name, rate in rates.items()},
        "same tokens": f"{min(each.num_following for each in found.values())}",
    }


def cell_line(cell: Mapping[str, Any]) -> str:
    chosen = "; ".join(
        f"{name}: {cell['over plain'][name]:.3f} of plain, {over:.3f} of best, "
        + ", ".join(f"{count} x {tree}" for tree, count in cell["trees"][name].items())
        for name, over in cell["over best"].items()
    )
    return (
        f"{cell['batch']} x {cell['mix']}: plain {cell['plain tokens/s']:.0f}/s; best fixed {cell['best fixed']} "
        f"{cell['best over plain']:.3f} of plain; {chosen}; expected tokens {cell['same tokens']}/{cell['batch']}"
    )
