"""Stages of a pipeline: which stage runs every call of a step.

The forward is a sequence of *runs*: stretches of calls that one layer makes.  A stage is a stretch of runs.  Backward
calls follow their layer's forward, and never go back to a later stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_models.errors import PartitionError
from autopar.passes.base import Phase, StepGraph

STAGE = "stage"  # node.meta: the stage that runs a call


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stretch of forward calls that one layer makes.

    Attributes:
        name: the layer's path; its second and later runs end in ``#2``, ``#3``, ...
        layer: the layer's path.
        nodes: the calls, in order.
    """

    name: str
    layer: str
    nodes: tuple[fx.Node, ...]


def early_backward(graph: fx.Graph) -> set[fx.Node]:
    """Backward calls that the forward reads (a loss that holds gradients): they belong to the forward."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        forward = node.op == "call_function" and node.meta.get("phase") is not Phase.BACKWARD
        if forward or node in found:
            found |= {
                s for s in node.all_input_nodes if s.op == "call_function" and s.meta.get("phase") is Phase.BACKWARD
            }
    return found


def layer_runs(step: StepGraph) -> list[Run]:
    """The forward as runs of layers; calls outside any layer belong to the run before them."""
    early = early_backward(step.graph)
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in step.graph.nodes:
        if node.op != "call_function" or (node.meta.get("phase") is Phase.BACKWARD and node not in early):
            continue
        layer = "" if node in early else node.meta.get("layer", "")
        if not runs or (layer and layer != runs[-1][0]):
            if runs and not runs[-1][0]:
                runs[-1] = (layer, runs[-1][1])
            else:
                runs.append((layer, []))
        runs[-1][1].append(node)
    seen: dict[str, int] = {}
    found = []
    for layer, nodes in runs:
        seen[layer] = seen.get(layer, 0) + 1
        name = layer if seen[layer] == 1 else f"{layer}#{seen[layer]}"
        found.append(Run(name=name, layer=layer, nodes=tuple(nodes)))
    return found


@dataclass(frozen=True, kw_only=True)
class SplitStages:
    """The pass: every call learns its stage (``meta["stage"]``).

    Attributes:
        stages: stage of every run, by its name; a run that is not named goes where the one before it went.
        num_stages: number of stages.

    Raises:
        PartitionError: a stage lies outside the pipeline, or a run comes before the one it follows.
    """

    stages: Mapping[str, int]
    num_stages: int

    def __call__(self, step: StepGraph) -> StepGraph:
        """``step`` with its calls marked in place."""
        places: dict[str, set[int]] = {}
        now = 0
        for run in layer_runs(step):
            stage = self.stages.get(run.name, now)
            if not now <= stage < self.num_stages:
                raise PartitionError(
                    f"layer {run.name!r} is placed on stage {stage} after a layer on stage {now} of {self.num_stages}; "
                    "stages follow the order in which the layers run"
                )
            now = stage
            places.setdefault(run.layer, set()).add(stage)
            for node in run.nodes:
                node.meta[STAGE] = stage
        for node in step.graph.nodes:
            if node.op == "call_function" and STAGE not in node.meta:
                node.meta[STAGE] = self._backward_stage(node, places)
        return step

    def _backward_stage(self, node: fx.Node, places: Mapping[str, set[int]]) -> int:
        sources = [s for s in node.all_input_nodes if s.op == "call_function"]
        gradients = [s.meta[STAGE] for s in sources if s.meta.get("phase") is Phase.BACKWARD]
        saved = [s.meta[STAGE] for s in sources if s.meta.get("phase") is not Phase.BACKWARD]
        latest = min(gradients, default=self.num_stages - 1)
        known = places.get(node.meta.get("layer", ""), set())
        if not known:
            return latest if gradients else max(saved, default=latest)
        if len(known) > 1 and saved and gradients:  # a layer that runs on several stages: what it reads tells which run
            latest = min(latest, max(saved))
        return max((s for s in known if s <= latest), default=latest)


def stage_of_input(name: str, places: Sequence[tuple[str, int]]) -> int:
    """Where an unused parameter or buffer is kept: with the layer that shares most of its path."""
    best, stage = -1, 0
    parts = name.split(".")
    for layer, where in places:
        shared = 0
        for mine, theirs in zip(parts, layer.split("."), strict=False):
            if mine != theirs:
                break
            shared += 1
        if shared > best:
            best, stage = shared, where
    return stage
