"""Every exception forerun raises on purpose.

    ForerunError
    ├── ConfigError               an option is out of range or contradicts another
    │   └── SamplingError         ... in SamplingParams
    ├── PromptError               a prompt that cannot be served: empty, too long, tokens out of range
    ├── ModelLoadError            a model folder that cannot be read
    │   └── UnsupportedModelError ... that can be read but not served exactly (state space, encoder-decoder)
    └── DrafterError              a drafter that cannot be used
        └── IncompatibleDrafterError  ... with this target

A message names the value, the reason and the remedy. The command line prints it and
exits with code 2; bugs in forerun itself surface as ordinary Python exceptions.
"""


class ForerunError(Exception):
    """Root of all errors that the user can act upon."""


class ConfigError(ForerunError, ValueError):
    """An option is out of range or contradicts another."""


class SamplingError(ConfigError):
    """A sampling option is out of range or contradicts another."""


class PromptError(ForerunError, ValueError):
    """A prompt that cannot be served."""


class ModelLoadError(ForerunError):
    """A model folder that is missing, broken, or holds only pickled weights."""


class UnsupportedModelError(ModelLoadError):
    """An architecture that forerun cannot serve exactly."""


class DrafterError(ForerunError, ValueError):
    """A drafter that is unknown or cannot be used as asked."""


class IncompatibleDrafterError(DrafterError):
    """A drafter whose vocabulary or shape does not fit the target."""
