"""The errors that autopar raises on purpose, under the name that users import."""

from autopar.cost_models.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    ConstraintError,
    InputError,
    PartitionError,
    PlanError,
    RuntimeStateError,
    UnsupportedOpError,
    UsageError,
    VerificationError,
)

__all__ = [
    "AutoparError",
    "CaptureError",
    "ClusterError",
    "ConstraintError",
    "InputError",
    "PartitionError",
    "PlanError",
    "RuntimeStateError",
    "UnsupportedOpError",
    "UsageError",
    "VerificationError",
]
