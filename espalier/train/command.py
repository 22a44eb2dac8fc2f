"""Train a draft for your target, measure a draft, or make the bundled model again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import numpy as np

from espalier.startup.checkpoints import find_draft, find_target
from espalier.train import interrupted
from espalier.train.block import BlockConfig, evaluate_block, is_block, train_block
from espalier.train.bundle import STAGES, BundleFolders, make_bundle
from espalier.train.checkpoint import is_eagle3, read_config
from espalier.train.draft_run import TrainConfig, training_device
from espalier.train.eagle3 import Eagle3Config, train_eagle3
from espalier.train.evaluate import evaluate_draft
from espalier.train.mtp import MtpConfig, evaluate_mtp, train_mtp
from espalier.train.mtp_checkpoint import is_mtp
from espalier.train.own_text import OwnTextConfig, write_own_text
from espalier.train.target import FrozenTarget

BAD_INPUT = 2
TARGET_HELP = "a Llama, Qwen or Mistral model: a directory, a Hugging Face id, or 'bundled'"
DATA_HELP = 'JSON lines with "text" or "token_ids", or a .npy of token ids [num_tokens]'
OUT_HELP = "where the draft goes; a finished draft of the same kind there is replaced, another model refused"


@dataclass(frozen=True)
class Trainer:
    """A kind of draft.

    train: (target's directory, token ids, out, work, config) -> figures; holds: whether a directory has such a draft;
    evaluate: (draft's directory, target's directory, prompts, tokens continued).
    """

    help: str
    config: type[TrainConfig]
    train: Callable[[Path, np.ndarray, Path, Path, Any], dict[str, float]]
    holds: Callable[[Path], bool]
    evaluate: Callable[[Path, Path, list[list[int]], int], Any]


TRAINERS = {
    "eagle3": Trainer(
        *("train an EAGLE-3 draft for a target", Eagle3Config, train_eagle3, is_eagle3, evaluate_draft),
    ),
    "mtp": Trainer(
        *("train an MTP head of one or several layers for a target", MtpConfig, train_mtp, is_mtp, evaluate_mtp),
    ),
    "block": Trainer(
        *("train a block draft (DSpark's form) for a target", BlockConfig, train_block, is_block, evaluate_block),
    ),
}


def add_config_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for each field of a config dataclass, with the field's help text."""
    hints = get_type_hints(config)
    for item in fields(config):
        hint = hints[item.name]
        named = get_args(hint) if get_origin(hint) is Literal else None
        kind, metavar = (str, None) if named else (float, "X") if hint is float else (int, "N")
        about = item.metadata["help"]
        if item.default is not None:
            about += f" [{item.default:g}]" if kind is not str else f" [{item.default}]"
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, choices=named, default=item.default, metavar=metavar, help=about)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage: that of `eagle3` has twenty."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m espalier.train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, trainer in TRAINERS.items():
        train = commands.add_parser(name, help=trainer.help)
        train.add_argument("--target", required=True, help=TARGET_HELP)
        train.add_argument("--data", type=Path, required=True, help=DATA_HELP)
        train.add_argument("--out", type=Path, required=True, help=OUT_HELP)
        train.add_argument("--work", type=Path, help="where an unfinished run keeps its state [OUT/work]")
        add_config_flags(train, trainer.config)
    own_text = commands.add_parser("own-text", help="continue text by the target, for all runs of a work folder")
    own_text.add_argument("--target", required=True, help=TARGET_HELP)
    own_text.add_argument("--data", type=Path, required=True, help=DATA_HELP)
    own_text.add_argument("--work", type=Path, required=True, help="the folder; texts of several seeds add up there")
    add_config_flags(own_text, OwnTextConfig)
    evaluate = commands.add_parser("evaluate", help="accept lengths of a draft on the target's own greedy text")
    evaluate.add_argument("--target", required=True, help=TARGET_HELP)
    evaluate.add_argument("--draft", required=True, help="the draft: a directory, a Hugging Face id, or 'bundled'")
    evaluate.add_argument("--data", type=Path, required=True, help="JSON lines with prompts, as for training")
    evaluate.add_argument("--max-tokens", type=int, default=200, help="tokens continued after each prompt [200]")
    bundled = commands.add_parser("bundled", help="make the bundled model again")
    bundled.add_argument("--out", type=Path, required=True, help="where target, draft, prompts and card go")
    bundled.add_argument("--work", type=Path, help="corpus, packed tokens and unfinished runs [OUT/work]")
    bundled.add_argument("--site-packages", type=Path, action="append", help="of the corpus environment; may repeat")
    bundled.add_argument("--only", choices=STAGES, help="run one stage")
    return parser


def read_prompts(path: Path, target: Path) -> list[list[int]]:
    """The token ids of every line: "token_ids" as given, or "text" or "prompt" encoded by the target's tokenizer.

    Raises ValueError, naming the line.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from error
        text = record.get("text", record.get("prompt"))
        if "token_ids" not in record and not isinstance(text, str):
            raise ValueError(f'{path}, line {number}: neither "text" nor "token_ids"')
        documents.append(record["token_ids"] if "token_ids" in record else tokenizer(text)["input_ids"])
    if not documents:
        raise ValueError(f"{path} is empty: give one JSON object a line")
    return documents


def read_stream(path: Path, target: Path) -> np.ndarray:
    """The token ids of all documents, one after another.  Raises ValueError, naming what is wrong with the file."""
    if path.suffix != ".npy":
        return np.concatenate([np.array(d, dtype=np.int32) for d in read_prompts(path, target)])
    stream = np.load(path)
    vocab_size = int(read_config(target)["vocab_size"])
    if stream.ndim != 1 or stream.dtype.kind not in "iu" or not len(stream):
        raise ValueError(f"{path} holds {stream.dtype} {list(stream.shape)}: give whole numbers [num_tokens]")
    if stream.min() < 0 or stream.max() >= vocab_size:
        raise ValueError(
            f"{path} holds ids from {stream.min()} to {stream.max()}, and the target has {vocab_size}: give ids of its "
            "own tokenizer"
        )
    return stream


def config_of(kind: type[Any], arguments: argparse.Namespace) -> Any:
    return kind(**{item.name: getattr(arguments, item.name) for item in fields(kind)})


def run(arguments: argparse.Namespace) -> None:
    if arguments.command == "bundled":
        work = arguments.work or arguments.out / "work"
        make_bundle(BundleFolders(arguments.out, work, arguments.site_packages or []), arguments.only)
        return
    if arguments.command in TRAINERS:
        refuse_other_model(arguments.out, arguments.command)  # before a target is downloaded
    target = find_target(arguments.target)
    read_config(target)
    if not arguments.data.is_file():
        raise ValueError(f"--data {arguments.data} is not a file: give {DATA_HELP}")
    if arguments.command == "evaluate":
        _evaluate(find_draft(arguments.draft), target, read_prompts(arguments.data, target), arguments.max_tokens)
        return
    work = arguments.work or arguments.out / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)  # before the target is loaded and its text is made
    except OSError as error:
        raise ValueError(f"{work} cannot be made ({error.strerror}): give another --out or --work") from None
    stream = read_stream(arguments.data, target)
    if arguments.command == "own-text":
        own_config = config_of(OwnTextConfig, arguments)
        write_own_text(FrozenTarget(target, training_device()), stream, own_config, work)
        return
    trainer = TRAINERS[arguments.command]
    trainer.train(target, stream, arguments.out, work, config_of(trainer.config, arguments))


def refuse_other_model(out: Path, kind: str) -> None:
    """Raises ValueError if `out` holds a draft of another kind, or a target, which the run would overwrite."""
    if not (out / "config.json").exists():
        return
    found = kind_in(out)
    if found != kind:
        what = f"a draft of the kind {found}" if found else "a model that is no draft of this trainer"
        raise ValueError(f"--out {out} holds {what}, which {kind} would overwrite: give another folder")


def kind_in(directory: Path) -> str | None:
    """The kind of the draft in a directory; None if it holds something else."""
    return next((name for name, trainer in TRAINERS.items() if trainer.holds(directory)), None)


def _evaluate(draft: Path, target: Path, prompts: list[list[int]], max_tokens: int) -> None:
    kind = kind_in(draft)
    if kind is None:
        raise ValueError(f"--draft {draft} is no draft of this trainer: give one of {', '.join(TRAINERS)}")
    if not all(prompts):
        raise ValueError("a prompt of --data has no tokens: leave it out, or give it text")
    TRAINERS[kind].evaluate(draft, target, prompts, max_tokens)


def main(given: Sequence[str] | None = None) -> int:
    """0: done; 1: the system failed; 2: bad input, with one line on stderr; 130: interrupted."""
    arguments = make_parser().parse_args(given)
    try:
        run(arguments)
    except KeyboardInterrupt:
        return interrupted()
    except (OSError, ValueError) as error:
        print(f"espalier.train: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, ValueError) else 1
    return 0
