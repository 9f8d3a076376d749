"""Capture: a plain model and one call of it become a :class:`~autopar.passes.base.StepGraph`.

First station of the pipeline.  Order of reading: ``call`` (how a call and its result are flattened), ``state`` (fake
stand-ins for the model's tensors), ``labels`` (layer and source line of every node), ``trace`` (the joint graph),
``convert`` (the joint graph becomes a StepGraph), ``refuse`` (what cannot be captured, said in one line).
"""

from autopar.capture.call import flatten_call, rebuild_result
from autopar.capture.trace import capture

__all__ = ["capture", "flatten_call", "rebuild_result"]
