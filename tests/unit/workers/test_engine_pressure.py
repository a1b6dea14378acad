from __future__ import annotations

from random import Random

import pytest

from workers.engine_pressure import CUT, MAX_IN_FLIGHT, RISE, START_LIMIT, InFlight, Pressure, parse_pressure

PAGE = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 3.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 7.0
vllm:num_requests_running{engine="1",model_name="policy"} 8.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:num_preemptions_total{engine="1",model_name="policy"} 4.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
"""


def pressure(*, waiting: float = 0, running: float = 10, kv_usage: float = 0.5, preemptions: float = 0) -> Pressure:
    return Pressure(num_waiting=waiting, num_running=running, kv_usage=kv_usage, num_preemptions=preemptions)


def filled(num: int | None = None) -> InFlight:
    """All places taken, or `num` of them."""
    flight = InFlight()
    for _ in range(flight.limit if num is None else num):
        flight.take()
    return flight


def fill(flight: InFlight) -> None:
    while flight.has_room:
        flight.take()


def drain_to_limit(flight: InFlight) -> None:
    while flight.num > flight.limit:
        flight.give_back()


def test_ranks_of_one_engine_are_taken_together() -> None:
    assert parse_pressure(PAGE) == Pressure(num_waiting=5, num_running=15, kv_usage=0.5, num_preemptions=5)


@pytest.mark.parametrize("missing", ["waiting{", "running{", "kv_cache_usage_perc{", "preemptions_total{"])
def test_a_page_without_one_of_the_figures_says_nothing(missing: str) -> None:
    assert parse_pressure("".join(line for line in PAGE.splitlines(keepends=True) if missing not in line)) is None


@pytest.mark.parametrize("text", ["", "<html>", 'vllm:num_requests_waiting{engine="0" 3'])
def test_text_that_is_no_page_says_nothing(text: str) -> None:
    assert parse_pressure(text) is None


def end_and_refill(flight: InFlight, num: int) -> None:
    for _ in range(num):
        flight.give_back()
    fill(flight)


def test_the_limit_doubles_until_the_first_sign_of_pressure_and_then_rises_by_a_step() -> None:
    """Once in a request's life, however often the engine is asked in that time."""
    flight = filled()
    for _ in range(4):
        end_and_refill(flight, START_LIMIT // 4)
        flight.steer(pressure())
    assert flight.limit == 2 * START_LIMIT
    fill(flight)
    flight.steer(pressure(preemptions=1))
    cut = int(CUT * 2 * START_LIMIT)
    assert flight.limit == cut
    while flight.num > cut:
        flight.give_back()
    flight.steer(pressure(preemptions=1, waiting=1))
    for _ in range(2):
        end_and_refill(flight, cut // 2 + 1)
        flight.steer(pressure(preemptions=1))
    assert flight.limit == cut + RISE


def test_a_limit_that_nobody_reaches_stays() -> None:
    flight = filled(START_LIMIT - 1)
    for _ in range(10):
        flight.give_back()
    flight.steer(pressure())
    assert flight.limit == START_LIMIT


@pytest.mark.parametrize(
    ("reading", "limit"),
    [
        (pressure(waiting=1), START_LIMIT),
        (pressure(kv_usage=0.92), START_LIMIT),
        (pressure(waiting=5, running=12), int(CUT * START_LIMIT)),
        (pressure(waiting=5, running=100), START_LIMIT),
        (pressure(kv_usage=0.96), int(CUT * START_LIMIT)),
    ],
)
def test_what_moves_the_limit(reading: Pressure, limit: int) -> None:
    flight = filled()
    flight.steer(reading)
    assert flight.limit == limit


def test_preemptions_before_the_first_reading_or_a_restart_are_not_ours() -> None:
    flight = filled()
    flight.steer(pressure(preemptions=100, waiting=1))
    flight.steer(pressure(preemptions=2, waiting=1))
    flight.skip()
    flight.steer(pressure(preemptions=50, waiting=1))
    assert flight.limit == START_LIMIT
    flight.steer(pressure(preemptions=51, waiting=1))
    assert flight.limit == int(CUT * START_LIMIT)


def test_one_cut_is_made_until_it_had_its_effect() -> None:
    flight = filled()
    for _ in range(5):
        flight.steer(pressure(kv_usage=0.99))
    assert flight.limit == int(CUT * START_LIMIT)
    drain_to_limit(flight)
    flight.steer(pressure(kv_usage=0.99))
    assert flight.limit == int(CUT * int(CUT * START_LIMIT))


def test_the_limit_never_falls_below_one() -> None:
    flight = filled(1)
    for _ in range(3):
        flight.steer(pressure(kv_usage=1.0))
    assert flight.limit == 1
    flight.give_back()
    flight.steer(pressure(kv_usage=1.0))
    assert flight.limit == 1


def test_an_engine_that_says_nothing_has_the_largest_limit_only() -> None:
    flight = filled()
    flight.steer(None)
    assert flight.limit == MAX_IN_FLIGHT
    assert InFlight(maximum=5).limit == 5


class BusyEngine:
    """In steps: each one gives every running request a token. A full cache throws the youngest out, to start again."""

    SIZE = 6000
    PROMPT = 100
    PREFILLED_PER_STEP = 64
    """Tokens of prompts that are computed in the time of a step."""

    def __init__(self) -> None:
        self.lengths = Random(1)
        self.running: list[tuple[int, int]] = []
        """Tokens that each has, and will have; the oldest first."""
        self.waiting: list[tuple[int, int]] = []
        self.num_preemptions = self.num_done = self.num_prefilled = 0

    def add(self) -> None:
        self.waiting.append((self.PROMPT, self.PROMPT + self.lengths.randint(100, 500)))

    @property
    def used(self) -> int:
        return sum(tokens for tokens, _ in self.running)

    def step(self) -> int:
        """How many requests ended."""
        while self.waiting and self.used + self.waiting[0][0] <= self.SIZE:
            self.running.append(self.waiting.pop(0))
            self.num_prefilled += self.running[-1][0]
        while self.used + len(self.running) > self.SIZE:
            self.waiting.insert(0, self.running.pop())
            self.num_preemptions += 1
        before = len(self.running)
        self.running = [(tokens + 1, end) for tokens, end in self.running if tokens + 1 < end]
        self.num_done += before - len(self.running)
        return before - len(self.running)

    def pressure(self) -> Pressure:
        return pressure(
            waiting=len(self.waiting),
            running=len(self.running),
            kv_usage=self.used / self.SIZE,
            preemptions=self.num_preemptions,
        )


NUM_STEPS = 10_000


def saturate(*, steered: bool) -> tuple[BusyEngine, float]:
    """More requests than the cache holds, all the time; what was done by a step's time, prompts' time included."""
    engine, flight = BusyEngine(), InFlight()
    for step in range(1, NUM_STEPS + 1):
        while flight.has_room:
            flight.take()
            engine.add()
        for _ in range(engine.step()):
            flight.give_back()
        if steered and step % 20 == 0:
            flight.steer(engine.pressure())
    took = NUM_STEPS + engine.num_prefilled / engine.PREFILLED_PER_STEP
    return engine, engine.num_done / took


def test_saturation_ends_in_no_spiral_of_preemptions() -> None:
    """Steered, an engine with too much to do throws next to nothing away, and gets more done in the same time."""
    free, done_free = saturate(steered=False)
    engine, done = saturate(steered=True)
    assert engine.num_preemptions < 0.15 * free.num_preemptions
    assert engine.num_prefilled < 0.4 * free.num_prefilled
    assert done > 1.05 * done_free
