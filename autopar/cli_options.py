"""Options that several commands of the command line share, as one dataclass, and what they mean."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import UsageError
from autopar.models.load import LoadedModel, load_model
from autopar.plan import Constraints

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str) -> int:
    """A size such as ``80GB`` (1e9 bytes each) or ``64GiB`` (2**30).

    Raises:
        UsageError: the text has another form.

    >>> bytes_of("80GB"), bytes_of("1.5 GiB"), bytes_of("123")
    (80000000000, 1610612736, 123)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is no size; write it like 80GB, 64GiB or 1000000")
    return round(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """The call of the model, the cluster, and what is fixed of the plan."""

    cluster: Annotated[str | None, typer.Option(help="2x8xH100 (nodes x devices x kind), or a JSON file.")] = None
    global_batch: Annotated[int | None, typer.Option(help="Rows of the global batch.")] = None
    sequence: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None
    dp: Annotated[int | None, typer.Option(help="Ranks over which the batch is split.")] = None
    tp: Annotated[int | None, typer.Option(help="Ranks over which layers are split.")] = None
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="Split activations between tensor-parallel regions along the sequence.")
    ] = None
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")] = None
    microbatches: Annotated[int | None, typer.Option(help="Pieces in which a rank's batch is run.")] = None
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved or zb.")] = None
    memory: Annotated[str | None, typer.Option(help="What a rank may use, such as 60GB.")] = None
    layers: Annotated[str | None, typer.Option(help='Wishes by layer pattern, as JSON: {"blocks.*": {"tp": 1}}.')] = (
        None
    )
    optimizer: Annotated[str, typer.Option(help="Whose state is counted as memory.")] = "adamw"

    def load(self, model: str, *, device: str = "meta") -> LoadedModel:
        """The model and its call; the batch is the one asked for, else a row for each device, else the model's own."""
        batch = self.global_batch
        if batch is None and self.cluster is not None and not model.rpartition(":")[0].endswith(".py"):
            batch = self.ranks().num_devices
        return load_model(model, batch=batch, sequence=self.sequence, device=device)

    def ranks(self) -> Cluster:
        """The cluster asked for, else this machine with as many ranks as the fixed sizes make."""
        if self.cluster is not None:
            return Cluster.parse(self.cluster)
        sizes = self.constraints()
        return Cluster.local(math.prod(size or 1 for size in (sizes.dp, sizes.tp, sizes.pp)))

    def constraints(self) -> Constraints:
        """The fixed fields.

        Raises:
            ConstraintError: a value that cannot be.
            UsageError: ``memory`` or ``layers`` cannot be read.
        """
        fixed = {f.name: getattr(self, f.name) for f in dataclasses.fields(Constraints) if hasattr(self, f.name)}
        fixed["layers"] = _layers(self.layers)
        return Constraints(**fixed, memory_bytes=None if self.memory is None else bytes_of(self.memory))


def _layers(text: str | None) -> dict[str, dict[str, object]]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"layers {text!r} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(wishes, dict) for wishes in found.values()):
        raise UsageError(f'layers {text!r} must map patterns to wishes, like {{"blocks.*.mlp": {{"tp": 1}}}}')
    return found


def with_work_options(command: Callable[..., int]) -> Callable[..., int]:
    """``command(..., work)`` as a command that takes the fields of :class:`WorkOptions` as options."""
    hints = typing.get_type_hints(command, include_extras=True)
    fields = typing.get_type_hints(WorkOptions, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=fields[f.name])
        for f in dataclasses.fields(WorkOptions)
    ]

    @functools.wraps(command)
    def run(**values: object) -> int:
        work = WorkOptions(**{p.name: values.pop(p.name) for p in shared})  # type: ignore[arg-type]
        return command(**values, work=work)

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "work"]
    signature = inspect.Signature([*kept, *shared], return_annotation=int)
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": int}
    return run
