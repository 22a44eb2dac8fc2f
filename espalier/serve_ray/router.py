"""The Ray Serve router that sends prompts to engine replicas, by shared prefix and load.  ReplicaChooser chooses.

Ray's own prefix-aware router (ray.serve.llm) depends on vLLM, compares texts, and calls an actor three times for each
request.  This router compares pages of token ids, as the prefix cache of a replica does.
"""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from espalier.serve_ray.replica_chooser import ReplicaChooser, RoutingHint


class PrefixRouter(RequestRouter):
    """Routes prompts to replicas.  Ray Serve calls initialize_state with the deployment's request_router_kwargs.
    imbalance: see ReplicaChooser."""

    def initialize_state(self, imbalance: int = 8) -> None:
        """Ray Serve calls this first.  imbalance: see ReplicaChooser."""
        self.chooser = ReplicaChooser(imbalance)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # If no replica accepts the request, Ray Serve waits before it calls this method again.
        pending_request.routing_context.should_backoff = True
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        return [
            [by_name[name]] for name in self.chooser.rank_replicas(_hint_of(pending_request).prefix_hashes, by_name)
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        hint, request = _hint_of(pending_request), pending_request.metadata.internal_request_id
        self.chooser.record_sent(hint.prefix_hashes, hint.num_samples, replica_id.unique_id, request)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.chooser.record_ended(replica_id.unique_id, internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.chooser.forget_other_replicas({each.replica_id.unique_id for each in replicas})


def _hint_of(request: PendingRequest) -> RoutingHint:
    """Returns the RoutingHint in the call's arguments; an empty hint if there is none."""
    return next((each for each in request.args if isinstance(each, RoutingHint)), RoutingHint((), 0))
