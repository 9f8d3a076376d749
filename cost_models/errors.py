"""The tree of errors that autopar raises on purpose.

Every deliberate error of the project is an :class:`AutoparError`.  The message says what was got, what was needed and
where to fix it.
"""


class AutoparError(Exception):
    """Base class of every error that autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph (a branch on tensor data, ``.item()``, an opaque object)."""


class ConstraintError(AutoparError):
    """A wish in ``Constraints`` cannot be honoured for this model or world size."""


class PlanError(AutoparError):
    """A plan does not belong to this model, this world size or this version of the schema."""


class PartitionError(AutoparError):
    """A rewrite pass produced or was given a graph that breaks an invariant."""


class InputError(AutoparError):
    """An input of a compiled module differs from what was compiled: structure, device, dtype or value across ranks."""


class RuntimeStateError(AutoparError):
    """A compiled module is in a state that cannot work (second backward, uninitialised parameters, stale optimizer)."""


class VerificationError(AutoparError):
    """The programs of the ranks do not agree with each other or with one device."""


class ClusterError(AutoparError):
    """A cluster description is unknown, incomplete or inconsistent."""


class UnsupportedOpError(AutoparError):
    """An operation cannot be run under the requested split."""


class UsageError(AutoparError):
    """An argument of a function or of the command line is unknown, malformed or not to be had here."""
