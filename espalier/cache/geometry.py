"""What one layer's K/V looks like.  Target and draft layers may differ; the cache sums their bytes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer: head counts, sizes, sliding window and softmax scale.

    window: a query at position p sees positions > p - window; None sees all.
    scale: multiplies q·k; None means k_size ** -0.5.
    """

    heads: int
    kv_heads: int
    k_size: int
    v_size: int
    window: int | None = None
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        return self.k_size**-0.5 if self.scale is None else self.scale

    @property
    def values_per_token(self) -> int:
        """K and V elements that one token takes in this layer."""
        return self.kv_heads * (self.k_size + self.v_size)
