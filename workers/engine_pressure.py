"""How many requests this process keeps on an engine at once, steered by the engine's own pressure.

The pool asks for places; figures come from the engine's /metrics. The rule is TCP's (RFC 5681, section 3.1), with a
request's life as the round trip: a limit that rises faster than requests end outruns the pressure that it makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

MAX_IN_FLIGHT = 1024
"""On one engine; the only limit where the engine says nothing of its pressure."""
START_LIMIT = 64
"""Doubled while as many requests end, until the first sign of pressure."""
RISE = 4.0
"""Added then while as many requests end as the limit allows at once."""
CUT = 0.8
KV_FULL = 0.95
"""Share of the cache's blocks in use, above which the next tokens push requests out."""
KV_ROOM = 0.9
"""Below it the limit may rise: requests under way still grow."""
MIN_QUEUE = 4
QUEUE_SHARE = 0.25
"""A queue in the engine is long when it has more than MIN_QUEUE, and than this share of what runs."""

_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions_total"
_NAMES = (_WAITING, _RUNNING, _KV_USAGE, _PREEMPTIONS)


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """What an engine says of itself, its data-parallel ranks taken together; all processes' requests count."""

    num_waiting: float
    """Requests that it has taken and does not decode."""
    num_running: float
    kv_usage: float
    """Of the fullest rank, 0 to 1."""
    num_preemptions: float
    """Since its start: requests whose keys and values were thrown away in the middle, and are computed again."""


def parse_pressure(text: str) -> Pressure | None:
    """From Prometheus' text format; None if one of the figures is missing or the text is none."""
    # The whole page is hundreds of lines, and is parsed on the loop that all episodes share.
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_NAMES))
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    try:
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                if sample.name in found:
                    found[sample.name].append(sample.value)
    except ValueError:
        return None
    if not all(found.values()):
        return None
    return Pressure(
        num_waiting=sum(found[_WAITING]),
        num_running=sum(found[_RUNNING]),
        kv_usage=max(found[_KV_USAGE]),
        num_preemptions=sum(found[_PREEMPTIONS]),
    )


class InFlight:
    """This process's requests on one engine, and how many there may be."""

    def __init__(self, *, maximum: int = MAX_IN_FLIGHT) -> None:
        self._maximum = maximum
        self._limit = float(min(START_LIMIT, maximum))
        self.num = 0
        self._num_ended = 0
        """Since the last reading."""
        self.reached = False
        """Whether a request found no place, or took the last one, since the last reading."""
        self._doubling = True
        self._num_preemptions: float | None = None
        """Of the last reading; None = there was none lately."""

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def has_room(self) -> bool:
        return self.num < self.limit

    def take(self) -> None:
        """Use a place."""
        self.num += 1
        self.reached = self.reached or not self.has_room

    def give_back(self) -> None:
        """Whatever the end of the request was."""
        self.num -= 1
        self._num_ended += 1

    def steer(self, pressure: Pressure | None) -> None:
        """Move the limit by a new reading; None = this engine says nothing of its pressure."""
        reached, self.reached = self.reached, not self.has_room
        num_ended, self._num_ended = self._num_ended, 0
        if pressure is None:
            self._limit = self._maximum
            return
        before, self._num_preemptions = self._num_preemptions, pressure.num_preemptions
        if is_overloaded(pressure, num_preemptions_before=before):
            self._doubling = False
            # While more are under way than the last cut allows, its effect is still to come.
            if 0 < self.num <= self.limit:
                self._limit = max(1.0, CUT * self.num)
        elif reached and pressure.num_waiting == 0 and pressure.kv_usage < KV_ROOM:
            self._limit = min(self._maximum, self._limit + num_ended * (1.0 if self._doubling else RISE / self._limit))

    def skip(self) -> None:
        """Not read this time: what the engine has preempted until the next reading is not due to our requests."""
        self._num_preemptions = None


def is_overloaded(pressure: Pressure, *, num_preemptions_before: float | None) -> bool:
    """Whether it has more than it can keep at once. A count that fell means that the engine was restarted."""
    preempted = num_preemptions_before is not None and pressure.num_preemptions > num_preemptions_before
    long_queue = pressure.num_waiting > max(MIN_QUEUE, QUEUE_SHARE * pressure.num_running)
    return preempted or long_queue or pressure.kv_usage > KV_FULL
