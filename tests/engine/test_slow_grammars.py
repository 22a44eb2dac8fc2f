"""A grammar that takes too long ends its own request with an error, and no other request loses a token."""

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier import LLM, EspalierError, Grammar, SamplingParams
from espalier.engine import mask_threads
from espalier.engine.engine import Engine
from espalier.engine.mask_threads import MAX_ABANDONED_THREADS, MAX_TIME_SHARES, TOO_SLOW, MaskThreadPool
from espalier.grammar.spec import TOOK_TOO_LONG_ERROR
from espalier.kernels.ops import drafts
from espalier.masking.compile import CompilerBusy, GrammarCompiler
from espalier.masking.masker import GrammarMasker, allowed_tokens
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.text import load_tokenizer
from tests.engine.fake_cuda import engine_on_fake_cuda, fake_cuda
from tests.grammar.test_lossless import END, VOCAB, asked, bytes_of, compiled, masker_of, setup_of
from tests.harness import Setup, run

LIMIT_S = 0.1
# Two thousand hashes take about a millisecond.
SECONDS_OF_HASHES = 2_000_000


@pytest.fixture
def go_on(monkeypatch):
    """Until it is set, a planted grammar does not answer.  It waits, so its thread's time is the time of day."""
    monkeypatch.setattr(mask_threads, "_thread_time", lambda thread: time.monotonic())
    event = threading.Event()
    yield event
    event.set()


def stuck_at(question: str, number: int, go_on: threading.Event) -> Callable[[Grammar], GrammarMasker]:
    """Makes maskers that do not answer a question at its `number`-th time."""

    class Stuck(GrammarMasker):
        left = number

        def _wait(self, name: str) -> None:
            self.left -= name == question
            if not self.left:
                assert go_on.wait(60)

        def root_mask(self):
            self._wait("root_mask")
            return super().root_mask()

        def forced_tokens(self, most):
            self._wait("forced_tokens")
            return super().forced_tokens(most)

        def mask_after(self, path):
            self._wait("mask_after")
            return super().mask_after(path)

        def node_masks(self, *tree):
            self._wait("node_masks")
            super().node_masks(*tree)

        def _match(self, token_id):
            self._wait("match")
            super()._match(token_id)

    return lambda grammar: Stuck(compiled(grammar), VOCAB, (END,), None, bytes_of)


def make_engine(setup: Setup, where: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if where == "cpu":
        return setup.engine()
    # What only a CPU's path reads: a GPU's kernels end where the text does.
    monkeypatch.setattr(drafts, "max_history_length", lambda root: setup.layout.history_width)
    fake_cuda(monkeypatch)
    return engine_on_fake_cuda(setup, graph_batch=3 if where == "graphs" else 0)


@pytest.mark.parametrize(
    ("question", "number", "where", "overlap"),
    [
        pytest.param("root_mask", 1, "cpu", False, marks=pytest.mark.full),
        ("root_mask", 1, "graphs", True),
        pytest.param("forced_tokens", 2, "cpu", True, marks=pytest.mark.full),
        pytest.param("forced_tokens", 1, "graphs", True, marks=pytest.mark.full),
        pytest.param("mask_after", 3, "cpu", True, marks=pytest.mark.full),
        pytest.param("mask_after", 1, "graphs", True, marks=pytest.mark.full),
        ("mask_after", 2, "eager", False),
        ("node_masks", 2, "cpu", False),
        pytest.param("node_masks", 1, "graphs", True, marks=pytest.mark.full),
        ("match", 2, "cpu", True),
    ],
)
def test_others_get_every_token_that_they_get_alone(question, number, where, overlap, go_on, monkeypatch):
    """The first and the last request that have a grammar do not answer; two others have one, and two have none."""
    setup = setup_of("eagle3", 4, 16, overlap=overlap, attention="reference", max_batch=3)
    expected = run(setup.engine(), asked(0, 1.2, count=6)).requests
    stuck = iter([True, False, False, True])
    planted = stuck_at(question, number, go_on)
    requests = asked(0, 1.2, lambda grammar: planted(grammar) if next(stuck) else masker_of(grammar), count=6)
    engine = make_engine(setup, where, monkeypatch)
    engine.scheduler.mask_builder.threads.limit_s = LIMIT_S
    ran = run(engine, requests).requests
    for i, (each, right) in enumerate(zip(ran, expected, strict=True)):
        if i in (0, 4):
            assert (each.finish_reason, each.error) == ("abort", TOOK_TOO_LONG_ERROR)
            assert each.output == right.output[: len(each.output)] != right.output
        else:
            assert (each.output, each.finish_reason, each.error) == (right.output, right.finish_reason, None)
    assert engine.num_abandoned_grammars == 2
    go_on.set()
    wait_until(lambda: not engine.num_abandoned_grammars)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(1e-3)
    assert is_so()


def test_a_thread_is_abandoned_for_the_time_that_it_uses_and_not_for_the_time_that_it_waits():
    """A busy machine ends no request."""
    threads, began = MaskThreadPool(0.02), threading.Event()

    def work(place: int) -> int:
        if place == 1:
            began.set()
            hashlib.pbkdf2_hmac("sha256", b"", b"", SECONDS_OF_HASHES)
        elif place == 2:
            time.sleep(0.2)
        return place

    assert threads.run(work, 4, all_threads=True) == [0, TOO_SLOW, 2, 3]
    assert began.is_set() and threads.num_abandoned == 1
    assert threads.run(work, 1) == [0], "another thread has taken its place"
    threads.close()
    wait_until(lambda: not threads.num_abandoned)


class TickingThreads(MaskThreadPool):
    """Threads whose time goes on by tick_s when the engine looks at them, so it does not depend on the machine."""

    def __init__(self, tick_s: float):
        super().__init__(32 * tick_s)
        self.tick_s, self.now_s = tick_s, 0.0

    def _handle_slow_threads(self, *args: Any) -> None:
        self.now_s += self.tick_s
        super()._handle_slow_threads(*args)


@settings(max_examples=30)
@given(st.integers(1, 24), st.integers(0, 6), st.booleans(), st.randoms(use_true_random=False))
def test_all_slow_grammars_of_a_round_share_one_limit(num_slow, num_good, all_threads, rng):
    """They use their shares, and together the other half of the limit once, however many wait for a thread."""
    threads, go_on, tick_s = TickingThreads(1e-3), threading.Event(), 1e-3
    kinds = [True] * num_slow + [False] * num_good
    rng.shuffle(kinds)
    used_s = [0.0] * len(kinds)
    right = [TOO_SLOW if is_slow else place for place, is_slow in enumerate(kinds)]

    def work(place: int) -> int:
        assert not kinds[place] or go_on.wait(60)
        return place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_threads, "_thread_time", lambda thread: threads.now_s)
        assert threads.run(work, len(kinds), all_threads=all_threads, used_s=used_s) == right
        shares_s = num_slow * threads.limit_s / 2 / min(len(kinds), MAX_TIME_SHARES)
        # Each is seen at most one tick late.
        assert sum(used_s) < shares_s + threads.limit_s / 2 + (num_slow + 1) * tick_s
        go_on.set()
        wait_until(lambda: not threads.num_abandoned)
    threads.close()


def test_what_others_took_in_a_round_counts_and_ends_slow_work_alone():
    threads = MaskThreadPool(0.4)
    work = [lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", SECONDS_OF_HASHES // 2), lambda: 1]
    used_s, overrun_s = [5.0, 0.0], lambda share_s: 5.0
    assert threads.run(lambda place: work[place](), 2, used_s=used_s, overrun_s=overrun_s) == [TOO_SLOW, 1]
    threads.close()


def test_others_help_where_the_first_piece_of_work_does_not_end_soon(monkeypatch):
    monkeypatch.setattr(mask_threads, "available_cores", lambda: 2)
    monkeypatch.setattr(mask_threads, "_thread_time", lambda thread: 0.0)
    threads, both = MaskThreadPool(), threading.Barrier(2)
    assert sorted(threads.run(lambda place: both.wait(10), 2)) == [0, 1]
    threads.close()


AT_EXIT = """
import hashlib, threading, time
from espalier.engine.mask_threads import TOO_SLOW, MaskThreadPool
from espalier.masking.compile import THREAD_NAME

def work(place):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    print("mask")

threading.Thread(target=lambda: (time.sleep(0.2), print("grammar")), name=THREAD_NAME, daemon=True).start()
assert MaskThreadPool(0.02).run(work, 1) == [TOO_SLOW]
"""


def test_the_interpreter_ends_behind_the_threads_that_are_in_xgrammar():
    """A thread that comes back while it ends would abort the process."""
    ran = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, sorted(ran.stdout.split())) == (0, ["grammar", "mask"]), ran.stderr


def test_what_a_piece_of_work_raises_is_raised():
    threads = MaskThreadPool()
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda place: 1 // place, 3)
    assert threads.run(lambda place: place, 3) == [0, 1, 2]
    threads.close()


def test_while_many_are_abandoned_grammars_are_refused_and_others_go_on(go_on):
    with LLM(max_batch=2, max_context=64) as llm:
        threads = llm.engine.scheduler.mask_builder.threads
        threads.limit_s = LIMIT_S
        form, free = SamplingParams(grammar=Grammar("regex", "[ab]{3}")), SamplingParams(max_tokens=3)
        assert threads.run(lambda _: go_on.wait(60), MAX_ABANDONED_THREADS) == [TOO_SLOW] * MAX_ABANDONED_THREADS
        with pytest.raises(CompilerBusy, match="retry later"):
            llm.generate(["a"], form)
        assert len(llm.generate(["a"], free)[0].token_ids) == 3
        go_on.set()
        wait_until(lambda: not llm.engine.num_abandoned_grammars)
        assert len(llm.generate(["a"], form)[0].text) == 3


def random_ebnf(rng: random.Random) -> str:
    """A small grammar whose rules may call each other and themselves, and may be empty."""
    names = ["root", "s", "t"][: rng.randint(2, 3)]

    def part(depth: int) -> str:
        kind = rng.randrange(9 if depth < 2 else 6)
        if kind < 3:
            return rng.choice(names[1:])
        if kind < 6:
            return rng.choice(["[a-z ]", "[ ]", '""', '"ab"', '"("', '")"', "[^x]", "[0-9]+"])
        inner = " ".join(part(depth + 1) for _ in range(rng.randint(1, 3)))
        return f"({inner}){rng.choice(['', '*', '+', '?', '{0,9}'])}"

    def rule(name: str) -> str:
        ways = [" ".join(part(0) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
        return f"{name} ::= {' | '.join(ways)} | {rng.choice(['[a-z ]', '[ ]', '[0-9]'])}"

    return "\n".join(map(rule, names))


@pytest.fixture(scope="module")
def compiler():
    vocab_size = 6144
    tokenizer = load_tokenizer(BUNDLED_FILES / "target", vocab_size)
    assert tokenizer is not None
    return GrammarCompiler(tokenizer, vocab_size)


def walk(compiler: GrammarCompiler, seed: int) -> str:
    """Compile a random grammar and draw a text from its masks: whether it was refused, and how it ended."""
    rng = random.Random(seed)
    try:
        masker = compiler.compile(Grammar("ebnf", random_ebnf(rng))).masker((0,))
    except EspalierError as error:
        return "ambiguous" if "too ambiguous" in str(error) else "refused"
    threads = MaskThreadPool()
    for _ in range(48):
        [mask] = threads.run(lambda _: masker.root_mask(), 1)
        if mask is TOO_SLOW:
            return "too slow"
        allowed = allowed_tokens(mask)
        if not (allowed := allowed[allowed != 0]).size:
            break
        masker.push(int(rng.choice(allowed)))
    threads.close()
    return "ended"


def test_a_random_grammar_is_refused_or_each_mask_comes_in_time(compiler):
    # Between these are three whose masks take a second together.
    ended = [walk(compiler, seed) for seed in (*range(6), *range(7, 11), 12, *range(14, 18))]
    assert "too slow" not in ended
    # How many are refused depends on the speed of this machine; some of both kinds must remain, or nothing was tested.
    assert {"ambiguous", "ended"} <= set(ended)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1_000_000))
def test_the_same_many_times(compiler, seed):
    assert walk(compiler, seed) != "too slow"
