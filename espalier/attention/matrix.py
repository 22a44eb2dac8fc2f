"""The support matrix: what each backend can run, as text.  `espalier doctor --matrix` and docs/support.md print it."""

from collections.abc import Callable

from espalier.attention import BACKENDS
from espalier.attention.support import By, Support, plain, plain_sizes
from espalier.errors import install_command


def _pages(support: Support) -> str:
    text = plain_sizes(support.page_sizes)
    latent = support.latent_page_sizes
    return text if latent is None else f"{text}; latent rows: {plain_sizes(latent)}"


def _overlap(support: Support) -> str:
    refused = ", ".join(kind.kind for kind in support.needs_exact_lengths)
    return f"not for layers that keep {refused}" if refused else By.ITSELF


def _library(support: Support) -> str:
    if support.library is None:
        return "none"
    return install_command(support.library.extra)


PROPERTIES: dict[str, Callable[[Support], str]] = {
    "devices": lambda s: ", ".join(s.devices),
    "compute capability": lambda s: s.plain_capability.removeprefix("compute capability "),
    "library": _library,
    "dtypes": lambda s: ", ".join(map(plain, s.dtypes)),
    "page_size": _pages,
    "layers that keep": lambda s: ", ".join(kind.kind for kind in s.keeps),
    "head sizes": lambda s: s.plain_heads,
    "k and v of different sizes": lambda s: By.ITSELF if s.different_v_size else By.NOTHING,
    "window on a chain": lambda s: s.window_on_chain,
    "window on a tree": lambda s: s.window_on_tree,
    "sinks": lambda s: s.sinks,
    "K and V in FP8": lambda s: s.fp8,
    "soft-cap of logits": lambda s: s.softcap,
    "rows chosen by an indexer": lambda s: s.selection,
    "draft's left bound": lambda s: s.left_bound,
    "overlap": _overlap,
    "CUDA graph": lambda s: By.ITSELF if "cuda" in s.devices else By.NOTHING,
    "tests have run on": lambda s: ", ".join(s.ran_on) or "not run on hardware",
}


def matrix() -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the matrix: a property and each backend's value."""
    supports = [made.support for made in BACKENDS.values()]
    head = ["", *(support.name for support in supports)]
    return head, [[name, *map(value, supports)] for name, value in PROPERTIES.items()]


def limits() -> dict[str, dict[str, str]]:
    """For each backend: property -> why its library has this limit."""
    return {name: dict(made.support.limits) for name, made in BACKENDS.items() if made.support.limits}
