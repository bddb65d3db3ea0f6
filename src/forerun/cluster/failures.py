"""Ray's exceptions as forerun's. They are known by name, so that Ray need not be there to tell them apart."""

from __future__ import annotations

import re

from forerun.errors import ForerunError, QueueFullError, ReplicaError

_LOST = {
    "RayActorError",
    "ActorUnavailableError",
    "ReplicaUnavailableError",
    "DeploymentUnavailableError",
    "WorkerCrashedError",
    "NodeDiedError",
    "OwnerDiedError",
    "ObjectLostError",
    "RequestCancelledError",
    "TaskCancelledError",
}
_MEMORY = "OutOfMemoryError"
_FULL = "BackPressureError"


_OWN = re.compile(r"^\s*forerun\.errors\.\w+: (.+)$", re.MULTILINE)


def reason_in(text: str) -> str:
    """What a traceback of Ray's says of forerun's own exception; the whole text where it says nothing of one."""
    found = _OWN.findall(text)
    return found[-1] if found else text


def translated(error: BaseException) -> BaseException:
    """What a request has failed with: forerun's own exception where Ray's says why, else the exception itself.

    An exception of forerun's that a worker has raised comes as the cause of one of Ray's.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, ForerunError):
        return cause
    if isinstance(error, ForerunError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    if _FULL in names:
        return QueueFullError("All replicas are busy, and as many requests wait as may. Send it again later.")
    if _MEMORY in names or _LOST & names:
        why = " for want of memory" if _MEMORY in names or "OOM" in str(error) else ""
        return ReplicaError(
            f"The replica that computed the request has ended{why} before its answer was whole. Send it again."
        )
    return error
