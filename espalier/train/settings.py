"""The settings of the trainer's commands, with limits.  The command line has a flag for each field.

A class refuses values that are invalid for every target and all data.  `require_target` and `espalier/train/windows.py`
check values that depend on the target and the data.  PyTorch is not imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from espalier.config import check_fields, option
from espalier.errors import EspalierError
from espalier.terminal.flags import flag_of

HiddenForm = Literal["chain", "target"]
FORMS: tuple[str, ...] = get_args(HiddenForm)
# The same values as in espalier/models/block.py, which cannot be imported here because it imports PyTorch.
EdgeKind = Literal["vanilla", "gated", "rnn"]
EDGE_KINDS: tuple[str, ...] = get_args(EdgeKind)
# The lengths, in tokens, of the prompts that the target continues.  Batches have these lengths in turn.
PROMPT_LENGTHS = (48, 96, 192, 384)
# The largest seed of a run.  own_text.py and windows.py multiply it by factors, and the results must fit 64 bits.
MAX_SEED = 10**8
# The maximum depth of a draft in the engine.
MAX_DEPTH = 256


def length_advice(prompt_tokens: int, max_positions: int) -> str:
    """Returns the advice in an error message: how many tokens may follow a prompt in a target of max_positions."""
    if prompt_tokens >= max_positions:
        return "use shorter prompts, or another target"
    return f"use at most {max_positions - prompt_tokens}, or shorter prompts"


@dataclass(frozen=True)
class OwnTextConfig:
    """The settings of the target's own text: text that the target generates as training data for its draft.
    Fields with the option `free` may have other values when a run is continued."""

    continuations: int = option(
        "number of prompts that the target continues: the data's conversations in turn, or pieces of its documents",
        40960,
        low=1,
    )
    continuation_tokens: int = option("largest number of tokens of a continuation", 256, low=1)
    generate_batch: int = option("number of prompts that the target continues between two saves", 256, low=1, free=True)
    text_seconds: int | None = option(
        "seconds after which no further prompts are continued; by default no limit", None, low=1, free=True
    )
    sampled_share: float = option(
        "share of the batches of prompts, 0 to 1, that is sampled at temperature 1; the others are greedy",
        0.35,
        low=0,
        high=1,
    )
    seed: int = option(
        "seed of every random choice; the texts of several seeds add up in the work folder", 0, low=0, high=MAX_SEED
    )

    def __post_init__(self) -> None:
        check_fields(self, flag_of)

    def prompt_batches(self) -> list[tuple[int, int]]:
        """Returns (length of the prompts, largest number of prompts) of the batches, for each prompt length in use."""
        num_left = [self.continuations - self.generate_batch * i for i in range(len(PROMPT_LENGTHS))]
        sizes = [min(self.generate_batch, count) for count in num_left]
        return [(length, size) for length, size in zip(PROMPT_LENGTHS, sizes, strict=True) if size > 0]

    def require_target(self, target_config: Mapping[str, Any]) -> None:
        """Raises EspalierError if the settings do not fit a target.  target_config: the target's config.json."""
        if self.continuation_tokens >= (positions := int(target_config["max_position_embeddings"])):
            raise EspalierError(
                f"--continuation-tokens={self.continuation_tokens} is too long: the target has {positions} positions, "
                f"for a prompt too; use at most {positions - 1}"
            )


@dataclass(frozen=True)
class TrainConfig(OwnTextConfig):
    """The settings of all training runs."""

    intermediate_size: int | None = option("width of the draft's MLP; by default the target's", None, low=1)
    length: int = option("tokens of a row of a batch", 1024, low=2)
    batch: int = option("rows of a batch", 32, low=1)
    num_tokens: float = option(
        "number of tokens that the run trains on; text that is read twice counts twice", 2.5e8, above=0, free=True
    )
    max_seconds: int | None = option(
        "seconds after which the run ends, unless --num-tokens ends it before; the learning rate is zero by then; "
        "the first step, which compiles, is not counted; by default no limit",
        None,
        low=1,
        free=True,
    )
    decay: float = option("weight of a depth's loss, relative to that of the depth before it", 0.9, low=0, high=10)
    own_share: float = option(
        "share of a batch's rows, 0 to 1, that the target generated; the other rows are --data", 0.6, low=0, high=1
    )
    matrix_lr: float = option(
        "highest learning rate of the matrices between hidden states, which Muon trains", 4e-3, above=0, high=1
    )
    other_lr: float = option("highest learning rate of the other weights, which AdamW trains", 2e-3, above=0, high=1)
    weight_decay: float = option("weight decay of the matrices that Muon trains", 0.05, low=0, high=10)
    log_every: int = option("steps between two lines with the loss", 50, low=1, free=True)
    save_every: int = option(
        "steps between two saved states, from which an interrupted run goes on", 500, low=1, free=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens < self.batch * self.length:
            raise EspalierError(
                f"--num-tokens={self.num_tokens:g} is less than one batch of --batch {self.batch} rows of --length "
                f"{self.length} tokens; use {self.batch * self.length} or more"
            )

    @property
    def own_rows(self) -> int:
        """How many rows of a batch are text that the target generated."""
        return round(self.own_share * self.batch)

    def require_target(self, target_config: Mapping[str, Any]) -> None:
        """Raises EspalierError if the settings do not fit a target.  target_config: its config.json."""
        super().require_target(target_config)
        if self.length > (positions := int(target_config["max_position_embeddings"])):
            raise EspalierError(f"--length={self.length} is more than the target's positions; use at most {positions}")


@dataclass(frozen=True)
class Eagle3Config(TrainConfig):
    """The settings of `espalier train eagle3`."""

    draft_vocab: int | None = option(
        "number of token ids that the draft can propose, those that the target generates most often; at most all of "
        "them; by default the smallest power of two, 4096 or more, with a share of 0.995 of the target's greedy tokens",
        None,
        low=1,
    )
    ttt_steps: int = option("number of depths that are trained", 6, low=1, high=MAX_DEPTH)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_depths(self.ttt_steps, self.length)


@dataclass(frozen=True)
class MtpConfig(TrainConfig):
    """The settings of `espalier train mtp`."""

    layers: int = option("number of MTP layers", 1, low=1, high=MAX_DEPTH)
    form: HiddenForm = field(
        default="chain",
        metadata={
            "help": "what layer k reads: chain, the output of layer k - 1; target, the target's hidden state",
            "choices": FORMS,
        },
    )
    ttt_steps: int = option(
        "number of depths that are trained; depths beyond --layers use the last layer again", 3, low=1, high=MAX_DEPTH
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_depths(self.ttt_steps, self.length)
        if self.layers > self.ttt_steps:
            raise EspalierError(
                f"--layers={self.layers} is more than --ttt-steps {self.ttt_steps}: every layer needs a depth that "
                f"trains it; use --ttt-steps {self.layers} or more, or fewer layers"
            )


@dataclass(frozen=True)
class BlockConfig(TrainConfig):
    """The settings of `espalier train block`."""

    layers: int = option("number of the draft's layers", 3, low=1, high=MAX_DEPTH)
    block_size: int = option("number of tokens that one pass of the draft proposes", 8, low=2, high=MAX_DEPTH)
    edge_rank: int = option("rank of the Markov head, which scores a token given earlier tokens; 0: none", 64, low=0)
    edge_kind: EdgeKind = field(
        default="vanilla",
        metadata={
            "help": "what the Markov head reads: vanilla, the token before; gated, the draft's hidden state too; rnn, "
            "the hidden state and all tokens of the block before it",
            "choices": EDGE_KINDS,
        },
    )
    anchors: int = option("number of blocks that are trained in each row of a batch", 64, low=1)
    mask_token: int = option(
        "token id that the draft reads in place of a token that is to be proposed; -1: the target's last one",
        -1,
        low=-1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size >= self.length:
            raise EspalierError(
                f"--block-size={self.block_size} does not fit into --length {self.length}; use 2 to {self.length - 1}, "
                "or longer rows"
            )
        if self.anchors > (places := self.length - self.block_size + 1):
            raise EspalierError(
                f"--anchors={self.anchors} is more than a row has places for: --length {self.length} has {places} for "
                f"blocks of {self.block_size}; use at most {places}, or longer rows"
            )
        if self.edge_kind != "vanilla" and not self.edge_rank:
            raise EspalierError(f"--edge-kind={self.edge_kind} needs a Markov head; use --edge-rank 1 or more")

    def require_target(self, target_config: Mapping[str, Any]) -> None:
        """Raises EspalierError if the settings do not fit a target.  target_config: its config.json."""
        super().require_target(target_config)
        if self.mask_token >= (vocab_size := int(target_config["vocab_size"])):
            raise EspalierError(
                f"--mask-token={self.mask_token} is no token of the target; use 0 to {vocab_size - 1}, or -1"
            )


def require_depths(ttt_steps: int, length: int) -> None:
    """Raises EspalierError if some depths would be beyond the end of every row."""
    if ttt_steps > length:
        raise EspalierError(
            f"--ttt-steps={ttt_steps} does not fit into --length {length}; use at most {length}, or longer rows"
        )


def fixed_settings(config: OwnTextConfig, kind: type[OwnTextConfig]) -> dict[str, str | None]:
    """Returns {flag: value} of the fields of `kind` that must not change when a run is continued.  kind: the class of
    `config`, or a base class."""
    values = {f.name: getattr(config, f.name) for f in fields(kind) if not f.metadata.get("free")}
    return {flag_of(name): None if value is None else str(value) for name, value in values.items()}
