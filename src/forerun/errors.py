"""Every exception forerun raises on purpose.

    ForerunError
    ├── ConfigError               an option is out of range or contradicts another
    │   └── SamplingError         ... in SamplingParams
    │       └── GrammarError          ... a schema or grammar that no answer can be held to
    ├── PromptError               a prompt that cannot be served: empty, too long, tokens out of range
    ├── ModelLoadError            a model folder that cannot be read
    │   └── UnsupportedModelError ... that can be read but not served exactly (state space, encoder-decoder)
    ├── FetchError                a model that could not be fetched, or kept, or removed
    ├── NativeUnavailableError    the native kernels cannot be had here
    │   └── CompilationError          ... for their compiler fails
    ├── DrafterError              a drafter that cannot be used
    │   └── IncompatibleDrafterError  ... with this target
    ├── QueueFullError            a request that comes while the queue is full
    ├── NotEnoughMemoryError      a model, with keys and values, that does not fit into memory
    ├── OutOfPagesError           keys and values that do not fit into their pool
    ├── RequestError              a request that could not be finished
    │   ├── NonFiniteError            ... for the target's logits are NaN or infinite
    │   ├── GrammarDeadEndError       ... for its grammar leaves no token, or cannot be followed
    │   ├── InterruptedRequestError   ... for its step was interrupted
    │   ├── EngineClosedError         ... for the engine takes no requests any more
    │   ├── DeviceError               ... for the device that computes it has failed
    │   └── DeviceMemoryError         ... for that device has no memory left
    ├── RequestBodyError          a request in OpenAI's format that cannot be served as it is
    ├── ReplicaError              a replica, or a worker of a cluster, that has ended or does not answer
    ├── AuditError                an audit that cannot be carried out
    └── BatchError                some of several requests could not be finished; it holds the other answers

A message names the value, the reason and the remedy, and never holds text or tokens of a request. The command line
prints it and exits with code 2; other bugs in forerun itself surface as ordinary Python exceptions.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ForerunError(Exception):
    """Root of all errors that the user can act upon."""


class ConfigError(ForerunError, ValueError):
    """An option is out of range or contradicts another."""


class SamplingError(ConfigError):
    """A sampling option is out of range or contradicts another."""


class GrammarError(SamplingError):
    """A JSON schema, regular expression or grammar that is invalid, too large, or cannot be followed by this model."""


class PromptError(ForerunError, ValueError):
    """A prompt that cannot be served."""


class ContextLengthError(PromptError):
    """A prompt that the model's context does not hold."""


class ModelLoadError(ForerunError):
    """A model folder that is missing, broken, or holds only pickled weights."""


class UnsupportedModelError(ModelLoadError):
    """An architecture that forerun cannot serve exactly."""


class FetchError(ForerunError):
    """A model that could not be fetched, kept or removed."""


class NativeUnavailableError(ForerunError):
    """The native kernels cannot be had: the references in PyTorch replace them, unless the user forbids it.

    Attributes:
        reason, remedy: sentences, which together are the message.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason} {remedy}")


class CompilationError(NativeUnavailableError):
    """The compiler ran, and failed or took too long."""


class DrafterError(ForerunError, ValueError):
    """A drafter that is unknown or cannot be used with its options."""


class IncompatibleDrafterError(DrafterError):
    """A drafter whose vocabulary or shape does not fit the target."""


class QueueFullError(ForerunError):
    """The queue is full."""


class NotEnoughMemoryError(ForerunError):
    """Weights, keys and values that do not fit into the memory that is available.

    Attributes:
        needed: bytes; 0 where the system refused memory, and how much is unknown.
        available: bytes.
    """

    def __init__(self, message: str, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class OutOfPagesError(ForerunError):
    """Keys and values that do not fit into their pool now.

    Attributes:
        wanted: pages requested.
        available: pages that can be taken.
        bound: pages of the pool.
    """

    def __init__(self, wanted: int, available: int, bound: int) -> None:
        self.wanted = wanted
        self.available = available
        self.bound = bound
        super().__init__(
            f"{wanted} more pages of keys and values are wanted, and the pool can give {available} of its {bound}. "
            "Let other sequences finish first, or give the pool more memory."
        )


class RequestError(ForerunError):
    """A request that could not be finished, though nothing was wrong with it."""


class NonFiniteError(RequestError):
    """A request for which the target computed logits that are NaN or infinite."""


class GrammarDeadEndError(RequestError):
    """A request whose grammar, or lists of tokens, leave no token to go on with, or that cannot be followed further."""


class InterruptedRequestError(RequestError):
    """A request whose step was interrupted where it could not be taken back."""


class EngineClosedError(RequestError):
    """A request to an engine that takes no more, or that was closed before the request was finished."""


class DeviceError(RequestError):
    """A device has failed: nothing more can be computed on it by this process."""


class DeviceMemoryError(RequestError):
    """A device has no memory left for what was to be computed. Smaller steps can still be computed."""


class RequestTimeoutError(RequestError):
    """A request that was not finished within the time that the server gives it."""


class RequestBodyError(ForerunError, ValueError):
    """A request in OpenAI's format that cannot be served as it is.

    Attributes:
        param: the field at fault; None if it is not one alone.
        code: OpenAI's error code; None without one.
        status: of the HTTP response.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ReplicaError(ForerunError):
    """A replica of a server, or a worker of a cluster, has ended or does not answer."""


class AuditError(ForerunError):
    """An audit that cannot be carried out: a server does not answer, or refuses a request."""


class BatchError(ForerunError):
    """Some of the requests that were given together could not be finished; the other answers are here.

    Attributes:
        generations: [prompts] the Generation of each prompt; None where it failed.
        errors: index of a prompt that failed -> its error.
    """

    def __init__(self, generations: Sequence[Any], errors: Mapping[int, Exception]) -> None:
        self.generations = list(generations)
        self.errors = dict(errors)
        number, error = next(iter(self.errors.items()))
        # the text of other exceptions may quote the request
        reason = f": {error}" if isinstance(error, ForerunError) else "."
        super().__init__(
            f"{len(self.errors)} of {len(self.generations)} requests failed, the first of them at index {number} with "
            f"{type(error).__name__}{reason} The other answers are in this error's `generations`, all reasons in "
            "its `errors`."
        )


class UnsoundProbsError(ValueError):
    """The distribution that a token was drawn from gives it nothing, or NaN: no acceptance would be right."""

    def __init__(self) -> None:
        super().__init__(
            "gave a drawn token whose own distribution gives it no positive probability. Give the distributions that "
            "the tokens were drawn from, or none if they were chosen."
        )
