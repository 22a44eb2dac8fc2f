"""`python -m lab bundled`: make the bundled model again."""

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any

from espalier.errors import EspalierError
from espalier.train.command import non_empty_path
from espalier.train.work import require_folder

# The names in lab/bundle/bundle.py:STAGES.  They are repeated here because the help must not import PyTorch.
STAGES = ("corpus", "tokenizer", "pack", "base", "ngram", "draft", "measure", "card")


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=non_empty_path, required=True, help="where target, draft, prompts and card go")
    parser.add_argument(
        "--work", type=non_empty_path, help="a folder for corpus, packed tokens and unfinished runs (OUT/work)"
    )
    parser.add_argument(
        "--site-packages",
        type=non_empty_path,
        action="append",
        metavar="DIR",
        help="site-packages of the environment with the corpus; may be repeated",
    )
    parser.add_argument("--only", choices=STAGES, metavar="STAGE", help=f"run one stage: {', '.join(STAGES)}")


def run(args: Namespace) -> int:
    """Raises EspalierError."""
    sites, work = args.site_packages or [], args.work or args.out / "work"
    for site in sites:
        if not site.is_dir():
            raise EspalierError(f"--site-packages {site} is not a directory; give that of the corpus environment")
    require_folder("--out", args.out)
    require_folder("--work", work)
    bundle: Any = import_module("lab.bundle.bundle")
    bundle.make_bundle(bundle.BundleFolders(args.out, work, sites), args.only)
    return 0
