"""What the live display shows, and the rates that follow from how it changed. Pure: no clock, no query."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import RunConfig
from common.db.evaluations import Evaluation
from common.db.snapshot import Snapshot, VersionReward
from common.episode import FINAL_STATES, RunState
from deploy.supervisor import ProcessStatus

RATE_WINDOW_S = 10.0
ETA_VERSIONS = 10
FAILURE_WIDTH = 200


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a run goes."""

    tokens_per_s: float | None
    """Sampled tokens over the last seconds; None = not known yet."""
    episodes_per_s: float | None
    """Episodes that reached a final state, over the last seconds; None = not known yet."""
    eta_s: float | None
    """Until the last version, at the pace of the last versions; None = not known yet."""


@dataclass(frozen=True, kw_only=True)
class View:
    """All that one frame of the display needs."""

    config: RunConfig
    data_folder: Path
    elapsed_s: float
    """Since this command was started."""
    snapshot: Snapshot | None
    """The last one that could be read; None = none yet."""
    rates: Rates
    processes: Sequence[ProcessStatus]
    problem: str | None
    """What a person should know right now, such as a database that does not answer; None = all is well."""


class History:
    """The recent past of a run, as far as rates need it."""

    def __init__(self, *, num_versions: int) -> None:
        self._num_versions = num_versions
        self._recent: deque[tuple[float, Snapshot]] = deque()
        self._versions: deque[tuple[float, int]] = deque(maxlen=ETA_VERSIONS + 1)

    def add(self, at_s: float, snapshot: Snapshot) -> None:
        """Note a snapshot, taken at this second of a monotonic clock."""
        self._recent.append((at_s, snapshot))
        while self._recent[0][0] < at_s - RATE_WINDOW_S:
            self._recent.popleft()
        newest = snapshot.version_newest
        if newest is not None and (not self._versions or newest > self._versions[-1][1]):
            self._versions.append((at_s, newest))

    def rates(self) -> Rates:
        """Rates over the window."""
        return Rates(tokens_per_s=self._tokens_per_s(), episodes_per_s=self._episodes_per_s(), eta_s=self._eta_s())

    def _tokens_per_s(self) -> float | None:
        return self._slope([snapshot.tokens_sampled for _, snapshot in self._recent])

    def _episodes_per_s(self) -> float | None:
        return self._slope([num_final(snapshot) for _, snapshot in self._recent])

    def _slope(self, counts: list[int]) -> float | None:
        if len(counts) < 2:
            return None
        # An attempt that starts afresh takes its tokens back.
        return max(counts[-1] - counts[0], 0) / (self._recent[-1][0] - self._recent[0][0])

    def _eta_s(self) -> float | None:
        if not self._versions:
            return None
        (first_s, first), (last_s, last) = self._versions[0], self._versions[-1]
        if last >= self._num_versions:
            return 0.0
        if last == first:
            return None
        per_version_s = (last_s - first_s) / (last - first)
        since_last_s = self._recent[-1][0] - last_s
        return max((self._num_versions - last) * per_version_s - since_last_s, 0.0)


def num_final(snapshot: Snapshot) -> int:
    """Episodes that are done, however they ended."""
    return sum(snapshot.episodes[state] for state in FINAL_STATES)


def last_reward(snapshot: Snapshot, config: RunConfig) -> VersionReward | None:
    """That of the newest version that is judged fairly; None = nothing is scored yet.

    A version of which episodes may still be played has only its quickest so far, which are not like the others;
    one with less than half a step's episodes is left to chance. Before there is a better one, they have to do.
    """
    rewards = snapshot.rewards
    if snapshot.state is RunState.ACTIVE:
        oldest_in_play = (snapshot.version_newest or 0) - config.train.max_staleness
        rewards = tuple(reward for reward in rewards if reward.version < oldest_in_play) or rewards[:1]
    enough = config.train.groups_per_step * config.rollout.group_size / 2
    return next(reversed([reward for reward in rewards if reward.episodes >= enough] or rewards), None)


def last_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """That of the newest version whose evaluation is over and gave a figure; None = there is none."""
    return next((one for one in reversed(evaluations) if one.finished and one.mean_reward is not None), None)


def evaluated(evaluation: Evaluation) -> str:
    """Mean reward and standard error: 0.87 ± 0.02."""
    mean, error = evaluation.mean_reward, evaluation.standard_error
    return "-" if mean is None else f"{mean:.2f}" + ("" if error is None else f" ± {error:.2f}")


def short_failure(failure: str) -> str:
    """An error as one line that leaves room for other figures."""
    return textwrap.shorten(failure, FAILURE_WIDTH, placeholder=" …")


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: 1:05, 2:00:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
