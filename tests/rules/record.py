"""Writes ``calls.json``: calls of ATen operations met in torch's operator database and in random models.

python -m tests.rules.record
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import fx

from autopar.capture import capture, flatten_call
from autopar.errors import AutoparError
from autopar.passes.base import StepGraph
from autopar.passes.normalize import Normalize
from autopar.passes.rules.table import op_name
from autopar.passes.torch_ops import OpOverload
from autopar.verify.values import model_values
from tests.passes.random_models import random_model
from tests.rules.calls import FILE, encode
from tests.rules.opinfo import operations, samples
from tests.rules.sweep import inputs_of, runs

KEPT, LARGEST, MODELS, SAMPLES = 4, 600, 40, 3


class Recorder(fx.Interpreter):
    """Runs a step and keeps the arguments of every call."""

    def __init__(self, step: StepGraph) -> None:
        super().__init__(step.graph_module)
        self.found: list[tuple[str, Any, Any]] = []

    def run_node(self, n: fx.Node) -> object:
        if n.op == "call_function" and isinstance(n.target, OpOverload):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.found.append((op_name(n.target), args, kwargs))
        return super().run_node(n)


def steps() -> Iterator[tuple[StepGraph, Mapping[str, Any]]]:
    """Captured steps with values for their inputs."""
    for op in operations().values():
        for sample in filter(runs, samples(op, SAMPLES)):
            try:
                step = capture(sample, tuple(sample.tensors), training=any(t.requires_grad for t in sample.tensors))
                values = inputs_of(step, sample)
            except AutoparError:
                continue
            if values:
                yield step, values
    for seed in range(MODELS):
        model, args = random_model(Random(seed))
        step = capture(model, args)
        values = model_values(step, model, flatten_call(args)[0])
        yield step, {"seed[0]": torch.tensor(1.0)} | values


def extra() -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Calls that neither the database nor the models meet, or only with large tensors."""
    line, image, box = torch.randn(2, 3, 4), torch.randn(2, 3, 4, 2), torch.randn(2, 2, 2, 3, 2)
    grown = {1: [6], 2: [6, 4], 3: [4, 3, 5]}
    for places, x in ((1, line), (2, image), (3, box)):
        sizes, rest = grown[places], [None] * places
        wide = torch.randn(2, x.shape[1], *sizes)
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            yield f"aten::{kind}{places}d", [x, sizes, *rest], {}
            yield f"aten::{kind}{places}d_backward", [wide, sizes, list(x.shape), *rest], {}
    for name, x in (("linear1d", line), ("bilinear2d", image), ("bicubic2d", image), ("trilinear3d", box)):
        places = x.dim() - 2
        sizes, rest = grown[places], [False, *[None] * places]
        wide = torch.randn(2, x.shape[1], *sizes)
        yield f"aten::upsample_{name}", [x, sizes, *rest], {}
        yield f"aten::upsample_{name}_backward", [wide, sizes, list(x.shape), *rest], {}
        if places == 2:
            yield f"aten::_upsample_{name}_aa", [x, sizes, *rest], {}
            yield f"aten::_upsample_{name}_aa_backward", [wide, sizes, list(x.shape), *rest], {}
    gain = torch.rand(4) + 0.5
    yield "aten::_fused_rms_norm", [line, [4], gain, 1e-5], {}
    yield "aten::_fused_rms_norm_backward", [line, line + 1, [4], torch.rand(2, 3, 1) + 0.5, gain, [True, True]], {}
    mask = torch.arange(24).reshape(2, 3, 4) % 5 > 0
    for how in ("all", "any"):
        yield f"aten::{how}.dim", [mask, 1], {}
        yield f"aten::{how}.dims", [mask, [0, 2], True], {}
    yield "aten::count_nonzero.dim_IntList", [mask.float(), [0, 2]], {}
    yield "aten::median.dim", [line, 1], {}
    yield "aten::sort.stable", [line], {"stable": True, "dim": 1}
    yield "aten::linalg_eig", [torch.randn(4, 3, 3)], {}
    yield "aten::view.dtype", [line, torch.int32], {}
    yield "aten::view.dtype", [line, torch.int16], {}
    yield "aten::view", [image, [6, 8]], {}
    yield "aten::_unsafe_view", [image, [2, 3, 8]], {}
    yield "aten::eye.m", [4, 6], {}
    yield "aten::linspace", [0, 1, 6], {}
    yield "aten::linspace.Scalar_Tensor", [0, torch.tensor(2.0), 6], {}
    yield "aten::logspace", [0, 1, 6], {}
    yield "aten::logspace.Scalar_Tensor", [0, torch.tensor(2.0), 6], {}
    yield "aten::tril_indices", [4, 4], {}
    yield "aten::triu_indices", [4, 4], {}


def weight(call: Mapping[str, Any]) -> tuple[int, int]:
    """Calls with many dims to split come first, small ones before large ones."""
    shapes = [t["shape"] for t in tensors([*call["args"], *call["kwargs"].values()])]
    even = sum(n > 1 for shape in shapes for n in shape)
    return -even, sum(math.prod(shape) for shape in shapes)


def tensors(items: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        if isinstance(item, dict) and "shape" in item:
            yield item
        elif isinstance(item, list):
            yield from tensors(item)


def record() -> dict[str, list[dict[str, Any]]]:
    """Calls by operation: of those met, the ones with most to split, all of different shapes."""
    met: dict[str, dict[str, dict[str, Any]]] = {}
    for step, values in steps():
        for form in (step, Normalize()(step)):
            recorder = Recorder(form)
            with torch.no_grad():
                recorder.run(*(values[s.name] for s in step.inputs), enable_io_processing=False)
            for op, args, kwargs in recorder.found:
                try:
                    call = {"args": encode(args), "kwargs": {k: encode(v) for k, v in kwargs.items()}}
                except TypeError:
                    continue
                shapes = [t["shape"] for t in tensors([*call["args"], *call["kwargs"].values()])]
                if shapes and all(0 < math.prod(shape) <= LARGEST for shape in shapes):
                    met.setdefault(op, {}).setdefault(str(shapes), call)
    for op, args, kwargs in extra():
        call = {"args": encode(args), "kwargs": {k: encode(v) for k, v in kwargs.items()}}
        met.setdefault(op, {}).setdefault(str(call), call)
    return {op: sorted(calls.values(), key=weight)[:KEPT] for op, calls in sorted(met.items())}


def main() -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = record()
    lines = [
        f"  {json.dumps(op)}: [\n    " + ",\n    ".join(map(json.dumps, calls)) + "\n  ]" for op, calls in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{sum(map(len, found.values()))} calls of {len(found)} operations in {FILE.name}")


if __name__ == "__main__":
    main()
