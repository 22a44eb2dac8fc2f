"""Attention backends by name, and the backend of each group of a model's layers."""

from collections.abc import Sequence

import torch

from espalier.attention.base import Attention, AttentionBackend, CommittedLengths, Nodes, Prefix, Support
from espalier.attention.grouped import GroupedBackend
from espalier.attention.reference import ReferenceBackend
from espalier.attention.sdpa import SdpaBackend
from espalier.attention.triton import TritonBackend
from espalier.cache.layer_spec import Keeps, LayerSpec, groups_of
from espalier.errors import EspalierError

# In order of preference.  A file that brings another one enters it: BACKENDS[Its.support.name] = Its.
BACKENDS: dict[str, type[AttentionBackend]] = {
    made.support.name: made for made in (TritonBackend, SdpaBackend, ReferenceBackend)
}
# Between the names of a model whose groups have different backends.
SEPARATOR = ", "


def backend(name: str) -> AttentionBackend:
    """The backend of that name.  Raises EspalierError naming those there are."""
    if name not in BACKENDS:
        raise EspalierError(f"attention={name!r} is unknown; use one of {', '.join(BACKENDS)}, or 'auto'")
    return BACKENDS[name]()


def default_backend(device: str, dtype: torch.dtype | None = None, keeps: Keeps | None = None) -> str:
    """The name of the backend that "auto" stands for: the first that runs on that kind of device, in that dtype, for
    layers that keep this; where there is none, the first for the device."""
    on_device = [made.support for made in BACKENDS.values() if device in made.support.devices]
    fits = [
        support for support in on_device if dtype in (None, *support.dtypes) and (keeps is None or support.takes(keeps))
    ]
    return (fits or on_device)[0].name


def choose_backends(
    asked: str | None, device: str, dtype: torch.dtype, specs: Sequence[LayerSpec], layers: Sequence[int]
) -> str:
    """The backend of `layers`, or, where groups of them differ, those of each group in order.  asked: None for auto."""
    names = [asked or default_backend(device, dtype, keeps) for keeps in groups_of(specs, layers)]
    return names[0] if len(set(names)) == 1 else SEPARATOR.join(names)


def grouped_backend(
    names: str,
    device: str,
    dtype: torch.dtype,
    page_size: int,
    specs: Sequence[LayerSpec],
    layers: Sequence[int],
    left_bound: bool = False,
) -> GroupedBackend:
    """The backends of `layers`.  names: as choose_backends gives them; left_bound: see Support.require.

    Raises EspalierError naming what a backend cannot run.
    """
    groups = groups_of(specs, layers)
    listed = names.split(SEPARATOR)
    listed *= len(groups) if len(listed) == 1 else 1
    if len(listed) != len(groups):
        raise EspalierError(
            f"attention={names!r} names {len(listed)} backends, and the layers are of {len(groups)} kind"
            f"{'s' * (len(groups) > 1)} by what they keep; name one for all, or one for each"
        )
    made = []
    for name, members in zip(listed, groups.values(), strict=True):
        made.append((members, backend(name)))
        made[-1][1].support.require(device, dtype, page_size, [specs[layer] for layer in members], left_bound)
    return GroupedBackend(made)


__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionBackend",
    "CommittedLengths",
    "GroupedBackend",
    "Nodes",
    "Prefix",
    "Support",
    "backend",
    "choose_backends",
    "default_backend",
    "grouped_backend",
]
