"""Sends of a bound program, registered once.

``torch.ops._c10d_functional.isend`` notes its work under its input and under the handle it returns.  Waiting on one
leaves the other note behind, and with it the tensor, for ever; waiting on both waits twice for one message, which gloo
never ends.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import fx

from autopar.passes.torch_ops import ISEND
from autopar.torch_private import group_named, register_work


def send(tensor: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    """Start to send; ``wait_tensor`` on the handle that is returned waits for the end.

    Args:
        tensor: contiguous; it must not change before the wait.
        dst: position of the receiver in the group.
        tag: tells messages apart.
        group_name: name of a process group.
    """
    work = dist.isend(tensor, group=group_named(group_name), group_dst=dst, tag=tag)
    handle = tensor.new_empty(0)
    if work is not None:
        register_work(handle, work)
    return handle


def with_own_sends(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with its sends registered once, changed in place."""
    found = False
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is ISEND:
            node.target, found = send, True
    if found:
        module.recompile()
    return module


def call_directly(child: fx.GraphModule) -> None:
    """Let calls of a sub-program pass by module hooks, until it is compiled again: it is no layer of the user's model.

    Tools that hook into all modules (flop counters) would take its inputs for activations of a layer.
    """
    kind = type(child)  # every GraphModule has a class of its own
    kind.__call__ = kind.forward  # type: ignore[method-assign]
