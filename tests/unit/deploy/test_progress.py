from __future__ import annotations

import pytest

from common.db.snapshot import VersionReward
from common.episode import EpisodeState, RunState
from deploy.progress import History, duration, last_reward
from tests.unit.deploy.samples import CONFIG, make_snapshot


def episodes(num_final: int) -> dict[EpisodeState, int]:
    return dict.fromkeys(EpisodeState, 0) | {EpisodeState.SCORED: num_final - 1, EpisodeState.FAILED: 1}


def test_rates_are_unknown_before_two_snapshots() -> None:
    history = History(num_versions=40)
    assert history.rates().tokens_per_s is None
    history.add(0.0, make_snapshot())
    rates = history.rates()
    assert (rates.tokens_per_s, rates.episodes_per_s, rates.eta_s) == (None, None, None)


def test_rates_are_over_the_last_ten_seconds() -> None:
    history = History(num_versions=40)
    for at_s, tokens, num_final in ((0.0, 0, 1), (100.0, 1000, 11), (104.0, 1400, 13), (108.0, 2600, 31)):
        history.add(at_s, make_snapshot(tokens_sampled=tokens, episodes=episodes(num_final)))
    rates = history.rates()
    assert rates.tokens_per_s == pytest.approx(1600 / 8)
    assert rates.episodes_per_s == pytest.approx(20 / 8)


def test_tokens_that_an_attempt_takes_back_are_no_negative_rate() -> None:
    history = History(num_versions=40)
    history.add(0.0, make_snapshot(tokens_sampled=500))
    history.add(1.0, make_snapshot(tokens_sampled=400))
    assert history.rates().tokens_per_s == 0


def test_time_to_go_follows_the_pace_of_the_versions_seen() -> None:
    history = History(num_versions=40)
    for at_s, version in ((0.0, 17), (3.0, 18), (6.0, 20), (7.0, 20)):
        history.add(at_s, make_snapshot(version_newest=version))
    # Two seconds a version, twenty versions, one second gone since the last.
    assert history.rates().eta_s == pytest.approx(39.0)


def test_time_to_go_forgets_the_slow_beginning() -> None:
    history = History(num_versions=40)
    history.add(0.0, make_snapshot(version_newest=0))
    for version in range(1, 21):
        history.add(1000.0 + version, make_snapshot(version_newest=version))
    assert history.rates().eta_s == pytest.approx(20.0)


def test_nothing_is_to_go_at_the_last_version() -> None:
    history = History(num_versions=40)
    history.add(0.0, make_snapshot(version_newest=40))
    assert history.rates().eta_s == 0


def judged(*episodes_by_version: int, newest: int, state: RunState = RunState.ACTIVE) -> int | None:
    """The version whose reward is shown; the staleness bound is 1, half a step is 64 episodes."""
    rewards = tuple(
        VersionReward(version=version, episodes=num, mean_reward=0.5) for version, num in enumerate(episodes_by_version)
    )
    last = last_reward(make_snapshot(rewards=rewards, version_newest=newest, state=state), CONFIG)
    return None if last is None else last.version


def test_the_last_reward_is_that_of_the_newest_version_that_is_sampled_no_longer() -> None:
    assert judged(128, 128, 128, 128, newest=3) == 1
    assert judged(128, 128, 128, 128, newest=4, state=RunState.FINISHED) == 3


def test_versions_with_few_episodes_are_passed_over() -> None:
    assert judged(128, 63, 128, newest=3) == 0
    assert judged(128, 64, 128, newest=3) == 1


def test_in_the_beginning_the_first_version_has_to_do() -> None:
    assert judged(5, newest=0) == 0
    assert judged(40, 3, newest=1) == 0
    assert judged(newest=0) is None


def test_durations_are_minutes_and_seconds() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 65, 7209)] == ["0:00", "1:00", "1:05", "2:00:09"]
