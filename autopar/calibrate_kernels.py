"""What the device takes for single operations, as curves over their size: the kernels' part of a calibration.

Every operation runs through the public function or the ATen overload that an emitted program calls, on tensors that
are not in the caches (a program comes back to a tensor after it touched many others), and allocates its results as a
program does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cost_models.cluster import Curve
from autopar.passes.torch_ops import aten
from autopar.stopwatch import Stopwatch

Note = Callable[[str, int, float], None]
Run = Callable[[Tensor], object]

WIDTH = 512  # columns of what is normalised, reduced or looked up
ELEMENTS = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
MATMUL_SIZES = (64, 128, 256, 512, 1024)
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (sequence, rows of the batch): short sequences in larger batches, so that all take about as long.
ATTENTION = ((64, 8), (128, 4), (256, 2), (512, 1), (1024, 1))
HEADS, HEAD_DIM = 4, 64
CACHES_BYTES = 1 << 26  # tensors are used in turns that touch as much


def kernel_table() -> dict[str, Callable[[Tensor], Run]]:
    """Op name to what makes, for a sample of its input ``[rows, WIDTH]``, the call to be timed.

    A call gets one of several equal inputs; what else it reads is made beforehand.
    """
    weight, bias = torch.ones(WIDTH), torch.zeros(WIDTH)

    def unary(function: Callable[[Tensor], object]) -> Callable[[Tensor], Run]:
        return lambda _: function

    def with_gradient(overload: Callable[..., object], *more: object) -> Callable[[Tensor], Run]:
        """``overload(gradient, input, ...)``."""

        def make(x: Tensor) -> Run:
            gradient = torch.ones_like(x)
            return lambda t: overload(gradient, t, *more)

        return make

    def softmax_backward(overload: Callable[..., object]) -> Callable[[Tensor], Run]:
        def make(x: Tensor) -> Run:
            gradient = torch.ones_like(x)
            return lambda t: overload(gradient, t, 1, t.dtype)

        return make

    def norm_backward(x: Tensor) -> Run:
        where = x.device
        w, b = weight.to(where), bias.to(where)
        _, mean, rstd = torch.native_layer_norm(x, (WIDTH,), w, b, 1e-5)
        gradient = torch.ones_like(x)
        return lambda t: aten.native_layer_norm_backward(gradient, t, [WIDTH], mean, rstd, w, b, [True, True, True])

    def norm(x: Tensor) -> Run:
        w, b = weight.to(x.device), bias.to(x.device)
        return lambda t: torch.native_layer_norm(t, (WIDTH,), w, b, 1e-5)

    def chosen(x: Tensor) -> Run:
        mask = torch.ones_like(x, dtype=torch.bool)
        return lambda t: torch.where(mask, t, 0.0)

    def dropped(x: Tensor) -> Run:
        return lambda t: torch.native_dropout(t, 0.1, True)  # noqa: FBT003 -- torch's own signature

    def scattered(x: Tensor) -> Run:
        index = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        return lambda t: torch.scatter(t, 1, index, -1.0)

    def joined(x: Tensor) -> Run:
        half = x.shape[0] // 2
        return lambda t: torch.cat([t[:half], t[half:]])

    return {
        "memory": unary(lambda t: torch.add(t, t)),
        "mul": unary(lambda t: torch.mul(t, 2.0)),
        "exp": unary(torch.exp),
        "tanh": unary(torch.tanh),
        "sigmoid": unary(torch.sigmoid),
        "rsqrt": unary(torch.rsqrt),
        "pow": unary(lambda t: torch.pow(t, 3)),
        "gelu": unary(F.gelu),
        "gelu_backward": with_gradient(aten.gelu_backward),
        "silu": unary(F.silu),
        "silu_backward": with_gradient(aten.silu_backward),
        "native_layer_norm": norm,
        "native_layer_norm_backward": norm_backward,
        "_softmax": unary(lambda t: torch.softmax(t, 1)),
        "_softmax_backward_data": softmax_backward(aten._softmax_backward_data),
        "_log_softmax": unary(lambda t: torch.log_softmax(t, 1)),
        "_log_softmax_backward_data": softmax_backward(aten._log_softmax_backward_data),
        "sum": unary(lambda t: torch.sum(t, 0)),
        "amax": unary(lambda t: torch.amax(t, 1)),
        "clone": unary(lambda t: t.t().clone(memory_format=torch.contiguous_format)),
        "cat": joined,
        "where": chosen,
        "native_dropout": dropped,
        "scatter": scattered,
    }


def kernel_curves(watch: Stopwatch, note: Note, elements: Sequence[int] = ELEMENTS) -> dict[str, Curve]:
    """Curves of the ops of :func:`kernel_table` over the bytes that they read and write.

    Args:
        watch: times.
        note: told of every measurement.
        elements: sizes of the inputs.

    Returns:
        (bytes, seconds) points by op name.
    """
    found = {}
    # As in the first steps of a training: the system's allocator learns to keep blocks of this size for itself.
    del [torch.empty(max(elements) + 2 * WIDTH, device=watch.place)][:]
    for name, make in kernel_table().items():
        points = []
        for count in elements:
            x = torch.rand(count // WIDTH, WIDTH, device=watch.place)
            run = make(x)
            moved = traffic_bytes(name, x, run(x))
            seconds = watch.seconds(in_turns(run, x))
            note(name, moved, seconds)
            points.append((float(moved), seconds))
        found[name] = rising(points)
    return found


def traffic_bytes(name: str, x: Tensor, result: object) -> int:
    """What the op reads and writes, each tensor once, as ``passes.pricing`` counts it for a node."""
    outputs = [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]  # type: ignore[attr-defined]
    written = sum(t.numel() * t.element_size() for t in outputs)
    size = x.numel() * x.element_size()
    reads = 2 if name.endswith(("_backward", "_backward_data")) else 1
    beside = x.numel() if name == "where" else 0
    if name == "scatter":
        # Priced by the rows that it is given, not by its table.
        return written + 3 * 8 * x.shape[0]
    return written + reads * size + beside


def in_turns(run: Run, x: Tensor) -> Callable[[], object]:
    """A call that takes another input each time and keeps its results a while, so that caches do not help."""
    count = max(2, min(64, CACHES_BYTES // max(x.numel() * x.element_size() * 2, 1)))
    inputs = itertools.cycle([x.clone() for _ in range(count)])
    kept: list[object] = [None] * count
    places = itertools.cycle(range(count))

    def call() -> None:
        kept[next(places)] = run(next(inputs))

    for _ in range(
        2 * count
    ):  # The allocator gets its memory from the system once, as in the first steps of a training.
        call()
    return call


def matmul_curves(watch: Stopwatch, note: Note, sizes: Sequence[int] = MATMUL_SIZES) -> dict[str, Curve]:
    """Curves of square matmuls over their operations, by format."""
    found = {}
    for name, dtype in DTYPES.items():
        points = []
        for n in sizes:
            a, b = (torch.randn(n, n, device=watch.place).to(dtype) for _ in range(2))
            seconds = watch.seconds(partial(torch.mm, a, b))
            note(f"matmul {name}", n, seconds)
            points.append((2.0 * n**3, seconds))
        found[f"matmul {name}"] = rising(points)
    return found


def attention_curves(watch: Stopwatch, note: Note) -> dict[str, Curve]:
    """Curves of causal attention, forward and backward, over the operations of one head of one row."""
    forward, backward = [], []
    for length, batch in ATTENTION:
        q, k, v = (torch.randn(batch, HEADS, length, HEAD_DIM, device=watch.place, requires_grad=True) for _ in "qkv")
        with torch.no_grad():
            seconds = watch.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: B023
        note("attention", length, seconds)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.ones_like(out)
        back_s = watch.seconds(partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True))
        note("attention backward", length, back_s)
        heads = batch * HEADS
        flops = 4.0 * length * length * HEAD_DIM * (length + 1) / (2 * length)
        forward.append((flops, seconds / heads))
        backward.append((2.5 * flops, back_s / heads))
    return {"attention": rising(forward), "attention_backward": rising(backward)}


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """The points with seconds that never fall: a small piece of work takes no longer than a larger one.

    Interruptions only lengthen, so of two points that contradict each other the shorter time is believed.

    >>> rising([(1.0, 3.0), (2.0, 2.0), (4.0, 5.0)])
    ((1.0, 2.0), (2.0, 2.0), (4.0, 5.0))
    """
    best, out = float("inf"), []
    for work, seconds in reversed(points):
        best = min(best, seconds)
        out.append((work, best))
    return tuple(reversed(out))
