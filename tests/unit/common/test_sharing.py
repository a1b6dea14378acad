from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sharing import Demand, fair_shares, new_groups

WEIGHTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0, 10.0])
CAPACITIES = st.integers(min_value=1, max_value=200)


@st.composite
def demands_of(draw: st.DrawFn, *, in_flight: int = 40) -> list[Demand]:
    one = st.builds(
        Demand,
        weight=WEIGHTS,
        group_size=st.integers(2, 12),
        in_flight=st.integers(0, in_flight),
        room=st.integers(0, 12),
    )
    return draw(st.lists(one, min_size=1, max_size=6))


def demand(weight: float = 1.0, *, group_size: int = 8, in_flight: int = 0, room: int = 100) -> Demand:
    return Demand(weight=weight, group_size=group_size, in_flight=in_flight, room=room)


def one_group_each(demands: list[Demand]) -> int:
    return sum(each.first for each in demands if each.weight > 0)


@pytest.mark.parametrize(
    ("capacity", "demands", "expected"),
    [
        (96, [demand(2), demand(1)], [64, 32]),
        (96, [demand(2, room=3), demand(1)], [24, 72]),
        (96, [demand(2), demand(1), demand(0)], [64, 32, 0]),
        (96, [demand(2, room=2), demand(1, room=2), demand(0)], [16, 16, 64]),
        (96, [demand(0), demand(0)], [48, 48]),
        # A share of 0.96 episodes is still a group.
        (96, [demand(99), demand(1)], [88, 8]),
        # A capacity of less than a group each is one group each, and nothing for the background.
        (10, [demand(), demand(5), demand(0)], [8, 8, 0]),
        # 3 of a group of 8 are still under way: two whole groups more fit into 20.
        (20, [demand(in_flight=3)], [19]),
        (20, [demand(in_flight=3, room=0), demand()], [3, 16]),
    ],
)
def test_shares_by_hand(capacity: int, demands: list[Demand], expected: list[int]):
    assert fair_shares(capacity, demands) == expected


@given(CAPACITIES, demands_of())
def test_the_sum_is_within_the_capacity_or_one_group_each(capacity: int, demands: list[Demand]):
    shares = fair_shares(capacity, demands)
    assert sum(shares) <= max(capacity, one_group_each(demands))
    assert all(0 <= share <= each.most for share, each in zip(shares, demands, strict=True))


@given(CAPACITIES, demands_of())
def test_who_has_a_weight_and_a_use_for_it_has_a_group(capacity: int, demands: list[Demand]):
    for share, each in zip(fair_shares(capacity, demands), demands, strict=True):
        assert each.weight == 0 or share >= each.first


@given(CAPACITIES, demands_of())
def test_nothing_is_left_over_that_would_be_a_group_for_somebody(capacity: int, demands: list[Demand]):
    shares = fair_shares(capacity, demands)
    left = max(capacity, one_group_each(demands)) - sum(shares)
    for share, each in zip(shares, demands, strict=True):
        assert share == each.most or left < (each.group_size if share else each.first)


@given(CAPACITIES, demands_of(), st.integers(0, 5), WEIGHTS)
def test_more_weight_never_means_a_smaller_share(capacity: int, demands: list[Demand], which: int, weight: float):
    index = which % len(demands)
    heavier = list(demands)
    heavier[index] = replace(demands[index], weight=max(weight, demands[index].weight))
    assert fair_shares(capacity, heavier)[index] >= fair_shares(capacity, demands)[index]


@given(CAPACITIES, st.lists(WEIGHTS, min_size=2, max_size=6))
def test_shares_are_in_proportion_to_the_weights_within_a_group(capacity: int, weights: list[float]):
    """Of whom nothing but the capacity holds back, nobody would be better off for his weight with another's group."""
    shares = fair_shares(capacity, [demand(weight, group_size=1, room=1000) for weight in weights])
    for share, weight in zip(shares, weights, strict=True):
        for other, others_weight in zip(shares, weights, strict=True):
            if share > 1 and others_weight > 0:
                assert weight == 0 or share / weight <= (other + 1) / others_weight + 1e-9


@given(CAPACITIES, demands_of())
def test_the_background_gets_nothing_that_a_weight_could_use(capacity: int, demands: list[Demand]):
    shares = fair_shares(capacity, demands)
    with_weight = [0 if each.weight == 0 else share for share, each in zip(shares, demands, strict=True)]
    assert fair_shares(capacity, [each if each.weight else replace(each, room=0, in_flight=0) for each in demands]) == (
        with_weight
    )


@given(CAPACITIES, demands_of())
def test_new_groups_stay_within_share_room_and_capacity(capacity: int, demands: list[Demand]):
    nums, shares = new_groups(capacity, demands), fair_shares(capacity, demands)
    for num, share, each in zip(nums, shares, demands, strict=True):
        assert 0 <= num <= each.room
        assert num == 0 or each.in_flight + num * each.group_size <= share
    made = sum(num * each.group_size for num, each in zip(nums, demands, strict=True))
    before = sum(each.in_flight for each in demands)
    assert made == 0 or before + made <= max(capacity, one_group_each(demands))


def test_without_a_common_bound_everybody_fills_his_own_room():
    assert new_groups(None, [demand(room=7), demand(0, room=3, in_flight=99)]) == [7, 3]


def test_who_joins_gets_his_share_as_the_others_episodes_finish():
    here, joined = demand(in_flight=96), demand()
    assert new_groups(96, [here, joined]) == [0, 0]
    assert new_groups(96, [replace(here, in_flight=80), joined]) == [0, 2]
    assert new_groups(96, [replace(here, in_flight=40), replace(joined, in_flight=48)]) == [1, 0]


@settings(max_examples=60)
@given(CAPACITIES, demands_of(in_flight=200), st.randoms(use_true_random=False))
def test_episodes_that_finish_in_any_order_leave_nobody_waiting_for_ever(capacity, demands, random):
    """Whoever has a weight and room gets a group after at most as many finished episodes as there are in flight."""
    demands = [replace(each, room=5) for each in demands]
    fed = [0] * len(demands)
    for _ in range(2000):
        nums = new_groups(capacity, demands)
        fed = [so_far + num for so_far, num in zip(fed, nums, strict=True)]
        demands = [
            replace(each, in_flight=each.in_flight + num * each.group_size)
            for num, each in zip(nums, demands, strict=True)
        ]
        if all(num or each.weight == 0 for num, each in zip(fed, demands, strict=True)):
            return
        busy = [index for index, each in enumerate(demands) if each.in_flight]
        index = random.choice(busy)
        demands[index] = replace(demands[index], in_flight=demands[index].in_flight - 1)
    raise AssertionError(f"still waiting: {fed}")
