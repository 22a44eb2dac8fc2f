"""The FlashAttention-3 backend, for Hopper.  It supports layers with K and V heads, and layers with latent rows (MLA).

The kernels are in the FlashAttention-3 package and in the sglang-kernel wheel.  Both have the same function.  The
kernels read page tables and lengths on the device, and split long requests among programs there.  The largest number of
splits depends on shapes only, so the host makes no plan.  The log-sum-exp is in natural log.

With pages of 64 rows or more, the kernels also read rows after the end of a request and multiply them by zero.  These
rows must be finite, because 0 · NaN is NaN.  So the engine clears the pages of a request whose logits were not finite
(LaunchInput.cleared_pages).
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

from torch import Tensor

from espalier.attention.base import AttentionBackend
from espalier.attention.library import LibraryAttention, library_support
from espalier.attention.support import Library
from espalier.cache.layer_spec import LatentKV

# From this number of output values on, a pass does not split requests, because it has enough programs without splits,
# and each split would write another float32 output.
MIN_VALUES_WITHOUT_SPLITS = 2**23


@cache
def flash_attn_with_kvcache() -> Callable[..., tuple[Tensor, ...]]:
    """Return the attention function of FlashAttention-3.  The first call imports the library."""
    assert SUPPORT.library is not None and SUPPORT.library.installed_module is not None
    attention_function: Callable[..., tuple[Tensor, ...]] = import_module(
        SUPPORT.library.installed_module
    ).flash_attn_with_kvcache
    return attention_function


class FA3Attention(LibraryAttention):
    def attend_by_library(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns attention of q [B, Q, heads, k_size] over `tail_prefix`: out, and lse (natural log)."""
        spec = self.specs[layer]
        k, v = self.paged_rows(layer)
        latent_arguments = {}
        if isinstance(spec.cache_spec, LatentKV):
            # The library has separate arguments for the latent part and the rotated part of queries and rows.
            latent_size = spec.cache_spec.v_size
            latent_arguments, q, k = {"qv": q[..., :latent_size]}, q[..., latent_size:], k[..., latent_size:]
        num_values = q.shape[0] * q.shape[1] * q.shape[2] * spec.cache_spec.v_size
        out, lse, *_ = flash_attn_with_kvcache()(
            q,
            k,
            v,
            cache_seqlens=self.int_lengths(),
            page_table=self.tail_prefix.page_table,
            softmax_scale=spec.softmax_scale,
            causal=False,
            num_splits=0 if num_values < MIN_VALUES_WITHOUT_SPLITS else 1,
            return_softmax_lse=True,
            **latent_arguments,
        )
        return out, lse.transpose(1, 2)


SUPPORT = library_support(
    name="fa3",
    head_sizes=range(8, 257, 8),
    latent_rows=(LatentKV(576, 512),),
    compute_majors=(9,),
    library=Library(("flash_attn_interface", "sgl_kernel.flash_attn"), "fa3"),
    tested_on=("H200",),
    limit_reasons={
        "dtype": "flash_attn_with_kvcache computes in two-byte types",
        "head_size": "flash_attn_with_kvcache needs a multiple of 8, at most 256",
        "softcap": "the soft-cap of flash_attn_with_kvcache is not used",
        "latent": "qv needs a rotated part of at most 64 and a latent of 256 to 512 values",
        "capability": "the kernels are built for sm_90a",
    },
)


class FA3Backend(AttentionBackend):
    support = SUPPORT
    plan_class = FA3Attention
