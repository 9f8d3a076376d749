"""What kernels cost: a roofline over matmuls, attention and memory-bound chains, vectorised over the ops.

A matmul is dealt out in output tiles to the processors of the device; a wave of tiles runs as long as a full one, and
the inner dimension has to be long enough to hide the start of a tile.  Everything else is priced by the bytes it moves.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.cluster import Device, read_curve
from autopar.cost_models.errors import ClusterError

Floats = NDArray[np.float64]
ITEMSIZE = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp4": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "bool": 1,
}

ATTENTION = ("flash1", "flash", "cudnn", "unfused")


# (rows, columns, share of the peak): large tiles reuse more of what they load.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (256, 64, 0.9),
    (64, 256, 0.9),
    (128, 64, 0.82),
    (64, 64, 0.65),
)


class OpKind(enum.Enum):
    """How an op is priced."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One computation on one device.

    Attributes:
        name: ATen name, such as ``mm``.
        kind: how it is priced.
        shapes: MATMUL ``((batch, m, k), (batch, k, n))``; ATTENTION ``((b, heads, queries, d), (b, kv_heads, keys,
            d))``; otherwise the shapes of inputs and outputs.
        dtype: of the inputs: fp32, bf16, fp16, fp8...
        flops: floating-point operations executed (a causal kernel skips half).
        bytes: read and written, each tensor once.
        layer: dotted path of the module it came from.
        num_kernels: kernels that it launches.
        is_linear: whether a MATMUL multiplies by a weight (and may run in fp8).
    """

    name: str
    kind: OpKind
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: float
    bytes: float
    layer: str = ""
    num_kernels: int = 1
    is_linear: bool = False


def matmul(  # noqa: PLR0913 -- three sizes and what else names a matmul
    m: int, n: int, k: int, dtype: str, *, batch: int = 1, name: str = "mm", layer: str = "", is_linear: bool = True
) -> Op:
    """A matmul ``[batch, m, k] @ [batch, k, n]``.

    >>> matmul(2, 3, 4, "bf16").flops, matmul(2, 3, 4, "bf16").bytes
    (48.0, 52.0)
    """
    return Op(
        name=name,
        kind=OpKind.MATMUL,
        shapes=((batch, m, k), (batch, k, n)),
        dtype=dtype,
        flops=2.0 * batch * m * n * k,
        bytes=float(batch * (m * k + k * n + m * n) * ITEMSIZE[dtype]),
        layer=layer,
        is_linear=is_linear,
    )


def memory_op(name: str, num_bytes: float, dtype: str = "fp32", *, layer: str = "", num_kernels: int = 1) -> Op:
    """An op priced by its bytes alone."""
    return Op(
        name=name,
        kind=OpKind.MEMORY,
        shapes=(),
        dtype=dtype,
        flops=0.0,
        bytes=float(num_bytes),
        layer=layer,
        num_kernels=num_kernels,
    )


def unfused_attention(op: Op, *, dropout: bool) -> tuple[Op, ...]:
    """What an attention op becomes without a fused kernel: batched matmuls and passes over the score matrix.

    The scale, mask and softmax are one kernel (Megatron's fused softmax); dropout is another.  Nothing is skipped under
    a causal mask.
    """
    (b, heads, queries, d), (_, kv_heads, keys, _) = op.shapes
    batch, item = b * heads, ITEMSIZE[op.dtype]
    scores = batch * queries * keys
    expand = kv_heads != heads
    extra = [memory_op("repeat_kv", 2 * b * keys * d * (heads + kv_heads) * item)] if expand else []

    def bmm(m: int, n: int, k: int) -> Op:
        return matmul(m, n, k, op.dtype, batch=batch, name="bmm", layer=op.layer, is_linear=False)

    drop = [memory_op("dropout", scores * (2 * item + 1))] if dropout else []
    if op.kind is OpKind.ATTENTION:
        middle = [memory_op("softmax", scores * 2 * item), *drop]
        return (*extra, bmm(queries, keys, d), *middle, bmm(queries, d, keys))
    middle = [*drop, memory_op("softmax_backward", scores * 3 * item)]
    return (
        bmm(queries, keys, d),
        bmm(keys, d, queries),
        *middle,
        bmm(queries, d, keys),
        bmm(keys, d, queries),
        *extra,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """Prices ops on one device.  The constants describe how matmul libraries work, and hold for every device.

    Attributes:
        device: what runs.
        attention: which kernel an attention op is: ``flash1`` (2022), ``flash``, ``cudnn`` or ``unfused``.
        attention_dropout: whether unfused attention drops out scores.
        linear_dtype: format in which matmuls by a weight run, when another than their inputs' (``fp8``).
        tiles: (rows, columns, share of the peak a full wave of such tiles reaches).
        misaligned: share of the peak left to a batched matmul of which an inner or outer length is no multiple of 16
            bytes.
        misaligned_linear: the same of a matmul by a weight; padding GPT-2's vocabulary of 50257 to 50304 made whole
            steps a quarter faster (nanoGPT, commit of February 2023), of which the logits are a quarter.
    """

    device: Device
    attention: str = "flash"
    attention_dropout: bool = False
    linear_dtype: str = ""
    tiles: tuple[tuple[int, int, float], ...] = TILES
    misaligned: float = 0.095
    misaligned_linear: float = 0.45

    def __post_init__(self) -> None:
        """Refuse an attention kernel that is not known."""
        if self.attention not in ATTENTION:
            raise ClusterError(f"attention {self.attention!r} is unknown; use one of {', '.join(ATTENTION)}")

    def expand(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        """The ops as this model's kernels: unfused attention taken apart, weights' matmuls in their format."""
        out: list[Op] = []
        for op in ops:
            if op.kind in (OpKind.ATTENTION, OpKind.ATTENTION_BACKWARD) and self.attention == "unfused":
                out += unfused_attention(op, dropout=self.attention_dropout)
            elif op.is_linear and self.linear_dtype:
                (b, m, k), (_, _, n) = op.shapes
                item = ITEMSIZE[op.dtype]
                out.append(memory_op("quantize", b * m * k * (item + 2), layer=op.layer))
                out.append(dataclasses.replace(op, dtype=self.linear_dtype, bytes=b * (m * k + k * n + m * n * item)))
            else:
                out.append(op)
        return tuple(out)

    def seconds(self, ops: Sequence[Op]) -> Floats:
        """Time of each op on the device, alone; expanded attention is not (see :meth:`expand`)."""
        result = self._formula_seconds(ops)
        if self.device.curves:
            measured = [self._measured_seconds(op) for op in ops]
            result = np.where(np.isnan(measured), result, measured)
        return result

    def _measured_seconds(self, op: Op) -> float:
        """Time by the device's curves; not a number where none serves the op."""
        curves, work, count = self.device.curves, op.bytes, 1
        curve = curves.get(op.name, curves.get("memory"))
        if op.kind is OpKind.MATMUL:
            curve, work = curves.get(f"matmul {op.dtype}"), op.flops
        elif op.kind is not OpKind.MEMORY:
            count = op.shapes[0][0] * op.shapes[0][1]
            curve, work = curves.get(op.kind.value), op.flops / max(count, 1)
        if curve is None:
            return math.nan
        seconds = float(count * read_curve(curve, work))
        return max(seconds, op.bytes / self._memory_rate()) if op.kind is OpKind.MATMUL else seconds

    def _formula_seconds(self, ops: Sequence[Op]) -> Floats:
        result = np.array([op.bytes for op in ops], dtype=np.float64) / self._memory_rate()
        busy = np.zeros(len(ops))
        which = [i for i, op in enumerate(ops) if op.kind is OpKind.MATMUL]
        if which:
            busy[which] = self._matmul_seconds([ops[i] for i in which])
        for i, op in enumerate(ops):
            if op.kind in (OpKind.ATTENTION, OpKind.ATTENTION_BACKWARD):
                busy[i] = self._attention_seconds(op)
        kernels = np.array([op.num_kernels for op in ops], dtype=np.float64)
        return np.maximum(result, busy) + kernels * self.device.kernel_s

    def total_seconds(self, ops: Sequence[Op], *, dispatch_s: float = 0.0) -> float:
        """Time of a run of ops: the device's, or the host's when it launches more slowly than the device computes."""
        expanded = self.expand(ops)
        if not expanded:
            return 0.0
        launches = sum(op.num_kernels for op in expanded)
        return max(float(self.seconds(expanded).sum()), launches * dispatch_s)

    def eager_seconds(self, op: Op) -> float:
        """Time of one op of a program that the host launches op by op."""
        return self.total_seconds([op], dispatch_s=self.device.dispatch_s)

    def _memory_rate(self) -> float:
        return self.device.memory_bytes_per_s * self.device.memory_efficiency

    def _matmul_seconds(self, ops: Sequence[Op]) -> Floats:
        """Waves of tiles over the processors; the best tile, with the inner dimension cut in 1, 2, 4 or 8 parts."""
        dims = np.array([(s[0][0], s[0][1], s[1][2], s[0][2]) for s in (op.shapes for op in ops)], dtype=np.float64)
        batch, m, n, k = dims.T
        peak = np.array([self.device.matmul_flops(op.dtype) for op in ops])
        if self.device.compute_units == 1:
            # One core works through a matmul of any shape at the same pace.
            even: Floats = np.array([op.flops for op in ops]) / peak
            return even
        # Rows: tile shapes times numbers of parts; columns: the ops.
        rows, columns, share = (
            np.repeat(np.array(c, dtype=np.float64), 4)[:, None] for c in zip(*self.tiles, strict=True)
        )
        parts = np.tile(np.array([1.0, 2.0, 4.0, 8.0]), len(self.tiles))[:, None]
        units = self.device.compute_units
        waves = np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) * parts / units)
        length = np.ceil(k / parts) + self.device.matmul_ramp_k * (1 + (parts > 1))
        best = (waves * 2 * rows * columns * length * units / (peak * share)).min(axis=0)
        # Matrix units want rows that start at multiples of 16 bytes; arithmetic in fp32 and fp64 does without them.
        multiples = [16 // ITEMSIZE[op.dtype] if ITEMSIZE[op.dtype] <= 2 or op.dtype == "tf32" else 1 for op in ops]
        multiple = np.array(multiples)
        aligned = (n % multiple == 0) & (k % multiple == 0)
        left = np.array([self.misaligned_linear if op.is_linear else self.misaligned for op in ops])
        seconds: Floats = np.where(aligned, best, best / left)
        return seconds

    def _attention_seconds(self, op: Op) -> float:
        """A fused attention kernel: its measured share of the peak, over waves of 128 queries a head."""
        (b, heads, queries, _), _ = op.shapes
        backward = op.kind is OpKind.ATTENTION_BACKWARD
        share = self.device.attention_share(self.attention, backward=backward)
        blocks = b * heads * math.ceil(queries / 128)
        units = self.device.compute_units
        spread = math.ceil(blocks / units) * units / blocks
        return op.flops * spread / (self.device.peak(op.dtype) * share)
