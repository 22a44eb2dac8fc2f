"""A router of Ray Serve that knows nothing: scripts/ray_shows.py compares ours with it."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RandomRouter(RequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [random.sample(candidate_replicas, 1)] if candidate_replicas else []
