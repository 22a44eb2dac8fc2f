"""The conversations of a dataset as requests of an engine: by the model's chat template, or as text without one."""

from collections.abc import Sequence

from espalier.bench.traffic import SWITCHES, Conversation, messages, plain_prompt
from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import Request, SamplingParams


class Spoken:
    """As load.py:Talks.  thinking: the switch of the chat template; None: as the template has it."""

    def __init__(
        self, llm: LLM, talks: Sequence[Conversation], temperature: float, thinking: bool | None, think: float
    ) -> None:
        """Raises EspalierError if the model has no tokenizer, or a conversation may not fit its context."""
        if llm.tokenizer is None:
            raise EspalierError("--dataset is text, and this model has no tokenizer; leave --dataset out")
        self.llm, self.tokenizer, self.talks = llm, llm.tokenizer, talks
        self.temperature, self.think = temperature, think
        self.has_template = bool(llm.tokenizer.template_text)
        shown = [name for name in SWITCHES if llm.tokenizer.shows(name)]
        if thinking is not None and not shown:
            raise EspalierError(
                f"--thinking: this model's chat template reads none of {', '.join(SWITCHES)}; leave it out"
            )
        self.variables = None if thinking is None else {shown[0]: thinking}
        for talk in talks:
            self._require_room(talk)

    @property
    def count(self) -> int:
        return len(self.talks)

    def category(self, number: int) -> str:
        return self.talks[number].category

    def turns(self, number: int) -> int:
        return len(self.talks[number].turns)

    def next(self, number: int, before: Sequence[Request]) -> Request:
        talk, turn = self.talks[number], len(before)
        prompt = self._prompt(talk, [self.tokenizer.decode(request.output) for request in before])
        params = SamplingParams(
            temperature=self.temperature, max_tokens=talk.turns[turn].max_tokens, seed=1000 * number + turn
        )
        [request] = self.llm.group(prompt, self.llm.inputs.resolve(params), detokenize=False)
        return request

    def _prompt(self, talk: Conversation, answers: Sequence[str]) -> list[int]:
        if not self.has_template:
            return self.tokenizer.encode(plain_prompt(talk, answers))
        return self.llm.chat_prompt(messages(talk, answers), chat_template_kwargs=self.variables)

    def _require_room(self, talk: Conversation) -> None:
        room = self.llm.config.layout.max_context
        prompt = self._prompt(talk, [""] * (len(talk.turns) - 1))
        needed = len(prompt) + sum(turn.max_tokens for turn in talk.turns)
        if needed > room:
            raise EspalierError(
                f"conversation {talk.number + 1} of --dataset may have {needed} tokens with its answers, and "
                f"max_context={room}; raise --max-context, lower --output, or leave it out of the file"
            )
