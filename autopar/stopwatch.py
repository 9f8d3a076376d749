"""Timing of short calls on a machine that other work shares.

Interruptions only lengthen a run, so the first quartile of several runs of a kernel counts, and where one thread of the
processor computes, the time that it ran and not the time that passed.  With several ranks all of them run the same
thing at the same time, since they share caches and memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

LEAST_S = 2e-3  # a sample is at least as long, well above the clock's grain
MOST_CALLS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times calls on one device.

    Attributes:
        place: the device.
        repeats: samples of each.
        group: ranks that measure together; None alone.
    """

    place: torch.device
    repeats: int = 8
    group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        """Wait for the device."""
        if self.place.type != "cpu":
            torch.accelerator.synchronize(self.place)

    def sample(self, run: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds a call, over ``calls`` of them."""
        start = clock()
        for _ in range(calls):
            run()
        self.wait()
        return (clock() - start) / calls

    def seconds(self, run: Callable[[], object]) -> float:
        """Time of a call that communicates with nobody; a short one is repeated within each sample."""
        one_thread = self.place.type == "cpu" and torch.get_num_threads() == 1
        clock = time.thread_time if one_thread else time.perf_counter
        run()
        self.meet()
        calls = 1
        while (first := self.sample(run, calls, clock)) * calls < LEAST_S and calls < MOST_CALLS:
            calls *= 4
        return first_quartile([first, *(self.sample(run, calls, clock) for _ in range(self.repeats - 1))])

    def seconds_together(self, run: Callable[[], object], before: Callable[[], object], *, calls: int = 3) -> float:
        """Time of a call in which all ranks of the group take part; each makes the same number of calls.

        Every call follows one of ``before``, which is not counted: the ranks come from computing and not at the same
        instant, and the threads that communicate have slept.  Such delays are part of the time, so the median counts.
        """
        run()
        times = []
        for _ in range(self.repeats):
            self.meet()
            for _ in range(calls):
                before()
                self.wait()
                times.append(self.sample(run, 1))
        return statistics.median(times)

    def meet(self) -> None:
        """Wait for the other ranks."""
        if self.group is not None:
            dist.barrier(self.group)


def first_quartile(times: list[float]) -> float:
    """The time that a quarter of ``times`` undercut.

    >>> first_quartile([5.0, 1.0, 2.0, 9.0])
    2.0
    """
    return sorted(times)[len(times) // 4]
