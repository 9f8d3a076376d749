"""What the stations of one run took: seconds a station and the peak of resident memory."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


class Stations:
    """Seconds of one station after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """The station ``name`` is done."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    def report(self, *, as_json: bool, **figures: Any) -> None:  # noqa: ANN401 - whatever else is to be told
        """Print seconds, memory and ``figures``."""
        found = {
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "total_s": round(sum(self.seconds.values()), 2),
            "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
            **figures,
        }
        if as_json:
            sys.stdout.write(json.dumps(found) + "\n")
            return
        for name, value in found.items():
            sys.stdout.write(f"{name}: {value}\n")
