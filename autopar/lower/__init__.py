"""Lowering: a step and a plan become the program of every rank."""

from autopar.lower.prepare import Prepared, prepare
from autopar.lower.program import Lowering, lower

__all__ = ["Lowering", "Prepared", "lower", "prepare"]
