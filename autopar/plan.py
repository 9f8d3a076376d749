"""What the user wishes (:class:`Constraints`) and what the search decided (:class:`Plan`).

A Plan is the hand-over from the search to the rewriting passes: plain values, saved as JSON, the same on every rank.
It belongs to one captured graph, which its ``fingerprint`` names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.cost_models.errors import AutoparError, ConstraintError, PlanError
from autopar.fingerprint import fingerprint
from autopar.passes.base import InputKind, Mesh, StepGraph
from autopar.passes.placement import Layout, Partial, Placement, Replicate, Shard, compatible
from autopar.report.explain import diff_plans, explain_plan

SCHEMA = 1
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb")
ZERO = (0, 1, 2, 3)
SEARCHED = "search"  # what `autopar search --json` adds to a plan: not part of it
MOST_CHUNKS = 16  # stages that one rank may run under an interleaved schedule


def layer_matches(pattern: str, path: str) -> bool:
    """Whether the layer at the dotted ``path``, or a layer that contains it, fits ``pattern``.

    ``*`` stands for any text within one component, ``**`` for any number of components.

    >>> layer_matches("blocks.*.mlp", "blocks.3.mlp"), layer_matches("blocks.*.mlp", "blocks.3.mlp.up")
    (True, True)
    >>> layer_matches("*.mlp", "blocks.3.mlp"), layer_matches("**.mlp", "blocks.3.mlp")
    (False, True)
    """
    pieces = (re.escape(part).replace(r"\*", r"[^.]*") for part in pattern.split("."))
    text = r"\.".join(pieces).replace(r"[^.]*[^.]*\.", r"(?:[^.]+\.)*").replace(r"[^.]*[^.]*", ".*")
    return re.fullmatch(rf"{text}(?:\..*)?", path) is not None


def _require(error: type[AutoparError], name: str, value: object, allowed: Collection[object]) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise error(f"{name}={value!r} is not possible; use one of {', '.join(repr(choice) for choice in allowed)}")


def _require_count(error: type[AutoparError], name: str, value: object, *, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name}={value!r} is not possible; use a whole number of at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConstraints:
    """Wishes for the layers that a pattern names; None leaves the choice to the search.

    Attributes:
        tp: ranks over which the layer's operations are split: 1, or the plan's whole ``tp``.
        zero: ZeRO stage of the layer's parameters, 0-3.
        recompute: "none", "selective" or "full".
        sequence_parallel: whether activations between its tensor-parallel regions are split along the sequence.
        stage: pipeline stage that runs it, counted from 0.

    Raises:
        ConstraintError: a value that no model could honour.
    """

    tp: int | None = None
    zero: int | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    stage: int | None = None

    def __post_init__(self) -> None:
        _check_wishes(self, "")
        if self.stage is not None:
            _require_count(ConstraintError, "stage", self.stage, least=0)

    def over(self, other: LayerConstraints) -> LayerConstraints:
        """These wishes, and those of ``other`` where there is none here."""
        set_here = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}
        return dataclasses.replace(other, **set_here)


def _check_wishes(wishes: LayerConstraints | Constraints, prefix: str) -> None:
    if wishes.tp is not None:
        _require_count(ConstraintError, f"{prefix}tp", wishes.tp)
    if wishes.zero is not None:
        _require(ConstraintError, f"{prefix}zero", wishes.zero, ZERO)
    if wishes.recompute is not None:
        _require(ConstraintError, f"{prefix}recompute", wishes.recompute, RECOMPUTE)
    if wishes.sequence_parallel is not None:
        _require(ConstraintError, f"{prefix}sequence_parallel", wishes.sequence_parallel, (True, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user fixes; a field that is None is the search's to choose.

    Attributes:
        dp: ranks over which the batch is split.
        tp: ranks over which layers are split.
        pp: pipeline stages.
        zero: ZeRO stage over ``dp``: 0 nothing is stored split; 1 parameters, gradients and optimizer state are;
            2 and gradients are reduced as soon as they are ready; 3 and parameters are gathered per use.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence.
        recompute: "none", "selective" or "full".
        microbatches: pieces in which a data rank's part of the batch is run.
        schedule: "gpipe", "1f1b", "interleaved" or "zb".
        memory_bytes: what a rank may use at its peak.
        layers: wishes by layer-name pattern (see :func:`layer_matches`), as mappings of the fields of
            :class:`LayerConstraints`; of several patterns that fit a layer a later one wins, field by field.

    Raises:
        ConstraintError: a value that no model and no world size could honour.

    >>> Constraints(dp=2, layers={"blocks.*.mlp": {"tp": 1}}).layer("blocks.7.mlp.up").tp
    1
    >>> Constraints(zero=4)
    Traceback (most recent call last):
    autopar.cost_models.errors.ConstraintError: zero=4 is not possible; use one of 0, 1, 2, 3
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    microbatches: int | None = None
    schedule: str | None = None
    memory_bytes: int | None = None
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_wishes(self, "")
        for name in ("dp", "pp", "microbatches", "memory_bytes"):
            if getattr(self, name) is not None:
                _require_count(ConstraintError, name, getattr(self, name))
        if self.schedule is not None:
            _require(ConstraintError, "schedule", self.schedule, SCHEDULES)
        object.__setattr__(self, "layers", {pattern: dict(wishes) for pattern, wishes in self.layers.items()})
        for pattern, wishes in self.layers.items():
            self._check_layer(pattern, wishes)

    def _check_layer(self, pattern: str, wishes: Mapping[str, Any]) -> None:
        known = [f.name for f in dataclasses.fields(LayerConstraints)]
        if unknown := sorted(set(wishes) - set(known)):
            raise ConstraintError(f"layers[{pattern!r}] has {', '.join(unknown)}; a layer knows {', '.join(known)}")
        try:
            layer = LayerConstraints(**wishes)
        except ConstraintError as error:
            raise ConstraintError(f"layers[{pattern!r}]: {error}") from error
        if layer.tp is not None and self.tp is not None:
            allowed = sorted({1, self.tp})
            _require(ConstraintError, f"layers[{pattern!r}]: tp", layer.tp, allowed)
        stages = (self.pp or 1) * (MOST_CHUNKS if self.schedule == "interleaved" else 1)
        if layer.stage is not None and self.pp is not None and layer.stage >= stages:
            raise ConstraintError(
                f"layers[{pattern!r}]: stage={layer.stage} is not possible with pp={self.pp}; use 0 to {stages - 1}"
            )

    def layer(self, path: str) -> LayerConstraints:
        """The wishes for the layer at the dotted ``path``: those of the patterns that fit, then the general ones."""
        wishes = LayerConstraints(
            tp=self.tp, zero=self.zero, recompute=self.recompute, sequence_parallel=self.sequence_parallel
        )
        for pattern, own in self.layers.items():
            if layer_matches(pattern, path):
                wishes = LayerConstraints(**own).over(wishes)
        return wishes

    def check_layers(self, paths: Collection[str]) -> None:
        """Every pattern of ``layers`` must fit one of the model's layer ``paths``.

        Raises:
            ConstraintError: a pattern fits none of them.
        """
        for pattern in self.layers:
            if not any(layer_matches(pattern, path) for path in paths):
                some = ", ".join(repr(path) for path in sorted(paths)[:6])
                raise ConstraintError(
                    f"layers[{pattern!r}] fits no layer of this model; '*' stands for one component and '**' for any "
                    f"number of them; layers are for example {some}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one step is expected to cost the slowest, fullest rank.

    Attributes:
        step_time_s: seconds a step.
        peak_bytes: most memory in use at once.
        comm_bytes: bytes that the rank sends.
        flops: floating-point operations that the rank does.

    Raises:
        PlanError: a figure that is negative, infinite or not a number.
    """

    step_time_s: float
    peak_bytes: int
    comm_bytes: int
    flops: int

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise PlanError(f"predicted.{f.name} is {value!r}; it must be a finite number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How far the plan may be from the best one of the space that was searched.

    Attributes:
        gap: (predicted - bound) / predicted, or None where no bound was computed.
        bound_s: proven lower bound of the step time over the space, seconds, or None.
        space: the space, in words.
    """

    gap: float | None = None
    bound_s: float | None = None
    space: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor that a plan stores: what it is, its global shape, its dtype and the other names it goes by.

    Attributes:
        kind: "parameter", "buffer", "batch" or "seed".
        shape: global shape.
        dtype: torch's name of it without the "torch.".
        aliases: other names of a tied tensor.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * int(dtype.itemsize)


def describe_tensors(step: StepGraph) -> dict[str, TensorInfo]:
    """The step's tensor inputs by name, in the order of its placeholders."""
    found = {}
    for spec, node in zip(step.inputs, step.placeholders, strict=True):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found[spec.name] = TensorInfo(
                kind=spec.kind.value,
                shape=tuple(value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                aliases=spec.aliases,
            )
    return found


def format_placement(placement: Placement, num_ranks: int) -> str:
    """A placement on an axis of ``num_ranks`` as text: ``R``, ``P(sum)``, ``S(dim)`` or ``S(dim,blocks)``.

    The units are written too, ``S(dim,blocks,units)``, where they are not the number of ranks.

    >>> format_placement(Shard(0, 3, 2), 2), format_placement(Shard(1, 1, 7), 2), format_placement(Replicate(), 2)
    ('S(0,3)', 'S(1,1,7)', 'R')
    """
    if isinstance(placement, Shard) and placement.units != num_ranks:
        return f"S({placement.dim},{placement.blocks},{placement.units})"
    return str(placement)


def parse_placement(text: str, num_ranks: int) -> Placement:
    """Inverse of :func:`format_placement`.

    Raises:
        PlanError: the text is none of its forms.

    >>> parse_placement("S(0,3)", 2)
    Shard(dim=0, blocks=3, units=2)
    """
    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"P\((sum|max|min)\)", text):
        return Partial(match[1])
    if match := re.fullmatch(r"S\((\d+)(?:,(\d+))?(?:,(\d+))?\)", text):
        return Shard(int(match[1]), int(match[2] or 1), int(match[3] or num_ranks))
    raise PlanError(f"placement {text!r} is not one of R, P(sum), P(max), P(min), S(dim), S(dim,blocks[,units])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one training step is split over ``dp * tp * pp`` ranks.

    The ranks of a pipeline stage form a :attr:`mesh` with the axes ``dp`` and ``tp``; the texts of ``storage`` follow
    that order, those of ``choices`` the order of :attr:`work_mesh`, which has an axis of micro-batches between them.

    Attributes:
        fingerprint: which captured step it is for (:func:`fingerprint`).
        dp, tp, pp: ranks over which the batch and the layers are split, and pipeline stages.
        zero: ZeRO stage over ``dp``, 0-3.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence.
        recompute: "none", "selective" or "full"; ``recompute_layers`` holds the layers that differ.
        microbatches: pieces in which a data rank's part of the batch is run.
        schedule: name of the pipeline schedule, or None where nothing is scheduled.
        stages: pipeline stage of each layer that was placed; empty where pp is 1.
        choices: label of the strategy chosen on each mesh axis, by graph node; a node that is not here is replicated.
        storage: placement of each parameter, buffer and batch input on each mesh axis (:func:`format_placement`).
        tensors: shapes and dtypes of what ``storage`` names.
        notes: what a reader should know: replicated operations, ties, axes that had nothing to split.
        predicted: expected cost of a step.
        certificate: how good the plan is.
        schema: version of the format.

    Raises:
        PlanError: fields that contradict each other.
    """

    fingerprint: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_layers: Mapping[str, str] = field(default_factory=dict, hash=False)
    microbatches: int = 1
    schedule: str | None = None
    stages: Mapping[str, int] = field(default_factory=dict, hash=False)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    storage: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    predicted: Prediction
    certificate: Certificate = Certificate()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _require(PlanError, "schema", self.schema, (SCHEMA,))
        for name in ("dp", "tp", "pp", "microbatches"):
            _require_count(PlanError, name, getattr(self, name))
        _require(PlanError, "zero", self.zero, ZERO)
        for layer, kind in {"": self.recompute, **self.recompute_layers}.items():
            _require(PlanError, f"recompute of {layer!r}" if layer else "recompute", kind, RECOMPUTE)
        for layer, stage in self.stages.items():
            most = self.pp if self.schedule != "interleaved" else MOST_CHUNKS * self.pp
            _require(PlanError, f"stage of {layer!r}", stage, range(most))
        for name in ("recompute_layers", "stages", "choices", "storage", "tensors"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name, mesh in (("choices", self.work_mesh), ("storage", self.mesh)):
            for key, texts in getattr(self, name).items():
                if len(texts) != len(mesh.axes):
                    raise PlanError(f"{name}[{key!r}] is {texts!r}; it needs one text for each of {mesh.axes}")
        for name in self.storage:
            self._check_storage(name)

    def _check_storage(self, name: str) -> None:
        layout, info = self.layout(name), self.tensors.get(name)
        if info is None:
            return
        dims = [placement.dim for placement in layout if isinstance(placement, Shard)]
        if any(dim >= len(info.shape) for dim in dims) or not compatible(layout, info.shape):
            texts = " ".join(self.storage[name])
            raise PlanError(f"{name!r} has shape {list(info.shape)} and cannot be stored as {texts}")

    @classmethod
    def for_step(cls, step: StepGraph, **fields: Any) -> Plan:  # noqa: ANN401 - the fields of the class itself
        """A plan for ``step`` with its fingerprint and tensors filled in; ``fields`` are the others."""
        return cls(fingerprint=fingerprint(step), tensors=describe_tensors(step), **fields)

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks of one pipeline stage."""
        return Mesh(axes=("dp", "tp"), sizes=(self.dp, self.tp))

    @property
    def work_mesh(self) -> Mesh:
        """The grid over which work is split: :attr:`mesh`, and micro-batches as an axis "mb" where there are any."""
        if self.microbatches == 1 and self.pp == 1:
            return self.mesh
        return Mesh(axes=("dp", "mb", "tp"), sizes=(self.dp, self.microbatches, self.tp))

    @property
    def num_stages(self) -> int:
        """Pipeline stages; under an interleaved schedule a rank runs several."""
        if self.schedule != "interleaved":
            return self.pp
        return self.pp * max(1, -(-(1 + max(self.stages.values(), default=0)) // self.pp))

    @property
    def world_size(self) -> int:
        """Ranks that the plan is for."""
        return self.dp * self.tp * self.pp

    def layout(self, name: str) -> Layout:
        """How the parameter, buffer or batch input ``name`` is stored; replicated where the plan does not name it."""
        texts = self.storage.get(name, ("R",) * len(self.mesh.axes))
        return tuple(parse_placement(text, size) for text, size in zip(texts, self.mesh.sizes, strict=True))

    def check(self, step: StepGraph, *, world_size: int | None = None) -> None:
        """Refuse a plan that was made for another model, other shapes or another number of ranks.

        Raises:
            PlanError: ``step`` has another fingerprint, or ``world_size`` is not the plan's.
        """
        if world_size is not None and world_size != self.world_size:
            raise PlanError(
                f"the plan is for {self.world_size} ranks (dp {self.dp} x tp {self.tp} x pp {self.pp}) and "
                f"{world_size} are running; start {self.world_size} (torchrun --nproc-per-node) or make another plan"
            )
        if fingerprint(step) == self.fingerprint:
            return
        raise PlanError(
            f"the plan was made for another model: {_first_difference(self.tensors, describe_tensors(step))}; "
            "make a new plan for this model, these inputs and this version of torch"
        )

    def to_json(self) -> str:
        """The plan as JSON text, in the order of the fields."""
        return json.dumps({"format": "autopar plan", **dataclasses.asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`.

        Raises:
            PlanError: the text is not a plan, or one of another schema.
        """
        try:
            return _decode(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"this is not a plan of schema {SCHEMA}: {type(error).__name__}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as JSON.

        Raises:
            PlanError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise PlanError(f"the plan {os.fspath(path)!r} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: the file cannot be read or does not hold a plan of this schema.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan {os.fspath(path)!r} cannot be read: {error}") from error
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)}: {error}") from error

    def hash(self) -> str:
        """SHA-256 of the plan, equal on every rank that holds the same plan."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

    def explain(self) -> str:
        """The plan in plain text: what is split where, bytes, predicted cost and what to know."""
        return explain_plan(self)

    def diff(self, other: Plan) -> str:
        """What changes from this plan to ``other``, one line each; empty where they are equal."""
        return diff_plans(self, other)


def _first_difference(planned: Mapping[str, TensorInfo], present: Mapping[str, TensorInfo]) -> str:
    for name in [*planned, *present]:
        if name not in present:
            return f"it has no {planned[name].kind} {name!r}"
        if name not in planned:
            return f"its {present[name].kind} {name!r} is not in the plan"
        if planned[name] != present[name]:
            was, now = planned[name], present[name]
            return f"{name!r} is {now.dtype}{list(now.shape)} and was {was.dtype}{list(was.shape)}"
    return "its inputs are the same and its operations differ"


def _decode(document: Any) -> Plan:  # noqa: ANN401 - parsed JSON
    if not isinstance(document, dict) or document.pop("format", None) != "autopar plan":
        raise PlanError('this is not an autopar plan: there is no "format": "autopar plan" in it')
    if document.get("schema") != SCHEMA:
        found = document.get("schema")
        raise PlanError(f"the plan has schema {found!r} and this version reads {SCHEMA}; make the plan again")
    document.pop(SEARCHED, None)
    names = {f.name for f in dataclasses.fields(Plan)}
    if document.keys() != names:
        raise PlanError(f"fields are missing or unknown: {', '.join(sorted(document.keys() ^ names))}")
    for name in ("choices", "storage"):
        document[name] = {key: tuple(texts) for key, texts in document[name].items()}
    document["tensors"] = {name: _decode_tensor(info) for name, info in document["tensors"].items()}
    document["notes"] = tuple(document["notes"])
    document["predicted"] = Prediction(**document["predicted"])
    document["certificate"] = Certificate(**document["certificate"])
    return Plan(**document)


def _decode_tensor(info: Mapping[str, Any]) -> TensorInfo:
    return TensorInfo(
        kind=InputKind(info["kind"]).value,
        shape=tuple(info["shape"]),
        dtype=info["dtype"],
        aliases=tuple(info["aliases"]),
    )
