"""The flags of `python -m lab loading`."""

from argparse import ArgumentParser

from espalier.terminal.flags import add_json_flag


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="the target: a directory, a Hugging Face id, or 'bundled'")
    parser.add_argument("--device", default="auto", help="device onto which it is loaded: auto, cpu or cuda (auto)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of the loaded weights (bfloat16)",
    )
    add_json_flag(parser)
