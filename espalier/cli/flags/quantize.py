"""The flags of `espalier quantize`."""

from argparse import ArgumentParser
from pathlib import Path


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="a target or a draft: a directory, a Hugging Face id, or 'bundled' (a target)")
    parser.add_argument("--to", required=True, choices=("fp8", "int4"), help="the format of the copy")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="an empty or new directory")
    parser.add_argument("--device", default="auto", help="device to compute on: auto, cpu or cuda (auto)")
    parser.add_argument("--draft", metavar="DIR", help="of a target: also compare accept lengths with this draft")
    parser.add_argument(
        "--target",
        metavar="DIR",
        help="of a draft: compare accept lengths with this target (the target that the draft names)",
    )
    parser.add_argument(
        "--texts",
        type=int,
        default=32,
        metavar="N",
        help="compare with the original on N held-out texts, or without a tokenizer on texts that the original "
        "generates; 0: do not compare (32)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
