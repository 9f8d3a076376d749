"""Which uniform plan is best: all are sketched, the promising ones are priced, the fastest that fits is taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective, CollectiveModel
from autopar.cost_models.errors import ConstraintError, PartitionError
from autopar.report.text import duration, quantity
from autopar.search.candidates import Candidate, Space
from autopar.search.price import Price, state_factor

DOUBT = 2.0  # by how much a sketch of memory may be too high before it is believed without pricing
SURE = 1.1  # the same once plans that recompute alike were priced
NEAR = 1.3  # plans that seem slower than the best by more are not priced
LAST_HOPES = 6  # plans that are priced where nothing seems to fit
# Work of a step that recomputes, in times of one that does not; and what of its activations it keeps.
AGAIN: Mapping[str, tuple[float, float]] = {"none": (1.0, 1.0), "selective": (1.05, 0.6), "full": (4 / 3, 0.15)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A step in a few numbers, all of the whole batch on one device.

    Attributes:
        compute_s: time of its computations.
        parameter_bytes: parameters.
        saved_bytes: kept by the forward for the backward.
        boundary_bytes: the activation between two blocks.
        blocks: number of blocks.
        cluster: where it shall run.
        optimizer: whose state is held.
    """

    compute_s: float
    parameter_bytes: float
    saved_bytes: float
    boundary_bytes: float
    blocks: int
    cluster: Cluster
    optimizer: str

    def seconds(self, candidate: Candidate) -> float:
        """About how long a step takes: work, bubble, Megatron's reductions, the reduction of gradients."""
        c, model = candidate, CollectiveModel(cluster=self.cluster)
        spans = self.cluster.axis_levels({"pp": c.pp, "dp": c.dp, "tp": c.tp})
        count, deep = c.microbatches, max(1, self.blocks) / c.pp
        chunks = 2 if c.schedule == "interleaved" else 1
        idle = 0.4 if c.schedule == "zb" else 1 / chunks
        work_s = self.compute_s * AGAIN[c.recompute][0] / (c.dp * c.tp * c.pp)
        inner_bytes = self.boundary_bytes / (c.dp * count)
        inner_s = 4 * deep * count * float(model.seconds(Collective.ALL_REDUCE, inner_bytes, spans["tp"]))
        held_bytes = self.parameter_bytes / (c.tp * c.pp)
        outer_s = float(model.seconds(Collective.ALL_REDUCE, held_bytes, spans["dp"]))
        outer_s *= 1.5 * count if c.zero == 3 else 1.0  # twice gathered, once reduced
        busy_s = work_s + inner_s
        return busy_s * (1 + idle * (c.pp - 1) / count) + max(0.0, outer_s - work_s / 2)

    def held_bytes(self, candidate: Candidate) -> tuple[float, float]:
        """About how much a rank holds: parameters, gradients and optimizer state; activations."""
        c, factor = candidate, state_factor(self.optimizer)
        held = self.parameter_bytes / (c.tp * c.pp)
        state = (2 + factor) * held
        if c.zero in (1, 2):
            state = held + (1 + factor) * held / c.dp + (held if c.zero == 1 or c.microbatches > 1 else held / c.dp)
        elif c.zero:
            state = (2 + factor) * held / c.dp
        flying = min(c.pp, c.microbatches) if c.schedule != "gpipe" else c.microbatches
        split = c.tp if c.sequence_parallel else min(c.tp, 2)
        return state, self.saved_bytes * AGAIN[c.recompute][1] * flying / (c.dp * c.microbatches * c.pp * split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A plan that was priced, or the reason why it was not.

    Attributes:
        candidate: the plan.
        price: its price, or None where it is refused.
        fits: whether its peak is within the budget.
        reason: why it is not the one chosen; empty for that one.
    """

    candidate: Candidate
    price: Price | None
    fits: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What was weighed, best first.

    Attributes:
        weighed: plans that fit by time, then those that do not by peak, then those that are refused.
        budget_bytes: what a rank may use.
        considered: number of plans that were sketched.
        complete: whether the time sufficed for all that were promising.
    """

    weighed: tuple[Weighed, ...]
    budget_bytes: float
    considered: int
    complete: bool
    errors: tuple[Exception, ...] = field(default=(), repr=False)

    @property
    def best(self) -> Weighed:
        """The fastest plan that fits, else the one with the smallest peak.

        Raises:
            ConstraintError: all plans are refused; the first refusal.
        """
        if self.weighed[0].price is None:
            raise self.errors[0]
        return self.weighed[0]


def rank(
    space: Space,
    sketch: Sketch,
    price: Callable[[Candidate], Price],
    budget_bytes: float,
    *,
    most: int,
    time_limit_s: float | None = None,
) -> Ranking:
    """Weigh the plans of a space.

    Args:
        space: the plans.
        sketch: gives the order in which they are priced, and those that cannot fit.
        price: the price of one; raises ConstraintError or PartitionError for one that cannot be run.
        budget_bytes: what a rank may use.
        most: number of fitting plans after which no more are priced.
        time_limit_s: seconds after which no more are priced, once one fits.
    """
    every = list(space.candidates())
    search = _Search(sketch=sketch, price=price, budget_bytes=budget_bytes, believe=len(every) > 1)
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    families: dict[object, list[Candidate]] = {}
    for candidate in every:
        families.setdefault(space.family(candidate), []).append(candidate)
    # A family is as good as its fastest member that seems to fit.
    queue = [sorted(members, key=search.seconds) for members in families.values()]
    queue.sort(key=lambda members: min((search.seconds(c) for c in members if search.may_fit(c)), default=math.inf))
    fitting, complete = 0, True
    for members in queue:
        if fitting and (fitting >= most or time.monotonic() > deadline):
            complete = fitting >= most
            break
        fitting += any(search.weigh(c) for c in members if search.may_fit(c) and search.may_win(c))
    if not fitting:
        rest = sorted((c for c in every if c not in search.found), key=search.needed_bytes)
        any(search.weigh(c) for c in rest[:LAST_HOPES])
    weighed = [Weighed(candidate=c, price=p, fits=search.fits(p)) for c, p in search.found.items()]
    return Ranking(
        weighed=tuple(explained(sorted(weighed, key=_order), budget_bytes)),
        budget_bytes=budget_bytes,
        considered=len(every),
        complete=complete,
        errors=tuple(search.errors),
    )


@dataclass(kw_only=True)
class _Search:
    """What was priced so far, and what it says about the sketches of the rest.

    Sketches are wrong by factors that candidates share: the time by one, the activations by one for each way to
    recompute.  Both are learned from what was priced.
    """

    sketch: Sketch
    price: Callable[[Candidate], Price]
    budget_bytes: float
    believe: bool
    found: dict[Candidate, Price | None] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    fuller: dict[str, list[float]] = field(default_factory=dict)
    best_s: float = math.inf

    def seconds(self, candidate: Candidate) -> float:
        """The sketched time."""
        return self.sketch.seconds(candidate)

    def needed_bytes(self, candidate: Candidate) -> float:
        """The sketched peak, corrected by what is known."""
        state, activations = self.sketch.held_bytes(candidate)
        known = self.fuller.get(candidate.recompute)
        return state + activations * (statistics.median(known) if known else 1.0)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether pricing is not hopeless for want of memory."""
        doubt = SURE if candidate.recompute in self.fuller else DOUBT
        return not self.believe or self.needed_bytes(candidate) <= doubt * self.budget_bytes

    def may_win(self, candidate: Candidate) -> bool:
        """Whether the plan may be about as fast as the best so far."""
        slower = statistics.median(self.slower) if self.slower else 1.0
        return self.seconds(candidate) * slower <= NEAR * self.best_s

    def fits(self, price: Price | None) -> bool:
        """Whether a plan of that price can be run."""
        return price is not None and price.peak_bytes <= self.budget_bytes

    def weigh(self, candidate: Candidate) -> bool:
        """Price a candidate; returns whether it fits."""
        try:
            price = self.found[candidate] = self.price(candidate)
        except (ConstraintError, PartitionError) as error:
            self.found[candidate] = None
            self.errors.append(error)
            return False
        state, activations = self.sketch.held_bytes(candidate)
        if activations > 0 and price.peak_bytes > state:
            self.fuller.setdefault(candidate.recompute, []).append((price.peak_bytes - state) / activations)
        self.slower.append(price.step_s / max(1e-30, self.seconds(candidate)))
        if self.fits(price):
            self.best_s = min(self.best_s, price.step_s)
        return self.fits(price)


def _order(weighed: Weighed) -> tuple[float, ...]:
    c, price = weighed.candidate, weighed.price
    simple = (c.zero, c.pp, c.tp, c.microbatches, c.sequence_parallel)
    if price is None:
        return (2.0, *simple)
    if not weighed.fits:
        return (1.0, price.peak_bytes, *simple)
    return (0.0, float(f"{price.step_s:.3g}"), *simple)  # of plans that differ by rounding, the simplest


def explained(weighed: Sequence[Weighed], budget_bytes: float) -> list[Weighed]:
    """The plans with the reasons why they lose to the first."""
    if not weighed:
        return []
    best = weighed[0]
    return [best, *(_with_reason(w, best, budget_bytes) for w in weighed[1:])]


def _with_reason(weighed: Weighed, best: Weighed, budget_bytes: float) -> Weighed:
    price, other = weighed.price, best.price
    if price is None or other is None:
        reason = "cannot be run"
    elif not weighed.fits:
        reason = f"does not fit: {quantity(price.peak_bytes - budget_bytes, 'B')} too much, most of it {price.owner}"
    elif price.step_s <= other.step_s:
        reason = "as fast, and less simple"
    else:
        losses = {cause: price.parts[cause] - other.parts.get(cause, 0.0) for cause in price.parts}
        cause = max(losses, key=lambda c: losses[c])
        reason = f"{price.step_s / other.step_s - 1:.1%} slower: {duration(max(0.0, losses[cause]))} more {cause}"
    return Weighed(candidate=weighed.candidate, price=price, fits=weighed.fits, reason=reason)
