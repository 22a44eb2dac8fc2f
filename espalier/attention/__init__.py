"""Attention backends by name, and the choice of a backend for each group of layers."""

from collections.abc import Sequence

import torch

from espalier.attention.base import AttentionBackend, AttentionPlan, CommittedLengths, GroupedBackend
from espalier.attention.fa3 import FA3Backend
from espalier.attention.flashinfer import FlashInferBackend
from espalier.attention.forward import ChosenRows, ModelCache, Pass
from espalier.attention.library import require_our_kernels
from espalier.attention.reference import ReferenceBackend
from espalier.attention.sdpa import SdpaBackend
from espalier.attention.support import Library, Provider, Support
from espalier.attention.triton import TritonBackend
from espalier.attention.trtllm import TrtllmBackend
from espalier.cache.layer_spec import CacheSpec, LayerSpec, group_layers, layers_with_rows
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import Nodes, Prefix

# The order is the order of preference.  To add a backend from another file: BACKENDS[New.support.name] = New.
BACKENDS: dict[str, type[AttentionBackend]] = {
    backend_class.support.name: backend_class
    for backend_class in (
        TritonBackend,
        SdpaBackend,
        ReferenceBackend,
        FlashInferBackend,
        FA3Backend,
        TrtllmBackend,
    )
}
# Separates backend names in one string, for a model whose groups of layers have different backends.
NAME_SEPARATOR = ", "


def backend(name: str) -> AttentionBackend:
    """Create the backend with this name.  Raises EspalierError, with the known names, if no backend has it."""
    if name not in BACKENDS:
        raise EspalierError(f"attention={name!r} is unknown; use one of {', '.join(BACKENDS)}, or 'auto'")
    return BACKENDS[name]()


def default_backend(device: str, dtype: torch.dtype | None = None, cache_spec: CacheSpec | None = None) -> str:
    """Return the name that "auto" means: the first backend that supports the device, the dtype and `cache_spec`.

    If no backend supports all three, "auto" means the first backend that supports the device."""
    installed = [backend_class.support for backend_class in BACKENDS.values() if backend_class.support.is_installed]
    on_device = [support for support in installed if device in support.devices]
    suitable = [
        support
        for support in on_device
        if dtype in (None, *support.dtypes) and (cache_spec is None or support.supports(cache_spec))
    ]
    return (suitable or on_device)[0].name


def choose_backends(
    configured: str | None, device: str, dtype: torch.dtype, specs: Sequence[LayerSpec], layers: Sequence[int]
) -> str:
    """Return the name of the backend of `layers`.  Layers with the same cache_spec form a group (group_layers).  If the
    groups need different backends, return one name per group, joined with NAME_SEPARATOR.

    configured: the name that the user set; None for "auto".  layers: indices in `specs`.  Layers that keep a recurrent
    state instead of rows need no backend."""
    groups = group_layers(specs, layers_with_rows(specs, layers)) or (None,)
    names = [configured or default_backend(device, dtype, cache_spec) for cache_spec in groups]
    return names[0] if len(set(names)) == 1 else NAME_SEPARATOR.join(names)


def grouped_backend(
    names: str,
    device: str,
    dtype: torch.dtype,
    page_size: int,
    specs: Sequence[LayerSpec],
    layers: Sequence[int],
    lacks_first_rows: bool = False,
    exact_lengths: bool = True,
) -> GroupedBackend:
    """Create the backends of `layers`.  Raises EspalierError if a backend cannot run its layers.

    names: the result of choose_backends.  layers: indices in `specs`.  lacks_first_rows: whether the first rows of
    every request are missing (Prefix.first_position).  exact_lengths: whether the host knows exact lengths in every
    launch."""
    groups = group_layers(specs, layers_with_rows(specs, layers))
    group_names = names.split(NAME_SEPARATOR)
    group_names *= len(groups) if len(group_names) == 1 else 1
    if len(group_names) != len(groups):
        raise EspalierError(
            f"attention={names!r} names {len(group_names)} backends, but the model has {len(groups)} group"
            f"{'s' * (len(groups) > 1)} of layers that keep rows of the same form; name one backend, or one for "
            "each group"
        )
    backends = []
    for name, members in zip(group_names, groups.values(), strict=True):
        group_backend = backend(name)
        group_specs = [specs[layer] for layer in members]
        support = group_backend.support
        support.require(device, dtype, page_size, group_specs, lacks_first_rows, exact_lengths)
        require_our_kernels(support, device, dtype, page_size, group_specs, lacks_first_rows)
        backends.append((members, group_backend))
    return GroupedBackend(backends)


__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionPlan",
    "ChosenRows",
    "CommittedLengths",
    "GroupedBackend",
    "Library",
    "ModelCache",
    "Nodes",
    "Pass",
    "Prefix",
    "Provider",
    "Support",
    "backend",
    "choose_backends",
    "default_backend",
    "grouped_backend",
]
