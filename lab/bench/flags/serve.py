"""The flags of `python -m lab serve`."""

from argparse import ArgumentParser

from lab.bench.flags import engines


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests of all kinds, many of which disconnect")
    parser.add_argument(
        "--bad-host",
        action="store_true",
        help="how long other clients wait while one host sends large or broken requests",
    )
    parser.add_argument("--concurrency", metavar="N,N", help="requests at once (1,16)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    engines.add_flags(parser)
