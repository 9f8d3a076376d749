"""Proof that the programs of all ranks do what one device does: a static check, a lockstep run, a comparison."""

from autopar.verify.compare import assemble, shard_tensor
from autopar.verify.lockstep import run_lockstep
from autopar.verify.parity import verify_programs
from autopar.verify.report import Mismatch, Report, Row
from autopar.verify.static import check_programs

__all__ = [
    "Mismatch",
    "Report",
    "Row",
    "assemble",
    "check_programs",
    "run_lockstep",
    "shard_tensor",
    "verify_programs",
]
