"""How many replicas the open tokens need.  Ray Serve's controller calls this, then applies its limits and delays."""

from typing import Any


class OpenTokens:
    """An autoscaling policy of Ray Serve.  tokens_per_replica: open tokens for which one replica is enough."""

    def __init__(self, tokens_per_replica: int):
        self.tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """(number of replicas wanted, state).  Without figures, the number of replicas stays."""
        figures = (context.aggregated_metrics or {}).get("open_tokens")
        if not figures:
            return context.target_num_replicas, {}
        return sum(figures.values()) / self.tokens_per_replica, {}
