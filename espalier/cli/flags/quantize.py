"""The flags of `espalier quantize`."""

from argparse import ArgumentParser
from pathlib import Path


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="a target or a draft: a directory, a Hugging Face id, or 'bundled' (a target)")
    parser.add_argument("--to", required=True, choices=("fp8", "int4"), help="the format of the copy")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="an empty or new directory")
    parser.add_argument("--device", default="auto", help="device to compute on: auto, cpu or cuda (auto)")
    parser.add_argument("--draft", metavar="DIR", help="of a target: compare accept lengths too, with this draft")
    parser.add_argument(
        "--target", metavar="DIR", help="of a draft: compare accept lengths with this target (the one that it names)"
    )
    parser.add_argument(
        "--texts",
        type=int,
        default=32,
        metavar="N",
        help="compare with the original on N held-out texts, or on its own if it has no tokenizer; 0: do not (32)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
