"""Finished groups for people who keep their own trainer: as rows for TRL, or as tensors for verl.

Groups are taken as our own trainer takes them: a step is OPEN until its version is published, and DONE with it, so
nothing is trained twice or lost. docs/own_trainer.md says how. Legend: B rows, P prompt, R response, L = P + R.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import SupportsFloat

import numpy as np
import torch

from common.config import load_run_config
from common.db import runs, steps, versions
from common.db.run_lock import RunLock
from common.db.runs import Run
from common.db.session import WORKER_WAIT_S, Database, check_schema
from common.db.steps import TrainedEpisode
from common.errors import SetupError
from common.object_store import open_store
from common.settings import settings
from common.weights import Published, VersionStore
from trainer.check_input import check_groups, checked_metrics
from trainer.failures import noting_failures, outlast_outage
from trainer.loop import OUTAGE_WAIT_S, account, prepare, rows_of
from trainer.publish import announce
from trainer.samples import Sample
from trainer.source import Work, wait_for_work
from trainer.step_metrics import warn_of_silence

logger = logging.getLogger(__name__)

WriteVersion = Callable[[Path], None]
"""Writes a version into an empty folder: safetensors, config.json, tokenizer and chat template, as `save_pretrained`
does. Engines load it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training row with what its episode got. An episode whose history was rewritten gives several."""

    sample: Sample
    reward: float
    """Of the evaluation, raw."""
    advantage: float
    """As the run's train.advantage says, over all episodes of the group, also those that gave no row."""

    @property
    def num_prompt(self) -> int:
        """Ids before the first sampled one."""
        return int(self.sample.mask_L.argmax())


@dataclass(frozen=True, kw_only=True)
class TakenStep:
    """The groups of one step, taken. They are this trainer's until `finish`."""

    work: Work
    rows: tuple[Row, ...]
    """In the order of groups and episodes. Those without a sampled token, and left out ones, are not in it."""
    metrics: Mapping[str, float]
    """Of what was taken: reward_mean, lag_max …"""
    trained: tuple[TrainedEpisode, ...]

    @property
    def version(self) -> int:
        """The version that is trained; `finish` publishes the next one."""
        return self.work.step.version_in


@dataclass(frozen=True, kw_only=True)
class TrlBatch:
    """Rows as TRL's trainers name them; lists of B entries, each of its own length."""

    prompt_ids: list[list[int]]
    """[B][P]"""
    completion_ids: list[list[int]]
    """[B][R] sampled ids and, between turns, what tools said."""
    tool_mask: list[list[int]]
    """[B][R] 1 on sampled ids, 0 on those of tools: the mask of the loss."""
    logprobs: list[list[float]]
    """[B][R] behaviour log-probs in nats; 0 where tool_mask is 0."""
    rewards: list[float]
    advantages: list[float]
    group_ids: list[int]
    """The same number for siblings, which stand together."""
    episode_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class VerlBatch:
    """Rows as verl's DataProto has them: prompts padded on the left, responses on the right."""

    prompts: torch.Tensor
    """[B, P] int64"""
    responses: torch.Tensor
    """[B, R] int64"""
    input_ids: torch.Tensor
    """[B, L] int64; both, one after the other."""
    attention_mask: torch.Tensor
    """[B, L] int64; 1 on ids, 0 on padding."""
    position_ids: torch.Tensor
    """[B, L] int64; 0 at the row's first id, and in the padding before it."""
    response_mask: torch.Tensor
    """[B, R] int64; 1 on sampled ids, 0 on those of tools and padding."""
    rollout_log_probs: torch.Tensor
    """[B, R] float32, nats; 0 where response_mask is 0."""
    token_level_scores: torch.Tensor
    """[B, R] float32; the reward at the row's last sampled id, 0 elsewhere."""
    advantages: torch.Tensor
    """[B, R] float32; the row's on its sampled ids, 0 elsewhere."""
    uid: np.ndarray
    """[B] str; the same for siblings."""
    episode_id: np.ndarray
    """[B] int64; rows of one episode share it, and its reward."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """For `DataProto.from_dict(tensors=…)`."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def non_tensors(self) -> dict[str, np.ndarray]:
        """For `DataProto.from_dict(non_tensors=…)`."""
        return {"uid": self.uid, "episode_id": self.episode_id}


def trl_batch(rows: Sequence[Row]) -> TrlBatch:
    """Rows for a trainer that takes lists of ids, such as TRL's."""
    return TrlBatch(
        prompt_ids=[row.sample.ids_L[: row.num_prompt].tolist() for row in rows],
        completion_ids=[row.sample.ids_L[row.num_prompt :].tolist() for row in rows],
        tool_mask=[row.sample.mask_L[row.num_prompt :].astype(int).tolist() for row in rows],
        logprobs=[row.sample.behaviour_logprobs_L[row.num_prompt :].tolist() for row in rows],
        rewards=[row.reward for row in rows],
        advantages=[row.advantage for row in rows],
        group_ids=[row.sample.group_id for row in rows],
        episode_ids=[row.sample.episode_id for row in rows],
    )


def verl_batch(rows: Sequence[Row], *, pad_id: int) -> VerlBatch:
    """Rows as padded tensors, for a trainer like verl's. Raises ValueError for no rows at all."""
    if not rows:
        raise ValueError("no rows to make a batch of")
    num_prompt = max(row.num_prompt for row in rows)
    num_response = max(len(row.sample.ids_L) - row.num_prompt for row in rows)
    shape = (len(rows), num_prompt + num_response)
    ids_BL, attention_BL = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    mask_BL, logprobs_BL = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    scores_BL, advantages_BL = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for index, row in enumerate(rows):
        start = num_prompt - row.num_prompt
        here = slice(start, start + len(row.sample.ids_L))
        ids_BL[index, here], attention_BL[index, here] = row.sample.ids_L, 1
        mask_BL[index, here] = row.sample.mask_L
        logprobs_BL[index, here] = np.where(row.sample.mask_L, row.sample.behaviour_logprobs_L, 0)
        scores_BL[index, start + np.flatnonzero(row.sample.mask_L)[-1]] = row.reward
        advantages_BL[index, here] = np.where(row.sample.mask_L, row.advantage, 0)
    return VerlBatch(
        prompts=torch.from_numpy(ids_BL[:, :num_prompt]),
        responses=torch.from_numpy(ids_BL[:, num_prompt:]),
        input_ids=torch.from_numpy(ids_BL),
        attention_mask=torch.from_numpy(attention_BL),
        position_ids=torch.from_numpy((attention_BL.cumsum(axis=1) - 1).clip(min=0)),
        response_mask=torch.from_numpy(mask_BL[:, num_prompt:]),
        rollout_log_probs=torch.from_numpy(logprobs_BL[:, num_prompt:]),
        token_level_scores=torch.from_numpy(scores_BL[:, num_prompt:]),
        advantages=torch.from_numpy(advantages_BL[:, num_prompt:]),
        uid=np.array([str(row.sample.group_id) for row in rows], dtype=object),
        episode_id=np.array([row.sample.episode_id for row in rows]),
    )


@dataclass(frozen=True, kw_only=True)
class GroupSource:
    """The groups of one run, step by step. One for a run at a time, not beside our own trainer; `lock` sees to it."""

    run: Run
    database: Database
    weights: VersionStore
    lock: RunLock
    broker_url: str
    even: bool = False
    """Take only groups that give exactly rollout.group_size rows. The others are dropped, and new ones are made."""
    stop: threading.Event = field(default_factory=threading.Event)
    """When it is set, waiting ends: `take` returns None."""

    def start(self, write: WriteVersion) -> int:
        """The newest version, to go on from; of a new run version 0, which `write` makes.

        The state that made a version, such as the optimizer's, is the caller's to keep and to bring back. Raises
        RunTaken, with nothing touched, when the run has another trainer.
        """
        self.lock.hold()
        with self.database.begin() as conn:
            newest = versions.newest(conn, self.run.id)
        if newest is None:
            published = self.weights.publish(self.run.name, 0, write)
            with self.database.begin() as conn:
                versions.publish(conn, self.run.id, 0, published)
        version = 0 if newest is None else newest.number
        announce(self.broker_url, run_id=self.run.id, version=version)
        return version

    def take(self, version: int) -> TakenStep | None:
        """The groups that train `version`: those of a step that was left OPEN, else as soon as there are enough.

        None = the run is over, or `stop` was set. Raises ValueError for an episode that could not be trained, and
        SetupError where a setting of the run is not for a trainer of one's own.
        """
        train = self.run.config.train
        if train.kl == "reward":
            raise SetupError('train.kl = "reward" needs our own trainer, which has the start weights')
        if self.even and train.truncated == "mask":
            raise SetupError('train.truncated = "mask" takes rows out of groups, which even ones cannot spare')
        if version >= train.num_versions:
            self._finish_run()
            return None
        work = wait_for_work(
            self.database, self.run, version=version, stop=self.stop, look_up=lambda: None, even=self.even
        )
        if work is None:
            return None
        with noting_failures(self.database, work.step):
            check_groups(work.groups, max_size=self.run.config.episodes_per_group)
            samples = rows_of(work.groups)
            advantages, metrics = prepare(
                work.groups, samples, version=version, train=train, reference_kl=lambda samples: {}
            )
        rewards = {episode.episode_id: episode.reward for group in work.groups for episode in group.episodes}
        rows = tuple(
            Row(
                sample=sample,
                reward=rewards[sample.episode_id],
                advantage=advantages.by_episode[sample.episode_id],
            )
            for sample in samples
            if sample.num_tokens and sample.episode_id not in advantages.left_out
        )
        if not any(row.advantage for row in rows):
            warn_of_silence(work.step, metrics)
        return TakenStep(work=work, rows=rows, metrics=metrics, trained=tuple(account(samples, advantages)))

    def finish(
        self, taken: TakenStep, write: WriteVersion, *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> bool:
        """Publish what the step made of its version and mark it DONE with its groups, at once; engines load it.

        False = the run was stopped meanwhile. Save your own state before: from here on the step is not replayed.
        Raises, before anything is published, ValueError for `metrics` that are no finite numbers, and SetupError if
        somebody else has finished the step or is the run's trainer by now.
        """
        step = taken.work.step
        given = checked_metrics(metrics or {})
        tries = count(1)

        def publish() -> Published | None:
            if not self.lock.may_write(step):
                return None
            return self.weights.publish(self.run.name, taken.version + 1, write)

        def mark(published: Published) -> bool:
            with self.database.begin() as conn:
                if next(tries) > 1 and steps.is_done(conn, step, published):
                    return True
                return steps.finish_step(
                    conn,
                    step,
                    published=published,
                    metrics={**taken.metrics, "wait_s": taken.work.wait_s, **given},
                    trained=list(taken.trained),
                )

        published = outlast_outage(publish, stop=self.stop, limit_s=OUTAGE_WAIT_S)
        if published is None:
            return False
        done = outlast_outage(lambda: mark(published), stop=self.stop, limit_s=OUTAGE_WAIT_S)
        if done:
            announce(self.broker_url, run_id=self.run.id, version=taken.version + 1)
            logger.info("trained run=%d version=%d by a trainer of one's own", self.run.id, taken.version + 1)
        return bool(done)

    def _finish_run(self) -> None:
        with self.database.begin() as conn:
            runs.check_end(conn, self.run)
            runs.finish(conn, self.run.id)


@contextmanager
def open_groups(config_file: Path, *, even: bool = False) -> Iterator[GroupSource]:
    """The groups of the run that a TOML file describes, in the database of ROLLMILL_DATABASE_URL; see `even` there.

    Raises SetupError where the file, the settings or the run are not as they must be, or the run has another trainer.
    """
    config = load_run_config(config_file)
    database_url, broker_url = settings().require_database_url(), settings().require_broker_url()
    database = Database.connect(database_url, pool_size=2, wait_s=WORKER_WAIT_S)
    try:
        check_schema(database)
        with database.begin() as conn:
            run = runs.open_run(conn, config)
        weights = open_store(settings().weights_url, folder=settings().data_dir.resolve() / "weights")
        with RunLock(database, run) as lock:
            yield GroupSource(run=run, database=database, weights=weights, lock=lock, broker_url=broker_url, even=even)
    finally:
        database.dispose()
