"""What went wrong inside a program: where it was, whose layer it serves, and who did not come."""

from __future__ import annotations

import linecache
import types
from datetime import timedelta

import torch.distributed as dist
from torch import fx

from autopar.cost_models.errors import AutoparError, RuntimeStateError
from autopar.runtime.world import World

ROLL_CALL_S = 3.0
COMMUNICATION = "_c10d_functional"
# How gloo and NCCL say that another process is gone or late.
LOST = ("Connection closed", "Timed out", "Connection reset", "timed out", "Connection refused", "Broken pipe", "abort")


def explained(error: Exception, bound: fx.GraphModule, world: World, step: int) -> Exception:
    """The error to raise for one that came out of a program.

    Args:
        error: what was raised.
        bound: the graph that raised it.
        world: the processes.
        step: number of the call, from 1.

    Returns:
        a RuntimeStateError where a rank was waited for in vain, else ``error`` itself with a note of the place.
    """
    if isinstance(error, AutoparError):
        return error
    node = _failing_node(error.__traceback__, bound)
    place = "" if node is None else _place(node)
    lost = isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST)
    if world.size == 1 or not lost or (node is not None and COMMUNICATION not in str(node.target)):
        if place:
            error.add_note(f"autopar: rank {world.rank}, step {step}, {place}")
        return error
    return RuntimeStateError(
        f"rank {world.rank} waited in vain for another rank in step {step}, {place or 'before its program ran'}: "
        f"{_missing(world)}; a rank ran fewer steps, failed earlier (its own message says why) or called the module "
        f"with another kind of input ({_first_line(error)})"
    )


def _failing_node(traceback: types.TracebackType | None, bound: fx.GraphModule) -> fx.Node | None:
    """The node whose line of generated code is the innermost in the traceback."""
    modules = [module for module in bound.modules() if isinstance(module, fx.GraphModule)]
    nodes = {node.name: node for module in modules for node in module.graph.nodes}
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if filename.startswith("<eval_with_key>"):
            line = linecache.getline(filename, traceback.tb_lineno).strip()
            found = nodes.get(line.split("=")[0].split(":")[0].strip(), found)
        traceback = traceback.tb_next
    return found


def _place(node: fx.Node) -> str:
    """The node with its layer and source; a wait is told by what it waits for."""
    if "wait_tensor" in str(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    layer, source = node.meta.get("layer"), node.meta.get("source")
    kind = str(node.target).removeprefix(f"{COMMUNICATION}.").removesuffix(".default")
    where = f" for layer {layer}" if layer else ""
    return f"{kind} {node.name!r}{where}{f' ({source})' if source else ''}"


def _missing(world: World) -> str:
    """Who is there, as far as the ranks that still answer can tell."""
    if world.control is None:
        return "nobody else is there"
    try:
        dist.monitored_barrier(world.control, timeout=timedelta(seconds=ROLL_CALL_S), wait_all_ranks=True)
    except RuntimeError as error:
        return f"roll call: {_first_line(error)}"
    return "all ranks answer a roll call, so they wait for each other in different places"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
