"""Declares what each attention backend can run.  These declarations decide what "auto" means and what is refused.

`espalier doctor --matrix` and docs/support.md show the declarations of all backends as a table, the support matrix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec

import torch

from espalier.cache.layer_spec import CacheSpec, KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError, install_command
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.layers.quantised_plans import FP8_CAPABILITY
from espalier.kernels.ops.attention import MAX_LATENT_HEAD_SIZE
from espalier.layout import MAX_PAGE_SIZE


class Provider(StrEnum):
    """The code that implements a feature: the backend itself, our kernels (attention/library.py), or nothing."""

    ITSELF = "yes"
    OUR_KERNELS = "by our kernels"
    NOTHING = "no"


@dataclass(frozen=True)
class Library:
    """An optional package.  modules: names of modules; the first one that is installed is imported.
    pip_extra: the extra in pyproject.toml that installs the package."""

    modules: tuple[str, ...]
    pip_extra: str

    @property
    def installed_module(self) -> str | None:
        """The name of the first installed module; None if none is installed."""
        return next((module for module in self.modules if find_spec(module.split(".")[0]) is not None), None)


@dataclass(frozen=True)
class Support:
    """The properties of layers, passes and devices that a backend supports.
    cache_specs: the classes of LayerSpec.cache_spec that layers may have.
    any_v_size: whether V heads may have another size than K heads.  head_sizes: sizes of K and V; None for any size.
    latent_page_sizes: the page sizes for layers with latent rows; None if page_sizes also applies to these layers.
    latent_rows: the supported sizes of latent rows.  If latent_rows is empty, max_latent is the largest supported size.
    If max_latent is None too, head_sizes applies to latent rows.
    Each field of type Provider names the code that implements a feature.  window_on_chain, window_on_tree: sliding
    windows over chains and over trees.  lacks_first_rows: prefixes without rows below Prefix.first_position.  sinks:
    see AttentionPlan.attend.  fp8: K and V in FP8 (kv_dtype).  softcap: soft caps of logits.  selection: attention to
    chosen rows (LayerSpec.topk).  max_topk, max_index_size: the largest topk and size of an index key; None for no
    limit.
    needs_exact_lengths: the cache specs of layers for which `prepare` must get exact lengths.
    prefill_graph: whether CUDA graphs capture prefill passes.  compute_majors: major compute capabilities; None: any.
    tested_on: hardware on which the backend's tests have passed.
    limit_reasons: the reason of each limit, by the limit's name in a Refusal."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    cache_specs: tuple[type[CacheSpec], ...] = (KVHeads,)
    any_v_size: bool = False
    window_on_chain: Provider = Provider.NOTHING
    window_on_tree: Provider = Provider.NOTHING
    lacks_first_rows: Provider = Provider.ITSELF
    sinks: Provider = Provider.OUR_KERNELS
    fp8: Provider = Provider.NOTHING
    softcap: Provider = Provider.NOTHING
    selection: Provider = Provider.NOTHING
    max_topk: int | None = None
    max_index_size: int | None = None
    page_sizes: Sequence[int] = range(1, MAX_PAGE_SIZE + 1)
    latent_page_sizes: Sequence[int] | None = None
    head_sizes: Sequence[int] | None = None
    max_latent: LatentKV | None = None
    latent_rows: tuple[LatentKV, ...] = ()
    needs_exact_lengths: tuple[type[CacheSpec], ...] = ()
    prefill_graph: bool = False
    compute_majors: Sequence[int] | None = None
    library: Library | None = None
    tested_on: tuple[str, ...] = ()
    limit_reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        return self.library is None or self.library.installed_module is not None

    def require(
        self,
        device: str,
        dtype: torch.dtype,
        page_size: int,
        specs: Sequence[LayerSpec],
        lacks_first_rows: bool = False,
        exact_lengths: bool = True,
    ) -> None:
        """Check that this backend can run the layers, before memory is allocated.  Raises EspalierError.

        lacks_first_rows: whether the layers' prefixes lack rows below Prefix.first_position.  exact_lengths: whether
        the host knows exact lengths in every launch: without overlap, and with at most one MTP layer."""
        if device in self.devices and self.library is not None and not self.is_installed:
            raise EspalierError(
                f"attention={self.name} needs a library that is not installed; in the clone, run "
                f"{install_command(self.library.pip_extra)}"
            )
        in_fp8 = any(spec.cache_spec.dtype == FP8 for spec in specs)
        refusals = [
            *self._machine_refusals(device, dtype, in_fp8),
            (
                lacks_first_rows and self.lacks_first_rows is Provider.NOTHING,
                "a prefix whose first rows do not exist",
                "whole prefixes",
                "",
            ),
            *(refusal for spec in specs for refusal in self._refusals(spec, page_size, exact_lengths)),
        ]
        for unsupported, value, supported, limit in refusals:
            if unsupported:
                why = f" ({self.limit_reasons[limit]})" if limit in self.limit_reasons else ""
                raise EspalierError(
                    f"attention={self.name} does not support {value}; it supports {supported}{why}: "
                    "choose another backend"
                )

    def supports(self, cache_spec: CacheSpec) -> bool:
        """Whether the backend supports layers with this `cache_spec`."""
        if not isinstance(cache_spec, self.cache_specs):
            return False
        return not self._unsupported_sizes(cache_spec) and (cache_spec.dtype != FP8 or self.fp8 is not Provider.NOTHING)

    def _machine_refusals(self, device: str, dtype: torch.dtype, in_fp8: bool) -> Iterator["Refusal"]:
        """Yield a Refusal for each property of the device and the dtypes.  in_fp8: whether K and V are in FP8."""
        yield device not in self.devices, f"device={device}", f"devices {', '.join(self.devices)}", "device"
        dtypes = ", ".join(map(dtype_name, self.dtypes))
        yield dtype not in self.dtypes, f"dtype={dtype_name(dtype)}", f"dtypes {dtypes}", "dtype"
        yield in_fp8 and self.fp8 is Provider.NOTHING, "kv_dtype=fp8_e4m3", "K and V in the model's dtype", "fp8"
        majors = self.compute_majors
        if (in_fp8 or majors is not None) and device == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            capability, first = f"compute capability {major}.{minor}", ".".join(map(str, FP8_CAPABILITY))
            yield majors is not None and major not in majors, capability, self.capability_text, "capability"
            too_old = in_fp8 and (major, minor) < FP8_CAPABILITY
            yield too_old, f"kv_dtype=fp8_e4m3 on {capability}", f"it from compute capability {first} on", "fp8"

    def _unsupported_sizes(self, cache_spec: CacheSpec) -> list[int]:
        """Returns the sizes of K and V that the backend does not support."""
        sizes, largest = (cache_spec.k_size, cache_spec.v_size), self.max_latent
        if isinstance(cache_spec, LatentKV) and self.latent_rows:
            return [] if replace(cache_spec, dtype=None, index_size=0) in self.latent_rows else [cache_spec.size]
        if isinstance(cache_spec, LatentKV) and largest is not None:
            limits = (largest.k_size, largest.v_size)
            return [size for size, limit in zip(sizes, limits, strict=True) if size > limit]
        return [size for size in sizes if self.head_sizes is not None and size not in self.head_sizes]

    def _refusals(self, spec: LayerSpec, page_size: int, exact_lengths: bool) -> Iterator["Refusal"]:
        """Yield a Refusal for each property of a layer."""
        cache_spec = spec.cache_spec
        if not isinstance(cache_spec, self.cache_specs):
            kinds = ", ".join(kind.kind for kind in self.cache_specs)
            yield True, f"layers that keep {cache_spec.kind}", f"layers that keep {kinds}", "cache_specs"
            return
        sizes = self.page_sizes_for(type(cache_spec))
        yield page_size not in sizes, f"page_size={page_size}", f"page_size {sizes_text(sizes)}", "page_size"
        windows = {"chain": self.window_on_chain, "tree": self.window_on_tree}
        lacking = [shape for shape, by in windows.items() if by is Provider.NOTHING]
        shape_text = "" if len(lacking) == 2 else f" on a {lacking[0]}" if lacking else ""
        yield bool(spec.window and lacking), f"a sliding window{shape_text}", "layers without a window", "window"
        is_latent = isinstance(cache_spec, LatentKV)
        wide = is_latent and self.head_sizes is not None and cache_spec.k_size > MAX_LATENT_HEAD_SIZE
        yield bool(wide and spec.window), "a sliding window over wide latent rows", "such layers without a window", ""
        capped = spec.softcap is not None
        no_cap = self.softcap is Provider.NOTHING
        yield capped and no_cap, "a soft-cap of attention logits", "layers without one", "softcap"
        yield bool(wide and capped), "a soft-cap over wide latent rows", "such layers without one", ""
        chooses = spec.topk is not None
        no_selection = self.selection is Provider.NOTHING
        yield chooses and no_selection, "layers that attend to chosen rows (index_topk)", "layers without an index", ""
        too_many = self.max_topk is not None and spec.topk is not None and spec.topk > self.max_topk
        yield too_many, f"index_topk = {spec.topk}", f"{self.max_topk} at most", "selection"
        index_size, limit = cache_spec.index_size if isinstance(cache_spec, LatentKV) else 0, self.max_index_size
        wide_index = limit is not None and index_size > limit
        yield wide_index, f"index_head_dim = {index_size}", f"{limit} at most", "selection"
        sizes_differ = isinstance(cache_spec, KVHeads) and cache_spec.k_size != cache_spec.v_size
        yield sizes_differ and not self.any_v_size, "k and v heads of different sizes", "equal sizes", "head_size"
        unsupported, limit_name = self._unsupported_sizes(cache_spec), "latent" if is_latent else "head_size"
        size_text = f"heads of size {max(unsupported, default=0)}"
        yield bool(unsupported), size_text, f"sizes {self.head_sizes_text}", limit_name
        is_inexact = not exact_lengths and isinstance(cache_spec, self.needs_exact_lengths)
        inexact_text = f"rounds whose lengths are not known exactly, of layers that keep {cache_spec.kind}"
        yield is_inexact, inexact_text, "overlap=False, with at most one MTP layer", "lengths"

    def page_sizes_for(self, spec_class: type[CacheSpec]) -> Sequence[int]:
        """Returns the page sizes for layers whose `cache_spec` has this class."""
        is_apart = issubclass(spec_class, LatentKV) and self.latent_page_sizes is not None
        return self.latent_page_sizes or () if is_apart else self.page_sizes

    @property
    def head_sizes_text(self) -> str:
        text, latent = sizes_text(self.head_sizes), self.max_latent
        if self.latent_rows:
            return f"{text}; latent rows of " + ", ".join(
                f"{row.size} ({row.v_size} of them V)" for row in self.latent_rows
            )
        return text if latent is None else f"{text}; latent rows up to {latent.size}, {latent.v_size} of them V"

    @property
    def capability_text(self) -> str:
        """The supported compute capabilities as text."""
        if self.compute_majors is None:
            return "any"
        first, last = self.compute_majors[0], self.compute_majors[-1]
        return f"compute capability {first}.x" if first == last else f"compute capability {first}.x to {last}.x"


# (whether a property is unsupported, the property in words, the supported values, the limit's name in limit_reasons).
Refusal = tuple[bool, str, str, str]


def sizes_text(sizes: Sequence[int] | None) -> str:
    """Returns page_sizes or head_sizes as text."""
    if sizes is None:
        return "any"
    if isinstance(sizes, range):
        return f"up to {sizes[-1]}" if sizes.step == 1 else f"multiples of {sizes.step} up to {sizes[-1]}"
    return ", ".join(map(str, sizes))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _page_sizes_text(support: Support) -> str:
    """Returns the page sizes that the backend supports, as text for a table."""
    text = sizes_text(support.page_sizes)
    latent = support.latent_page_sizes
    return text if latent is None else f"{text}; latent rows: {sizes_text(latent)}"


def _overlap_text(support: Support) -> str:
    """Returns whether the backend can run with overlap, as text for a table."""
    refused = ", ".join(kind.kind for kind in support.needs_exact_lengths)
    return f"not for layers that keep {refused}" if refused else Provider.ITSELF


MATRIX_PROPERTIES: dict[str, Callable[[Support], str]] = {
    "devices": lambda s: ", ".join(s.devices),
    "compute capability": lambda s: s.capability_text.removeprefix("compute capability "),
    "library": lambda s: "none" if s.library is None else install_command(s.library.pip_extra),
    "dtypes": lambda s: ", ".join(map(dtype_name, s.dtypes)),
    "page_size": _page_sizes_text,
    "layers that keep": lambda s: ", ".join(kind.kind for kind in s.cache_specs),
    "head sizes": lambda s: s.head_sizes_text,
    "k and v of different sizes": lambda s: Provider.ITSELF if s.any_v_size else Provider.NOTHING,
    "window on a chain": lambda s: s.window_on_chain,
    "window on a tree": lambda s: s.window_on_tree,
    "sinks": lambda s: s.sinks,
    "K and V in FP8": lambda s: s.fp8,
    "soft-cap of logits": lambda s: s.softcap,
    "rows chosen by an indexer": lambda s: s.selection,
    "draft's left bound": lambda s: s.lacks_first_rows,
    "overlap": _overlap_text,
    "CUDA graph": lambda s: Provider.ITSELF if "cuda" in s.devices else Provider.NOTHING,
    "tests have run on": lambda s: ", ".join(s.tested_on) or "not run on hardware",
}


def support_matrix(supports: Sequence[Support]) -> tuple[list[str], list[list[str]]]:
    """Returns (head, rows) of the support matrix.  A row has a property's name and each backend's value."""
    head = ["", *(support.name for support in supports)]
    return head, [[name, *map(value, supports)] for name, value in MATRIX_PROPERTIES.items()]
