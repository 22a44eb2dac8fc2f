"""The Markov chain of a synthetic checkpoint, what its draft knows of the chain, and the accept length that follows.

The hot tokens are those of the draft's vocabulary.  They lie on a ring of N places, in an order drawn from the seed.
From place i the chain goes to place i + shift_j with probability p_j.  For each place the draft ranks NUM_CANDIDATES
shifts; `skill` is how often it ranks the most likely shift first.

An MTP head shares the target's lm_head, so its ranking cannot be free.  It knows the target's successors, and at each
token changes the logit of one (Chain.nudge).  A block draft ranks like an EAGLE-3 head at depth 1, and worse at each
depth below (Chain.fading, fading.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import Candidates, select_paths
from espalier.kernels.ops.tree import accept
from espalier.kernels.tree.edges import DepthRows, choose_next_rows
from espalier.sampling.pick import SampledTokens
from espalier.speculate.drafters.one_pass import edge_candidates
from espalier.speculate.tree import CandidatePool, Tree, ordered_topk
from lab.synthetic.fading import Fading, fading_of

MODES = ("chain", "copy")
# The target's probabilities of the successors in chain mode.  In copy mode they are equal, and a far token decides.
PROBABILITIES = (0.75, 0.15, 0.07, 0.03)
NUM_SUCCESSORS = len(PROBABILITIES)
NUM_CANDIDATES = 8
# How often the true successor is not among the draft's candidates, if the draft's first guess is wrong.
MISS_SHARE = 1 / 2
# The draft's error rate at a place is one of these times its mean error rate, 1 - skill.
ERROR_FACTORS = (0.25, 0.75, 1.25, 1.75)
MIN_SKILL, MAX_SKILL = 0.05, 0.99
# What an MTP head adds to the logit of the successor that it favours, and of the successor that it buries.  A favoured
# second successor overtakes the first; a buried first successor gets a lower logit than random tokens.
FAVOUR_NATS, BURY_NATS = 3.0, -30.0
NUM_NUDGES = 2 * NUM_SUCCESSORS
ACCEPT_SAMPLES = 2048
# The same for block drafts, whose trees take longer to grow.
BLOCK_ACCEPT_SAMPLES = 512
# The tokens of a topic: several times the tokens that the deepest tree reaches ahead.
TOPIC_TOKENS = 256


@dataclass(frozen=True)
class Chain:
    """N hot tokens of a vocabulary of V.

    hot: [N] int64, the ids of the hot tokens, ascending; a draft id is an index into it.
    ring: [N], the draft id at each place.
    place: [V], the place of each token.  A cold token is always followed by one token, and has the place before it.
    is_hot: [V] bool.
    shifts: [1 + NUM_CANDIDATES], distinct mod N; the first NUM_SUCCESSORS are the target's, the most likely first.
    draft_logp: [N, 1 + NUM_CANDIDATES] float32, the draft's log-probability of each shift; -inf if it is no candidate.
    kind: [V], 0 .. NUM_SUCCESSORS-1, what copy mode copies.
    lag_of: [V], 0 .. num_lags-1, each token's index into lags.
    lags: [num_lags], how many positions back a token looks in copy mode.
    topic: [V], the stretch of TOPIC_TOKENS places, in the order of greedy text, that each token is in.
    nudge: [V], 0 .. NUM_NUDGES-1, or None if the draft is no MTP head.  Value k favours the successor of kind k; value
    NUM_SUCCESSORS + k buries it.
    fading: how a block draft ranks at each depth; None for other drafts.
    """

    mode: str
    hot: Tensor
    ring: Tensor
    place: Tensor
    is_hot: Tensor
    shifts: Tensor
    draft_logp: Tensor
    kind: Tensor
    lag_of: Tensor
    lags: Tensor
    topic: Tensor
    nudge: Tensor | None = None
    fading: Fading | None = None

    @property
    def size(self) -> int:
        return len(self.hot)

    @property
    def skill(self) -> float:
        """How often the draft's first guess is right, over all places."""
        return float((self.draft_logp.argmax(1) == 0).double().mean())

    def with_fading(self, skills: Sequence[float], generator: torch.Generator) -> "Chain":
        """Returns the chain of a block draft whose first guess at depth d is right as often as skills[d - 1].

        skills[0] is `skill`.  Raises EspalierError for skills that cannot be planted.
        """
        children = (torch.arange(self.size)[:, None] + self.shifts) % self.size
        return replace(self, fading=fading_of(self.draft_logp, children, skills, generator))

    def token_at(self, places: Tensor) -> Tensor:
        return self.hot[self.ring[places % self.size]]

    def successors(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., NUM_SUCCESSORS] ids, the most likely first.  Only the first follows a cold token."""
        return self.token_at(self.place[tokens][..., None] + self.shifts[:NUM_SUCCESSORS])


def make_chain(
    vocab: int,
    plain: range,
    num_hot: int,
    num_lags: int,
    *,
    seed: int,
    mode: str,
    skill: float,
    reach: int,
    has_topics: bool = False,
    is_nudged: bool = False,
    block_size: int = 0,
    fade: float = 1.0,
    skills: Sequence[float] = (),
    stretches: Sequence[tuple[int, float]] = (),
) -> Chain:
    """A chain drawn from the seed, on the CPU, so that it is the same on every device.

    plain: only these ids are emitted; reach: the largest lag of copy mode; the smallest is 1.
    has_topics: the successors of a token are near it in greedy text, so that a tree stays in a topic.
    is_nudged: the draft is an MTP head.  In copy mode it nudges nothing.
    block_size: depths that a block draft proposes; 0: it is none.  fade: its skill at a depth over that at the depth
    before, in chain mode; skills: at each depth, in its place.
    stretches: (tokens, skill), in place of one skill: greedy text runs through them, over and over.
    Raises EspalierError for arguments that do not fit together.
    """
    for each in [skill, *(each for _, each in stretches)]:
        _check_arguments(len(plain), num_hot, mode, each, reach)
    generator = torch.Generator().manual_seed(seed)
    hot = plain.start + torch.randperm(len(plain), generator=generator)[:num_hot].sort().values
    ring = torch.randperm(num_hot, generator=generator)
    place = torch.randint(0, num_hot, (vocab,), generator=generator)
    place[hot[ring]] = torch.arange(num_hot)
    is_hot = torch.zeros(vocab, dtype=torch.bool)
    is_hot[hot] = True
    shifts = _draw_shifts(num_hot, generator)
    if has_topics:
        # The multiples of the first shift differ, because that shift is coprime with the size of the ring.
        shifts = shifts[0] * torch.arange(1, len(shifts) + 1) % num_hot
    kind = torch.randint(0, NUM_SUCCESSORS, (vocab,), generator=generator)
    kind[hot[ring]] = torch.arange(num_hot) % NUM_SUCCESSORS
    lag_of = torch.randint(0, num_lags, (vocab,), generator=generator)
    lags = torch.rand(num_lags, generator=generator).mul(math.log(reach)).exp().round().long().clamp(1, reach)
    lags[0] = reach
    topic = place * pow(int(shifts[0]), -1, num_hot) % num_hot // TOPIC_TOKENS
    nudge = None
    if mode == "copy":
        draft_logp = _equal_guesses(num_hot)
    elif is_nudged:
        draft_logp, nudged = _draw_nudged_guesses(num_hot, skill, generator)
        after = hot[ring[(torch.arange(num_hot) + shifts[nudged % NUM_SUCCESSORS]) % num_hot]]
        nudge = (kind[after] + nudged // NUM_SUCCESSORS * NUM_SUCCESSORS)[place]
    else:
        if stretches:
            profile = _shift_probabilities_by_place(num_hot, int(shifts[0]), stretches, generator)
        else:
            spread = torch.tensor(ERROR_FACTORS)[torch.randint(0, len(ERROR_FACTORS), (num_hot,), generator=generator)]
            profile = _shift_probabilities((1 - (1 - skill) * spread).clamp(MIN_SKILL, MAX_SKILL))
        draft_logp = _draw_guesses(profile, generator)
    chain = Chain(mode, hot, ring, place, is_hot, shifts, draft_logp, kind, lag_of, lags, topic, nudge)
    if not block_size:
        return chain
    faded = [chain.skill * (fade**depth if mode == "chain" else 1) for depth in range(block_size)]
    # A rate is planted at random places, and is a little off; rates that are alike stay so.
    alike = [chain.skill if rate == skills[0] else rate for rate in skills]
    return chain.with_fading(alike or faded, generator)


def _check_arguments(num_plain: int, num_hot: int, mode: str, skill: float, reach: int) -> None:
    if mode not in MODES:
        raise EspalierError(f"mode {mode!r} is not supported; use one of {', '.join(MODES)}")
    if not MIN_SKILL <= skill <= MAX_SKILL:
        raise EspalierError(f"skill={skill} is not supported; use {MIN_SKILL} to {MAX_SKILL}")
    if reach < 1:
        raise EspalierError(f"reach={reach} is not supported; use 1 or more")
    if num_hot % NUM_SUCCESSORS or not 4 * NUM_CANDIDATES <= num_hot <= num_plain:
        raise EspalierError(
            f"a draft vocabulary of {num_hot} does not fit {num_plain} plain tokens; use a multiple of "
            f"{NUM_SUCCESSORS} from {4 * NUM_CANDIDATES} to that number"
        )


def _draw_shifts(size: int, generator: torch.Generator) -> Tensor:
    """Random distinct shifts, [1 + NUM_CANDIDATES].

    The first is coprime with the size of the ring, so that greedy text visits every place before it repeats.  The
    successors' shifts are 1, 2, .. mod NUM_SUCCESSORS, so that the successors of a place differ in kind.
    """
    shifts: list[int] = []
    while len(shifts) < 1 + NUM_CANDIDATES:
        drawn = int(torch.randint(1, size, (), generator=generator))
        j = len(shifts)
        fits = j >= NUM_SUCCESSORS or drawn % NUM_SUCCESSORS == (j + 1) % NUM_SUCCESSORS
        if fits and drawn not in shifts and (j > 0 or math.gcd(drawn, size) == 1):
            shifts.append(drawn)
    return torch.tensor(shifts)


def _shift_probabilities(skill: Tensor) -> Tensor:
    """[N] -> [N, NUM_CANDIDATES + 1]: the probability that the true successor has each rank; the last is a miss."""
    tail = 0.5 ** torch.arange(1, NUM_CANDIDATES, dtype=torch.float32)
    wrong = 1 - skill[:, None]
    return torch.cat((skill[:, None], wrong * (1 - MISS_SHARE) * tail / tail.sum(), wrong * MISS_SHARE), 1)


def _shift_probabilities_by_place(
    size: int, shift: int, stretches: Sequence[tuple[int, float]], generator: torch.Generator
) -> Tensor:
    """As _shift_probabilities, for stretches of text, some of which may be noise: the first rank is the likeliest.

    shift: from a place to the next place of greedy text."""
    once = torch.cat([torch.full((tokens,), skill) for tokens, skill in stretches])
    wrong = 1 - once[torch.arange(size) * pow(shift, -1, size) % size % len(once)]
    spread = torch.tensor(ERROR_FACTORS)[torch.randint(0, len(ERROR_FACTORS), (size,), generator=generator)] - 1
    wrong = wrong * (1 + spread * (((1 - MIN_SKILL) / wrong - 1) / (max(ERROR_FACTORS) - 1)).clamp(max=1))
    profile = _shift_probabilities(1 - wrong)
    hits = torch.minimum(profile[:, :-1], profile[:, :1] * 0.5 ** torch.arange(NUM_CANDIDATES))
    return torch.cat((hits, 1 - hits.sum(1, keepdim=True)), 1)


def _draw_guesses(profile: Tensor, generator: torch.Generator) -> Tensor:
    """draft_logp in chain mode.  profile: of each place.

    The draft is calibrated: its k-th candidate is true with the probability that the draft gives this candidate."""
    size = len(profile)
    drawn = torch.rand(size, 1, generator=generator)
    truth = (drawn > profile.cumsum(1)[:, :-1]).sum(1, keepdim=True)
    others = torch.arange(1, NUM_CANDIDATES + 1).expand(size, -1)
    rank = torch.cat((truth, others - (others <= truth).long()), 1)
    logp = profile[:, :-1].log().log_softmax(1)
    return torch.cat((logp, torch.full((size, 1), -torch.inf)), 1).gather(1, rank)


def _draw_nudged_guesses(size: int, skill: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(draft_logp, nudged [N]) of an MTP head in chain mode.

    nudged: j if the head favours successor j, NUM_SUCCESSORS + j if it buries successor j.  A right head favours the
    first successor.  A wrong head favours the second or, with probability MISS_SHARE, buries the first."""
    wrong = torch.rand(size, generator=generator) >= skill
    missed = torch.rand(size, generator=generator) < MISS_SHARE
    nudged = torch.where(wrong, torch.where(missed, NUM_SUCCESSORS, 1), 0)
    logits = torch.tensor(PROBABILITIES).log().repeat(size, 1)
    added = torch.where(nudged < NUM_SUCCESSORS, FAVOUR_NATS, -torch.inf)
    logits[torch.arange(size), nudged % NUM_SUCCESSORS] += added
    logp = torch.full((size, 1 + NUM_CANDIDATES), -torch.inf)
    logp[:, :NUM_SUCCESSORS] = logits.log_softmax(1)
    return logp, nudged


def _equal_guesses(size: int) -> Tensor:
    """draft_logp in copy mode.  The draft cannot see the far token, so all successors are equally likely."""
    logp = torch.full((size, 1 + NUM_CANDIDATES), -torch.inf)
    logp[:, :NUM_SUCCESSORS] = -math.log(NUM_SUCCESSORS)
    return logp


def predicted_accept_length(
    chain: Chain, steps: int, topk: int, num_draft_tokens: int, samples: int | None = None
) -> float:
    """The accept length of greedy decoding, computed from the chain's tables without a model.

    Trees grow by the engine's own rules, from `samples` random places."""
    samples = samples or (ACCEPT_SAMPLES if chain.fading is None else BLOCK_ACCEPT_SAMPLES)
    if num_draft_tokens == 1 or steps == 0:
        return 1.0
    generator = torch.Generator().manual_seed(samples)
    roots = torch.randint(0, chain.size, (samples,), generator=generator)
    grow = _grow_beam_trees if chain.fading is None else _grow_block_trees
    tree = grow(chain, roots, steps, topk, num_draft_tokens)
    chosen = torch.zeros_like(tree.tokens)
    if chain.mode == "copy":
        chosen = torch.randint(0, NUM_SUCCESSORS, tree.tokens.shape, generator=generator)
    picks = (tree.tokens + chain.shifts[chosen]) % chain.size
    picked = SampledTokens(picks, torch.ones_like(picks, dtype=torch.bool))
    path = accept(tree, *picked, torch.full_like(roots, steps), torch.ones_like(roots, dtype=torch.bool), steps)
    return float(path.length.double().mean())


def _grow_beam_trees(chain: Chain, roots: Tensor, steps: int, topk: int, num_draft_tokens: int) -> Tree:
    """The tree over places that speculate/drafters/autoregressive.py would propose from draft_logp."""
    pool = CandidatePool(topk)
    places, scores = roots[:, None], torch.zeros(len(roots), 1)
    for level in range(1, steps + 1):
        best, shift = ordered_topk(chain.draft_logp[places], topk)
        children = (places[..., None] + chain.shifts[shift]) % chain.size
        paths = scores[..., None] + best
        pool.add_level(children, paths)
        if level < steps:
            scores, kept = ordered_topk(paths.flatten(1), topk)
            pool.set_beams(kept)
            places = children.flatten(1).gather(1, kept)
    return pool.select(roots, num_draft_tokens)


def _grow_block_trees(chain: Chain, roots: Tensor, steps: int, topk: int, num_draft_tokens: int) -> Tree:
    """The tree over places that speculate/drafters/one_pass.py would propose from the log-probabilities by depth."""
    assert chain.fading is not None
    by_depth = chain.fading.logp(chain.draft_logp, steps)

    def next_depth(depth: int, places: DepthRows, out: Candidates) -> DepthRows:
        best, shift = ordered_topk(by_depth[depth][places.tokens], topk)
        children = (places.tokens[..., None] + chain.shifts[shift]) % chain.size
        return choose_next_rows(children, best, places, out)

    candidates = edge_candidates(DepthRows.for_roots(roots), steps, topk, next_depth)
    return select_paths(roots, candidates, num_draft_tokens)
