"""LLM: the offline interface, which returns outputs in the order of the prompts, or streams output chunks."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from espalier.chat import ChatOptions
from espalier.config import EngineConfig, ResolvedConfig, SpeculationConfig
from espalier.engine.engine import Engine
from espalier.engine.mask_threads import MAX_ABANDONED_THREADS
from espalier.engine_lock import EngineLock
from espalier.errors import EspalierError, clear_error_frames, refuse_unknown_keywords, require_fields, shown
from espalier.grammar.spec import Grammar
from espalier.inputs import ConversationOptions, InputProcessor, Messages, ModelInfo, Prompt, make_detokenizer
from espalier.masking.compile import CompiledGrammar, CompilerBusy, GrammarCompiler
from espalier.request import Output, OutputChunk, Request, ResolvedParams, SamplingParams, sample_seed
from espalier.speculate.drafters.registry import low_acceptance_advice
from espalier.startup.generation_config import end_tokens, generation_config
from espalier.startup.load import Checkpoint, build_engine, find_checkpoint, resolve_config, warn_of_cpu_costs
from espalier.stats import SpeculationStats
from espalier.text import load_tokenizer
from espalier.tool_calls.message_stream import ChatOutput, chat_output

ROUNDS_BEFORE_WARNING = 256
LOW_ACCEPTANCE = 0.05
BYTES_LIKE = bytes | bytearray | memoryview
log = logging.getLogger("espalier")


class LLM:
    """A loaded model.  Threads may share it, because their calls take turns.

    Arguments are the fields of EngineConfig.  Raises EspalierError for bad or unsupported settings."""

    def __init__(self, model: str | Path = "auto", **settings: Any):
        _require_settings(settings)
        self._load_engine(prepare_engine(EngineConfig(model=model, **settings)))

    @classmethod
    def from_prepared(cls, prepared: "PreparedEngine") -> "LLM":
        """Returns an LLM from prepare_engine(...), for callers that check requests before the weights are loaded."""
        llm = cls.__new__(cls)
        llm._load_engine(prepared)
        return llm

    @classmethod
    def from_engine(cls, engine: Engine, config: ResolvedConfig, inputs: InputProcessor) -> "LLM":
        """Returns an LLM that runs `engine`, for models without files.

        config: the configuration that `engine` was built from.  close() also closes `engine`."""
        llm = cls.__new__(cls)
        llm._set_engine(engine, config, inputs)
        return llm

    def _load_engine(self, prepared: "PreparedEngine") -> None:
        num_pages = prepared.config.num_pages if isinstance(prepared.config.num_pages, int) else None
        warn_of_cpu_costs(prepared.config, prepared.resolved, prepared.checkpoint)
        with clear_error_frames():
            self._set_engine(*build_engine(prepared.resolved, prepared.checkpoint, num_pages), prepared.inputs)

    def _set_engine(self, engine: Engine, config: ResolvedConfig, inputs: InputProcessor) -> None:
        self.engine, self.config, self.inputs = engine, config, inputs
        self.model_config = engine.executor.runner.target.config
        self.tokenizer = inputs.tokenizer
        self.generation_config = inputs.model_info.generation_config
        tokenizer = inputs.tokenizer
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer, inputs.model_info.vocab_size)
        # The queue of a request's unread chunks, by request id.  The requests of one call share a queue.
        self._unread_chunks: dict[str, deque[OutputChunk]] = {}
        # A thread holds this lock while it uses the engine and the tokenizer: `generate` holds it for the whole call, a
        # stream for one step.
        self._engine_lock = EngineLock()
        self._num_requests = 0
        self._has_warned = False
        self._is_closed = False

    @refuse_unknown_keywords("LLM.generate", SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_chunk: Callable[[OutputChunk], None] | None = None,
    ) -> list[Output]:
        """Complete all prompts.  Returns outputs in the order of the prompts.

        prompts: text or token ids, one or several.  params: one for all prompts, or one for each.  on_chunk: called
        with each chunk as it is generated.  Raises EspalierError for bad input before any prompt starts.  Later errors
        of a prompt are in Output.error."""
        if on_chunk is not None and not callable(on_chunk):
            raise EspalierError(f"on_chunk={shown(on_chunk)} is not supported; use a function that takes a chunk")
        with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
            groups = self._make_requests(_list_of_prompts(prompts), params, streamed=on_chunk is not None)
            requests = [request for group in groups for request in group]
            texts: dict[str, list[str]] = {request.id: [] for request in requests}
            # If on_chunk raises, closing the generator aborts the requests.  Otherwise they would run on for as long as
            # the caller keeps the exception, whose frames hold the generator.
            with closing(self._run(requests)) as chunks:
                for chunk in chunks:
                    texts[chunk.request_id].append(chunk.text)
                    if on_chunk is not None:
                        on_chunk(chunk)
        outputs = [[_make_output(r, "".join(texts[r.id])) for r in group] for group in groups]
        return [replace(samples[0], choices=samples if len(samples) > 1 else []) for samples in outputs]

    @refuse_unknown_keywords("LLM.stream", SamplingParams)
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputChunk]:
        """Yield the output of one prompt as it is generated.  With n > 1, OutputChunk.index tells the samples apart.

        Raises EspalierError for a bad prompt before the first chunk.  Leaving the loop early aborts the request."""
        _require_prompt("the prompt", prompt)
        if not isinstance(prompt, str) and any(isinstance(part, str | list) for part in prompt):
            raise EspalierError("LLM.stream takes one prompt; for several use LLM.generate, or a stream for each")
        with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
            [group] = self._make_requests([prompt], params, streamed=True)
        return self._run(group)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        on_chunk: Callable[[OutputChunk], None] | None = None,
        **options: Unpack[ConversationOptions],
    ) -> ChatOutput:
        """Generate the assistant's answer to a conversation, with the model's chat template.

        messages: {"role", "content"} mappings.  The text of a special token inside a message stays text.  options:
        tools, tool_choice and others (espalier/inputs.py:ConversationOptions, espalier/chat.py:ChatOptions)."""
        with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
            prompt, resolved, plan = self.inputs.prepare_conversation(messages, params, **options)
        output = self.generate([prompt], resolved, on_chunk)[0]
        with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
            stream: Any = partial(make_detokenizer, self.tokenizer, prompt, resolved) if resolved.output_form else None
            return chat_output(plan, prompt, output, stream)

    def chat_prompt(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Returns the token ids of a conversation.  options: see chat.ChatOptions.  Raises EspalierError."""
        with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
            return self.inputs.chat_tokens(messages, self.inputs.require_text_fits, **options)

    def close(self) -> None:
        """Free the engine's memory, once no other thread is using the engine.  A second call does nothing.

        A stream that has not ended raises EspalierError at its next step."""
        with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
            if not self._is_closed:
                self._is_closed = True
                self.engine.close()

    def __repr__(self) -> str:
        config = self.config
        tree = config.layout.tree
        drafts = f"{config.algorithm}, {tree}" if tree.steps else str(tree)
        return f"<LLM {config.model}: {drafts}; {config.dtype} on {config.device}{', closed' * self._is_closed}>"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EspalierError("this LLM is closed; make a new one")

    # From prompts to requests

    def _make_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        streamed: bool,
    ) -> list[list[Request]]:
        """Returns the n requests of each prompt, checked but not queued.  streamed: see new_requests."""
        self._require_open()
        params_per_prompt = _params_per_prompt(params, len(prompts))
        checked_prompts: list[tuple[list[int], ResolvedParams]] = []
        for i, (prompt, prompt_params) in enumerate(zip(prompts, params_per_prompt, strict=True)):
            with number_prompt_errors(i, len(prompts)):
                tokens = self.inputs.prompt_tokens(prompt)
                self.inputs.require_room(tokens, prompt_params)
                checked_prompts.append((tokens, self.inputs.resolve(prompt_params)))
        # All compilations start before the first result is awaited, so that grammars compile in parallel.
        grammar_futures = [self.start_compile(resolved.grammar) for _, resolved in checked_prompts]
        groups = []
        for i, ((tokens, resolved), grammar) in enumerate(zip(checked_prompts, grammar_futures, strict=True)):
            with number_prompt_errors(i, len(prompts)):
                compiled = None if grammar is None else grammar.result()
                groups.append(self.new_requests(tokens, resolved, grammar=compiled, streamed=streamed))
        return groups

    def start_compile(self, grammar: Grammar | None) -> Future[CompiledGrammar] | None:
        """Compiles the grammar in a thread.  Returns None without a grammar.  The future's error is EspalierError."""
        if grammar is None:
            return None
        assert self.grammars is not None, "a model without a tokenizer refuses grammars"
        if self.engine.num_abandoned_grammars >= MAX_ABANDONED_THREADS:
            refused: Future[CompiledGrammar] = Future()
            refused.set_exception(CompilerBusy("grammars of earlier requests take too long to end; retry later"))
            return refused
        return self.grammars.submit(grammar)

    def new_requests(
        self,
        prompt: list[int],
        params: ResolvedParams,
        name: str | None = None,
        priority: int = 0,
        detokenize: bool = True,
        grammar: CompiledGrammar | None = None,
        client: str = "",
        streamed: bool = False,
    ) -> list[Request]:
        """Returns the n requests of one prompt, not queued.

        Requests 1 to n - 1 wait until request 0 has cached the prompt.

        name: prefix of the request ids, by default the prompt's number.  detokenize: whether chunks have text.
        grammar: `params.grammar`, compiled.  client: the client's name; the requests of several clients take turns.
        streamed: whether the user reads the tokens while they are generated.  priority: lower runs first."""
        number = self._num_requests
        self._num_requests += 1
        seed = sample_seed(self.config.seed, number + 1) if params.seed is None else params.seed
        requests: list[Request] = []
        after = None if params.grammar is None else params.grammar.after
        for i in range(params.n):
            request = Request(
                id=f"{number if name is None else name}.{i}",
                prompt=prompt,
                params=params,
                seed=sample_seed(seed, i),
                arrival_index=number,
                priority=priority,
                stop_ids=frozenset(params.stop_token_ids),
                detokenizer=make_detokenizer(self.tokenizer, prompt, params) if detokenize else None,
                masker=None if grammar is None else grammar.masker(params.stop_token_ids, after),
                index=i,
                prefix_leader=requests[0] if requests else None,
                client=client,
                streamed=streamed,
            )
            requests.append(request)
        return requests

    # From requests to chunks

    def _queue_requests(self, requests: list[Request], unread_chunks: deque[OutputChunk]) -> None:
        """Passes requests to the engine.  unread_chunks: receives the chunks of all these requests."""
        first, last = (requests[0].arrival_index, requests[-1].arrival_index) if requests else (0, -1)
        for request in requests:
            self._unread_chunks[request.id] = unread_chunks
            with (
                number_prompt_errors(request.arrival_index - first, last - first + 1),
                self._engine_lock.uninterrupted_turn(),
            ):
                self.engine.add(request)

    def _run(self, requests: list[Request]) -> Generator[OutputChunk, None, None]:
        """Queues the requests, and yields their chunks until all requests have ended.  If the generator is closed
        earlier, the requests are aborted."""
        unread_chunks: deque[OutputChunk] = deque()
        try:
            with self._engine_lock.run_postponed_after(), self._engine_lock.lock:
                self._queue_requests(requests, unread_chunks)
            # Not request.is_done, because another stream's step may set it before the last chunk is read here.
            num_unfinished = len(requests)
            while num_unfinished:
                if not unread_chunks:
                    self._step(unread_chunks)
                while unread_chunks:
                    chunk = unread_chunks.popleft()
                    num_unfinished -= chunk.finish_reason is not None
                    yield chunk
        finally:
            self._engine_lock.run_when_free(partial(self._abort_unfinished, requests))

    def _step(self, unread_chunks: Sequence[OutputChunk] = ()) -> None:
        """Runs one engine step, unless another thread's step filled `unread_chunks` while this thread waited.

        Ctrl-C takes effect after the step, because a result that is half read would be lost."""
        with self._engine_lock.uninterrupted_turn():
            if unread_chunks:
                return
            self._require_open()
            for chunk in self.engine.step():
                if chunk.request_id in self._unread_chunks:
                    self._unread_chunks[chunk.request_id].append(chunk)
            self._warn_of_low_acceptance()

    def step(self) -> list[OutputChunk]:
        """Run one engine step, for callers that queue requests themselves.  Returns the step's chunks."""
        chunks = self.engine.step()
        self._warn_of_low_acceptance()
        return chunks

    def _abort_unfinished(self, requests: list[Request]) -> None:
        """Abort the requests that the engine has not ended, and drop their unread chunks."""
        for request in requests:
            self.engine.abort(request.id)
        while not self._is_closed and any(not r.is_done and r.id in self.engine.requests for r in requests):
            self._step()
        for request in requests:
            self._unread_chunks.pop(request.id, None)

    def _warn_of_low_acceptance(self) -> None:
        totals = self.engine.totals
        if self._has_warned or not is_acceptance_low(totals):
            return
        self._has_warned = True
        log.warning(
            "the accept length is %.2f after %d rounds with a draft (1.00 is plain decoding); %s, or set "
            "speculation=None",
            totals.accept_length,
            totals.rounds_tried_by_depth[0],
            low_acceptance_advice(self.config.algorithm),
        )


@dataclass(frozen=True)
class PreparedEngine:
    """The parts of an LLM that need no weights.

    config: the user's configuration.  resolved: the configuration with every "auto" decided.  inputs: checks requests.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    resolved: ResolvedConfig
    inputs: InputProcessor


def prepare_engine(config: EngineConfig) -> PreparedEngine:
    """Find the model's files and resolve the configuration, without loading weights.  Raises EspalierError."""
    checkpoint = find_checkpoint(config)
    resolved = resolve_config(config, checkpoint)
    path, target = checkpoint.target_path, checkpoint.target
    model_info = ModelInfo(
        model=resolved.model,
        vocab_size=target.vocab_size,
        max_context=resolved.layout.max_context,
        eos_token_ids=end_tokens(path, target),
        generation_config=generation_config(path),
        max_position=target.max_position,
        sources=resolved.sources,
    )
    return PreparedEngine(
        config, checkpoint, resolved, InputProcessor(model_info, load_tokenizer(path, target.vocab_size))
    )


def is_acceptance_low(totals: SpeculationStats) -> bool:
    """Whether almost no draft token is accepted, after at least ROUNDS_BEFORE_WARNING rounds."""
    if not totals.rounds_tried_by_depth or totals.rounds_tried_by_depth[0] < ROUNDS_BEFORE_WARNING:
        return False
    return totals.rounds_accepted_by_depth[0] < LOW_ACCEPTANCE * totals.rounds_tried_by_depth[0]


def _require_settings(settings: Mapping[str, Any]) -> None:
    """Refuse an unknown setting, also one of SamplingParams or SpeculationConfig.  Raises EspalierError."""
    engine = {f.name for f in fields(EngineConfig)}
    for owner in (SamplingParams, SpeculationConfig):
        if names := settings.keys() & {f.name for f in fields(owner)} - engine:
            raise EspalierError(f"LLM has no {min(names)!r}; pass it in {owner.__name__}")
    require_fields("LLM", EngineConfig, settings)


def _list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts as a list.  prompts: one text, one list of token ids, or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, BYTES_LIKE) or not isinstance(prompts, Sequence):
        raise EspalierError(
            f"prompts={shown(prompts)} is not supported; use text, a list of texts or lists of token ids"
            + _array_remedy(prompts)
        )
    if prompts and all(isinstance(part, int) for part in prompts):
        return [prompts]  # type: ignore[list-item]
    for i, prompt in enumerate(prompts):
        _require_prompt(f"prompt {i}", prompt)
    return list(prompts)  # type: ignore[arg-type]


def _require_prompt(name: str, prompt: Any) -> None:
    """Refuse bytes, and a prompt that is neither text nor a sequence.  name: the prompt's, for the EspalierError."""
    if isinstance(prompt, BYTES_LIKE) or not isinstance(prompt, str | Sequence):
        raise EspalierError(f"{name} is {shown(prompt)}; use text or a list of token ids{_array_remedy(prompt)}")


def _array_remedy(value: Any) -> str:
    """Returns the advice to use .tolist() if `value` is an array, a tensor or one of their numbers; else ""."""
    return ", as .tolist() returns" if hasattr(value, "tolist") else ""


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise EspalierError(f"params={shown(params)} is not supported; use SamplingParams(...) or a list of them")
    if len(params) != num_prompts:
        raise EspalierError(f"{len(params)} SamplingParams for {num_prompts} prompts; use one for all, or one for each")
    return list(params)


@contextmanager
def number_prompt_errors(index: int, num_prompts: int) -> Iterator[None]:
    """Add the prompt's number, `index`, to errors if there are several prompts."""
    try:
        yield
    except EspalierError as error:
        if num_prompts == 1:
            raise
        raise EspalierError(f"prompt {index} of {num_prompts}: {error}") from None


def _make_output(request: Request, text: str) -> Output:
    if request.error is not None:
        log.warning("request %s failed: %s", request.id, request.error)
    return Output(
        text=text,
        token_ids=request.output,
        finish_reason=request.finish_reason or "abort",
        stop_reason=request.stop_reason,
        logprobs=None if request.params.logprobs is None else request.logprobs,
        prompt_logprobs=request.prompt_logprobs_to_report,
        from_draft=request.from_draft,
        usage=request.usage,
        speculation=request.stats,
        error=request.error,
    )
