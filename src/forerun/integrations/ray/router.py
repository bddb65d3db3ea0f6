"""Prefix affinity as a request router of Ray Serve, an alpha interface (tested versions: `integrations.versions`)."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.integrations.ray.affinity import Affinity
from forerun.integrations.ray.messages import ForwardedRequest, Prefix


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's class has no types here
    """Sends a request to the replica that has computed most of its prompt.

    A router lives in the process of its handle, so each ingress has one of its own.
    """

    def initialize_state(self, slack: int = 8) -> None:
        """Set up the router. slack: of `Affinity`."""
        self._affinity: Affinity[ReplicaID] = Affinity(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which Ray tries them."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between rounds in which all of them are full
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        known = self.replica_queue_len_cache  # Ray's cache, which replicas update at every request
        queues = {replica_id: known.get(replica_id) or 0 for replica_id in by_id}
        ranks = self._affinity.ranked(_prefix(pending_request), queues)
        return [[by_id[replica_id] for replica_id in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a replica has accepted a request."""
        self._affinity.sent(_prefix(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replace the set of replicas."""
        super().update_replicas(replicas)
        self._affinity.keep({replica.replica_id: replica for replica in replicas})


def _prefix(request: PendingRequest) -> Prefix:
    for argument in (*request.args, *request.kwargs.values()):
        if isinstance(argument, ForwardedRequest):
            return argument.prefix
    return Prefix()
