"""Train a draft for your target, or measure a draft."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from espalier.config import supported_values
from espalier.errors import NUMBER_PARSERS, EspalierError, one_line, require_int
from espalier.startup.checkpoints import find_draft, find_target, require_names
from espalier.terminal.console import CommandParser
from espalier.terminal.flags import flag_of
from espalier.train.configs import MIN_CAPTURED_LAYERS, read_draft_kind, read_target
from espalier.train.settings import BlockConfig, Eagle3Config, MtpConfig, OwnTextConfig, TrainConfig, length_advice
from espalier.train.work import require_writable

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# The minimum of --minutes of `auto`.
MIN_MINUTES = 1
TARGET_HELP = "a Llama, Qwen or Mistral model: a directory, a Hugging Face id, or 'bundled'"
DATA_HELP = (
    'JSON lines with "messages" that the target answers, or with "text" or "token_ids", or a .npy file with one row of '
    "token ids"
)
OUT_HELP = "where the draft goes; a finished draft of the same kind there is replaced, another model refused"


class Trainer(NamedTuple):
    """The command that trains a kind of draft.  help: its text for --help.  config: the class of its settings.
    min_layers: how many layers the target needs."""

    help: str
    config: type[TrainConfig]
    min_layers: int = 1


TRAINERS = MappingProxyType(
    {
        "eagle3": Trainer("train an EAGLE-3 draft for a target", Eagle3Config, MIN_CAPTURED_LAYERS),
        "mtp": Trainer("train an MTP head of one or several layers for a target", MtpConfig),
        "block": Trainer("train a block draft (DSpark's form) for a target", BlockConfig, MIN_CAPTURED_LAYERS),
    }
)
COMMANDS = (*TRAINERS, "own-text", "evaluate", "auto")


def import_function(path: str) -> Callable[..., Any]:
    """Imports "module:function".  The trainer's modules import PyTorch, so they are imported only before a run."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def add_config_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds a flag for each field of a config dataclass, with the field's help text."""
    for item in fields(config):
        choices = item.metadata.get("choices")
        about = item.metadata["help"]
        if item.default is not None:
            default: Any = item.default
            about += f" ({default if choices or default != int(default) else int(default)})"
        value_options: dict[str, Any] = {"choices": choices} if choices else {"type": number_reader(item)}
        value_options["metavar"] = None if choices else "X" if item.type is float else "N"
        parser.add_argument(flag_of(item.name), default=item.default, help=about, **value_options)


def number_reader(field: Field) -> Callable[[str], float]:
    """Returns the argparse type of a flag for a number.  The config class checks the number's range later."""
    parse = NUMBER_PARSERS[float if field.type is float else int]

    def read(text: str) -> float:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not supported; use {supported_values(field)}") from None

    return read


class Parser(CommandParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line and exits.  The usage is not printed, because the usage of `eagle3` has twenty lines."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            if value == "bundled":
                raise argparse.ArgumentError(None, "'bundled' is now `python -m lab bundled`, in a clone")
            raise argparse.ArgumentError(None, f"unknown command {value!r}; use one of {', '.join(action.choices)}")
        super()._check_value(action, value)


def non_empty_text(text: str) -> str:
    """The argparse type of a name.  Refuses an empty name: `--out "$OUT"` with OUT unset must not mean the working
    directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a name")
    return text


def non_empty_path(text: str) -> Path:
    return Path(non_empty_text(text))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="espalier train", description=__doc__)
    add_commands(parser)
    return parser


def add_commands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=type(parser))
    about = "choose a kind of draft by short trials, train it, measure it and its trees"
    auto = commands.add_parser("auto", help=about, description=about)
    auto.add_argument("--target", type=non_empty_text, required=True, help=TARGET_HELP)
    auto.add_argument(
        "--data", type=non_empty_path, help=f"{DATA_HELP}; by default questions that the target asks itself"
    )
    auto.add_argument("--out", type=non_empty_path, default=Path("draft"), help="where the draft goes (draft)")
    auto.add_argument("--minutes", type=float, default=30, metavar="N", help="minutes that all of it may take (30)")
    auto.add_argument("--kinds", nargs="+", choices=tuple(TRAINERS), help="kinds to try (all that fit the target)")
    for name, trainer in TRAINERS.items():
        train = commands.add_parser(name, help=trainer.help, description=trainer.help)
        train.add_argument("--target", type=non_empty_text, required=True, help=TARGET_HELP)
        train.add_argument("--data", type=non_empty_path, required=True, help=DATA_HELP)
        train.add_argument("--out", type=non_empty_path, required=True, help=OUT_HELP)
        train.add_argument(
            "--work",
            type=non_empty_path,
            help="a folder for text that the target generates, and for the state of an unfinished run (OUT/work)",
        )
        add_config_flags(train, trainer.config)
    about = "generate training text with the target, for all runs of a work folder"
    own_text = commands.add_parser("own-text", help=about, description=about)
    own_text.add_argument("--target", type=non_empty_text, required=True, help=TARGET_HELP)
    own_text.add_argument("--data", type=non_empty_path, required=True, help=DATA_HELP)
    own_text.add_argument(
        "--work", type=non_empty_path, required=True, help="a folder for the text; texts of several seeds add up there"
    )
    add_config_flags(own_text, OwnTextConfig)
    about = "accept lengths of a draft on greedy text of the target"
    evaluate = commands.add_parser("evaluate", help=about, description=about)
    evaluate.add_argument("--target", type=non_empty_text, required=True, help=TARGET_HELP)
    evaluate.add_argument(
        "--draft", type=non_empty_text, required=True, help="the draft: a directory, a Hugging Face id, or 'bundled'"
    )
    evaluate.add_argument("--data", type=non_empty_path, required=True, help="JSON lines with prompts, as for training")
    evaluate.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="tokens to generate after each prompt (200)"
    )


def make_config(config_type: type[Any], arguments: argparse.Namespace) -> Any:
    """Returns the config that a command's flags describe.  Raises EspalierError for invalid values."""
    return config_type(**{item.name: getattr(arguments, item.name) for item in fields(config_type)})


def run(arguments: argparse.Namespace) -> None:
    if arguments.command == "evaluate":
        _evaluate(arguments)
    elif arguments.command == "auto":
        _train_auto(arguments)
    elif arguments.command == "own-text":
        _write_own_text(arguments)
    else:
        _train(arguments)


def _train(arguments: argparse.Namespace) -> None:
    """Runs a training.  Everything that can be checked without PyTorch is checked before PyTorch is imported."""
    trainer, out = TRAINERS[arguments.command], arguments.out
    config, work = make_config(trainer.config, arguments), arguments.work or out / "work"
    require_names({"--target": arguments.target})
    require_data(arguments.data)
    refuse_other_model(out, arguments.command)
    require_writable("--out", out)
    require_writable("--work", work)
    target = find_target(arguments.target, "--target")
    config.require_target(read_target(target, trainer.min_layers))
    data = import_function("espalier.train.data:read_data")(arguments.data, target)
    import_function("espalier.train.kinds:train")(arguments.command, target, data, out, work, config)


def _train_auto(arguments: argparse.Namespace) -> None:
    if not arguments.minutes >= MIN_MINUTES:
        raise EspalierError(f"--minutes={arguments.minutes:g} is too few to try drafts; use {MIN_MINUTES} or more")
    require_names({"--target": arguments.target})
    if arguments.data is not None:
        require_data(arguments.data)
    require_writable("--out", arguments.out)
    target = find_target(arguments.target, "--target")
    config = read_target(target)
    for kind in arguments.kinds or ():
        read_target(target, TRAINERS[kind].min_layers)
    fitting = [name for name, kind in TRAINERS.items() if config["num_hidden_layers"] >= kind.min_layers]
    kinds = list(dict.fromkeys(arguments.kinds or fitting))
    if arguments.data is not None:
        import_function("espalier.train.data:read_data")(arguments.data, target)
    import_function("espalier.train.auto:train_auto")(target, arguments.data, arguments.out, arguments.minutes, kinds)


def _write_own_text(arguments: argparse.Namespace) -> None:
    config = make_config(OwnTextConfig, arguments)
    require_names({"--target": arguments.target})
    require_data(arguments.data)
    require_writable("--work", arguments.work)
    target = find_target(arguments.target, "--target")
    config.require_target(read_target(target))
    data = import_function("espalier.train.data:read_data")(arguments.data, target)
    import_function("espalier.train.own_text:own_text_command")(target, data, config, arguments.work)


def _evaluate(arguments: argparse.Namespace) -> None:
    require_int("--max-tokens", arguments.max_tokens, 1)
    require_names({"--target": arguments.target, "--draft": arguments.draft})
    require_data(arguments.data)
    draft, target = find_draft(arguments.draft, setting="--draft"), find_target(arguments.target, "--target")
    kind, config = read_draft_kind(draft), read_target(target)
    if kind is None:
        raise EspalierError(f"--draft {draft} is no draft of this trainer; give one of {', '.join(TRAINERS)}")
    prompts = import_function("espalier.train.data:read_prompts")(arguments.data, target)
    if not all(prompts):
        raise EspalierError("a prompt of --data has no tokens; leave it out, or give it text")
    positions, longest = int(config["max_position_embeddings"]), max(map(len, prompts))
    if longest + arguments.max_tokens > positions:
        raise EspalierError(
            f"--max-tokens={arguments.max_tokens} is too many: a prompt has {longest} tokens, and the target has "
            f"{positions} positions; {length_advice(longest, positions)}"
        )
    import_function("espalier.train.kinds:evaluate")(kind, draft, target, prompts, arguments.max_tokens)


def require_data(path: Path) -> None:
    if not path.is_file():
        raise EspalierError(f"--data {path} is not a file; give {DATA_HELP}")


def refuse_other_model(out: Path, kind: str) -> None:
    """Raises EspalierError if `out` contains a target or a draft of another kind, which the run would overwrite."""
    if not (out / "config.json").exists():
        return
    found_kind = read_draft_kind(out)
    if found_kind != kind:
        found_model = f"a draft of the kind {found_kind}" if found_kind else "a model that is no draft of this trainer"
        raise EspalierError(f"--out {out} holds {found_model}, which {kind} would overwrite; give another folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.
    Returns the exit code: 0 for success, 1 for a system error, 2 for bad input (with one line on stderr), 130 after
    Ctrl-C."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.error(f"a command is missing; use one of {', '.join(COMMANDS)}")
    try:
        run(arguments)
    except KeyboardInterrupt:
        print("espalier train: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (OSError, ValueError) as error:
        print(f"espalier train: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ValueError) else EXIT_FAILED
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which is not imported here
            raise
        remedy = "use a smaller --batch, --length or --generate-batch"
        print(f"espalier train: the GPU's memory is full ({one_line(error)}); {remedy}", file=sys.stderr)
        return EXIT_FAILED
    return 0
