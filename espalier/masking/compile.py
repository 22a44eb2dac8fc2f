"""Compiles grammars with xgrammar in threads, measures the time of their masks, and keeps the compiled grammars.

A request waits for its grammar until MAX_WAIT_S after the compilation began.  Then the request is refused with
CompilerBusy, because a high load may be the cause.  This compilation is then called "given up".  Its thread cannot be
ended, so the compilation goes on, and a later request with the same grammar gets its result.  If a compilation has run
for MAX_COMPILE_S, later requests with this grammar are refused with another error, until the compilation ends.  While
MAX_RUNNING_COMPILATIONS given-up compilations run, no other compilation can begin, so waiting and new grammars are
refused with CompilerBusy.  Compiling releases the GIL, so other requests go on.
"""

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier.cores import lower_priority, physical_cores, wait_at_exit
from espalier.errors import EspalierError, one_line
from espalier.grammar.finite import require_finite_rules
from espalier.grammar.spec import Grammar
from espalier.grammar.tag import REWRITE_BY_KIND, ebnf_parts
from espalier.masking.masker import GrammarMasker, allowed_tokens
from espalier.masking.trial import try_masks, try_with_byte_tokens
from espalier.text import Tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_WAIT_S = 10.0
MAX_COMPILE_S = 60.0
# The largest number of compilations at the same time, given-up compilations included.
MAX_RUNNING_COMPILATIONS = 4
# The most threads of one compilation.
MAX_THREADS = 8
# Memory limits, in bytes: of one grammar, and of all grammars that are kept.
MAX_GRAMMAR_BYTES = 256 * 2**20
MAX_KEPT_BYTES = 1024 * 2**20
MAX_KEPT_GRAMMARS = 1024
THREAD_NAME = "espalier-grammar"
# Matches the time and the source location at the start of xgrammar's error texts.
ERROR_LOCATION = re.compile(r"^\[?[\d:]*\]? ?/\S+: (?:Check failed: \S+ is false: )?")

CacheKey = tuple[str, str, bool]


class CompilerBusy(EspalierError):
    """A grammar cannot be compiled now, but a retry may succeed."""


class CompiledGrammar:
    """A grammar for one tokenizer.  xgrammar_form: xgrammar's compiled form.  num_bytes: the memory that it takes."""

    def __init__(self, xgrammar_form: "xgrammar.CompiledGrammar", tokenizer: Tokenizer, vocab_size: int):
        self.xgrammar_form = xgrammar_form
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.num_bytes = int(xgrammar_form.memory_size_bytes)

    def masker(self, end_tokens: Sequence[int], start_marker: str | None = None) -> GrammarMasker:
        """Returns the masker of one output.  end_tokens: stop tokens, which are allowed only where the grammar may end.
        start_marker: the text after which the grammar applies; None if it applies from the start."""
        return GrammarMasker(self.xgrammar_form, self.vocab_size, end_tokens, start_marker, self.tokenizer.bytes_of)


class GrammarCompiler:
    """Compiles grammars for one model.  Thread-safe.

    wait_s: how long a request waits for one compilation.  time_limit_s: how long a compilation may take.  Both times
    count from the start of the compilation.  num_given_up: the number of given-up compilations that still run."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, wait_s: float = MAX_WAIT_S, time_limit_s: float = MAX_COMPILE_S
    ):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.wait_s = wait_s
        self.time_limit_s = time_limit_s
        self.num_given_up = 0
        self._futures: OrderedDict[CacheKey, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._running_compilations = threading.BoundedSemaphore(MAX_RUNNING_COMPILATIONS)
        self._compilers: dict[bool, tuple[xgrammar.GrammarCompiler, np.ndarray]] = {}

    def submit(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Starts to compile a grammar, or returns the future of an earlier call with the same grammar.

        The future raises EspalierError with the reason: CompilerBusy if a retry may succeed."""
        key = (grammar.kind, grammar.spec, grammar.strict)
        with self._lock:
            if (earlier := self._futures.get(key)) is not None:
                self._futures.move_to_end(key)
                return earlier
            future: Future[CompiledGrammar] = Future()
            if self.num_given_up == MAX_RUNNING_COMPILATIONS:
                future.set_exception(_busy_error())
                return future
            self._futures[key] = future
        threading.Thread(
            target=self._run_compilation, args=(key, grammar, future), name=THREAD_NAME, daemon=True
        ).start()
        return future

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar and wait for it.  Raises EspalierError with the reason."""
        return self.submit(grammar).result()

    def _run_compilation(self, key: CacheKey, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        """Compiles a grammar in this thread and sets the result of `future`.  key: of the cache entry."""
        with self._running_compilations:
            if future.done():  # the grammar was refused while it waited for this semaphore
                return
            lower_priority(threading.get_native_id())  # running streams come first
            timer = _call_after(self.wait_s, self._give_up_waiting, key, future)
            try:
                outcome: CompiledGrammar | EspalierError = self._compile_and_try(grammar)
            except EspalierError as error:
                outcome = error
            except Exception as error:  # xgrammar raises RuntimeError, and types of its own
                reason = ERROR_LOCATION.sub("", one_line(error)).rstrip(".")
                outcome = EspalierError(f"the grammar cannot be compiled ({reason}); correct it")
            timer.cancel()
            with self._lock:
                if future.done():
                    self.num_given_up -= 1
                    future = self._futures[key] = Future()
                if isinstance(outcome, EspalierError):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
                self._drop_oldest_grammars()

    def _give_up_waiting(self, key: CacheKey, future: "Future[CompiledGrammar]") -> None:
        """Refuses the requests that wait for the grammar `key`, if it is still compiled.  The compilation goes on."""
        with self._lock:
            if future.done():
                return
            self.num_given_up += 1
            future.set_exception(
                CompilerBusy(
                    f"the grammar is not compiled after {self.wait_s:g} s, and its compilation goes on; retry later, "
                    "or use a simpler one"
                )
            )
            if self.num_given_up == MAX_RUNNING_COMPILATIONS:
                self._refuse_waiting_grammars()
        _call_after(self.time_limit_s - self.wait_s, self._refuse_grammar, key, future)

    def _refuse_grammar(self, key: CacheKey, given_up_future: "Future[CompiledGrammar]") -> None:
        """Refuse a grammar until its given-up compilation ends.  Does nothing if the compilation has ended."""
        with self._lock:
            if self._futures.get(key) is given_up_future:
                self._futures[key] = Future()
                why = f"the grammar takes more than {self.time_limit_s:g} s to compile; use a simpler one"
                self._futures[key].set_exception(EspalierError(why))

    def _refuse_waiting_grammars(self) -> None:
        """Refuses the waiting grammars.  Their compilations could begin only when a running one ends, which may be
        never."""
        for key, waiting in [(key, future) for key, future in self._futures.items() if not future.done()]:
            waiting.set_exception(_busy_error())
            del self._futures[key]

    def _drop_oldest_grammars(self) -> None:
        done_futures = {key: future for key, future in self._futures.items() if future.done()}
        sizes = {key: 0 if future.exception() else future.result().num_bytes for key, future in done_futures.items()}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= MAX_KEPT_BYTES and len(self._futures) <= MAX_KEPT_GRAMMARS:
                return
            del self._futures[key]
            total -= size

    # With xgrammar

    def _compile_and_try(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar and times its masks.  Raises EspalierError if it cannot be used."""
        # Compile for single bytes first, because compiling an ambiguous grammar for all tokens may take hours.
        try_with_byte_tokens(lambda compiler: compile_with_xgrammar(compiler, grammar))
        compiler, num_bytes = self._compiler(grammar.kind == "structural_tag")
        xgrammar_form = compile_with_xgrammar(compiler, grammar)
        if xgrammar_form.memory_size_bytes > MAX_GRAMMAR_BYTES:
            raise EspalierError(
                f"the grammar needs {xgrammar_form.memory_size_bytes / 2**20:.0f} MiB and may have at most "
                f"{MAX_GRAMMAR_BYTES // 2**20}; use a simpler one"
            )
        compiled = CompiledGrammar(xgrammar_form, self.tokenizer, self.vocab_size)
        # A masker needs an end token, and does not allow this token as text.  So two end tokens are tried, one by one.
        if not any(allowed_tokens(compiled.masker((end,)).root_mask()).size for end in (0, 1)):
            raise EspalierError("the grammar allows no text that this model's tokens can spell; change it")
        try_masks(xgrammar_form, num_bytes)
        return compiled

    def _compiler(self, spells_special_tokens: bool) -> "tuple[xgrammar.GrammarCompiler, np.ndarray]":
        """Returns the compiler, and the number of bytes of each token.

        spells_special_tokens: whether the grammar may spell special tokens, as structural tags do."""
        with self._vocabulary_lock:
            if spells_special_tokens not in self._compilers:
                import xgrammar

                vocabulary = token_bytes(copy.deepcopy(self.tokenizer), self.vocab_size, spells_special_tokens)
                # Each output sets its own stop tokens.  A stop token that is set here would never be allowed as text.
                info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[])
                threads = min(physical_cores(), MAX_THREADS)
                compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
                self._compilers[spells_special_tokens] = compiler, np.array([len(token) for token in vocabulary])
            return self._compilers[spells_special_tokens]


def compile_with_xgrammar(compiler: "xgrammar.GrammarCompiler", grammar: Grammar) -> "xgrammar.CompiledGrammar":
    """Compile a grammar with xgrammar.  Raises EspalierError, or an error of xgrammar."""
    text = REWRITE_BY_KIND[grammar.kind](grammar)
    if grammar.kind in ("json_object", "json_schema"):
        # Only one form of white space is allowed.  If any white space were allowed, a model could write it endlessly.
        return compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
    is_tag = grammar.kind == "structural_tag"
    for part in ebnf_parts(json.loads(text)) if is_tag else [text] if grammar.kind == "ebnf" else []:
        require_finite_rules(part)
    return compiler.compile_structural_tag(text) if is_tag else compiler.compile_grammar(text)


def token_bytes(tokenizer: Tokenizer, vocab_size: int, spells_special_tokens: bool) -> list[bytes]:
    """Returns the bytes of each token id; b"" for an id that a grammar never allows.

    spells_special_tokens: if True, the bytes of a special token are its name; if False, no grammar allows special
    tokens, because the output text omits them."""
    vocabulary = []
    for token in range(vocab_size):
        text = tokenizer.bytes_of(token) if token < tokenizer.num_tokens else None
        vocabulary.append(text.bytes if text is not None and (text.is_text or spells_special_tokens) else b"")
    return vocabulary


wait_at_exit(lambda thread: thread.name == THREAD_NAME)


def _call_after(seconds: float, call: Callable[..., None], *arguments: Any) -> threading.Timer:
    """Calls call(*arguments) in a new thread after `seconds`.  The returned timer can cancel this."""
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _busy_error() -> CompilerBusy:
    return CompilerBusy("earlier grammars still compile; retry later")
