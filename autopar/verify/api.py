"""``autopar.verify``: from a model and a plan to the report, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from autopar.capture import capture, flatten_call
from autopar.lower import Lowering
from autopar.plan import Plan
from autopar.verify.parity import verify_programs
from autopar.verify.report import Report
from autopar.verify.static import check_programs
from autopar.verify.values import model_values


def verify(  # noqa: PLR0913 - the public contract
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    plan: Plan,
    loss_fn: Callable[..., object] | None = None,
    targets: Sequence[object] = (),
    rtol: float | None = None,
    seed: int = 0,
) -> Report:
    """Run one training step of every rank of ``plan`` in this process and compare it with one device.

    No process group is needed, and ``model`` is left as it is.  Random ops draw the stream of one device on all ranks
    (``rng="exact"``).

    Args:
        model: the plain model; what it holds on meta, or as fake tensors, gets random values.
        args: positional arguments of one call; fake and meta tensors get random values as well.
        kwargs: keyword arguments of that call.
        plan: the split to check.
        loss_fn: as in ``autopar.compile``.
        targets: as in ``autopar.compile``.
        rtol: allowed error; by default by dtype (see :func:`autopar.verify.verify_programs`).
        seed: of the random values.

    Returns:
        one row for the loss, every result, gradient and buffer: ``report.ok``, ``report.rows``, ``report.text()``.

    Raises:
        VerificationError: the programs of the ranks do not fit together; differing numbers are reported, not raised.
        PlanError: the plan is for another model, other shapes or another loss.
        CaptureError: the model cannot be captured.
    """
    step = capture(model, args, kwargs, loss_fn=loss_fn, targets=targets)
    plan.check(step)
    lowering = Lowering(step, plan, rng="exact")
    programs = [lowering.program(rank) for rank in range(plan.world_size)]
    check_programs(programs)
    leaves, _, _ = flatten_call(args, kwargs, targets)
    values = model_values(step, model, leaves, seed=seed)
    return verify_programs(step, programs, values, rtol=rtol, normal=lowering.prepared.normal)
