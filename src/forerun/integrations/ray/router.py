"""Affinity as a request router of Ray Serve's: an alpha interface, whose tried versions `integrations` lists."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.integrations.ray.affinity import Affinity
from forerun.integrations.ray.messages import ForwardedRequest, Prefix


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's class has no types here
    """Sends a request where most of its prompt has been computed; where it went is told by its argument alone.

    A router lives in the process of its handle, so each ingress has one of its own.
    """

    def initialize_state(self, slack: int = 8) -> None:
        """slack: of `Affinity`."""
        self._affinity: Affinity[ReplicaID] = Affinity(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica after another, until one of them takes the request."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between rounds in which all of them are full
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        known = self.replica_queue_len_cache  # of Ray's, which replicas correct whenever they are asked
        queues = {replica_id: known.get(replica_id) or 0 for replica_id in by_id}
        ranks = self._affinity.ranked(_prefix(pending_request), queues)
        return [[by_id[replica_id] for replica_id in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken the request."""
        self._affinity.sent(_prefix(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are there now."""
        super().update_replicas(replicas)
        self._affinity.keep({replica.replica_id: replica for replica in replicas})


def _prefix(request: PendingRequest) -> Prefix:
    for argument in (*request.args, *request.kwargs.values()):
        if isinstance(argument, ForwardedRequest):
            return argument.prefix
    return Prefix()
