"""`python -m lab round`: checks its flags and runs one of its modes.

By default it compares a round of the tree with plain tokens.  The other modes are --acceptance, --shape and
--figures.  A flag that the chosen mode does not use is refused by name.
"""

from argparse import Namespace
from types import MappingProxyType
from typing import Any

from espalier.bench.drive import require_one_rank
from espalier.bench.report import check_plot_path
from espalier.errors import EspalierError
from espalier.startup.resolve import DEFAULT_PAGE_SIZE
from espalier.terminal.console import print_header, require_writable
from espalier.terminal.flags import engine_settings, flag_of, flag_text, given_flags, require_at_least_one
from lab.bench import acceptance, shaped, tree_vs_plain
from lab.shape_flags import SHAPE_FLAGS

# For the modes that load a model.  --shape has cells instead.
FLAG_DEFAULTS = MappingProxyType({"batch": [1], "context": [128], "tokens": 96, "repeats": 5, "prompts": 16})
# The flags that each mode uses.  The first mode whose flag is given runs; None is the default mode.
FLAGS_BY_MODE = MappingProxyType(
    {
        "figures": ("plot",),
        "shape": ("cells", "rounds", "own_size", "all_buckets", *SHAPE_FLAGS, "page_size", "json", "plot"),
        "acceptance": ("prompts", "tokens", "trees", "page_size", "json"),
        None: ("batch", "context", "tokens", "repeats", "compare", "page_size", "json", "plot"),
    }
)
MODEL_MODES = MappingProxyType({"acceptance": acceptance.run, None: tree_vs_plain.run})


def run(args: Namespace) -> int:
    settings = engine_settings(args)
    mode = next(mode for mode in FLAGS_BY_MODE if mode is None or _is_given(getattr(args, mode)))
    _refuse_flags_of_other_modes(args, mode)
    check_plot_path(args.plot)
    for name in ("json", "plot"):
        require_writable(flag_of(name), getattr(args, name))
    if mode == "figures":
        if given := given_flags(args):
            raise EspalierError(f"{flag_of(given[0])} is not for --figures; leave one out")
        shaped.plot_figures(args.figures, args.plot)
    elif mode == "shape":
        print_header()
        shaped.run(args, settings, args.page_size or [DEFAULT_PAGE_SIZE])
    else:
        _fill_in_defaults(args, settings, mode)
        print_header()
        MODEL_MODES[mode](args, settings)
    return 0


def _refuse_flags_of_other_modes(args: Namespace, mode: str | None) -> None:
    """Raises EspalierError for a given flag that `mode` does not use."""
    names = dict.fromkeys(name for other, used in FLAGS_BY_MODE.items() for name in (other, *used) if name is not None)
    for name in names:
        if name == mode or name in FLAGS_BY_MODE[mode] or not _is_given(getattr(args, name)):
            continue
        if mode is not None:
            raise EspalierError(f"{flag_of(name)} is not for {flag_of(mode)}; leave one out")
        users = " or ".join(flag_of(other) for other, used in FLAGS_BY_MODE.items() if other and name in used)
        raise EspalierError(f"{flag_of(name)} is for {users}; add that, or leave {flag_of(name)} out")


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != []


def _fill_in_defaults(args: Namespace, settings: dict[str, Any], mode: str | None) -> None:
    """Set the defaults of the flags that were not given, and check all of them.  Raises EspalierError."""
    require_one_rank(settings, "a mode of lab round that loads a model")
    for name, value in FLAG_DEFAULTS.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    require_at_least_one(args, *FLAG_DEFAULTS)
    if args.tokens < 2:
        raise EspalierError(f"--tokens={args.tokens} is not supported: the first comes of no round; use 2 or more")
    if args.page_size is not None:
        if len(args.page_size) > 1:
            raise EspalierError(
                f"--page-size={flag_text(args.page_size)}: a model is measured at one; several are for --shape"
            )
        settings["page_size"] = args.page_size[0]
