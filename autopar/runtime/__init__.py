"""The runtime: a compiled module runs one program for each kind of call.

Last station of the pipeline.  Order of reading: ``world`` and ``groups`` (the processes), ``layout`` and ``border``
(how tensors lie, and how they cross into a program and out), ``state``, ``optimizers`` and ``initialise`` (the model's
tensors), ``bind``, ``native``, ``sends`` and ``bindings`` (a program becomes a graph of this process), ``halves``,
``seed``, ``outputs``, ``runner``, ``joint`` and ``outer`` (a step and its place in autograd), ``calls``, ``arrivals``
and ``engine`` (which program serves a call), ``module``, ``loader`` and ``clip`` (what users hold), ``failures`` (what
they read then), ``pretend`` (a step whose computing is slept, to measure communication).
"""
