"""The trainer's loop: take groups, make samples, train a step, keep a checkpoint, publish the version, mark it done.

Who waits for whom: the trainer waits for enough complete groups (source.py); the feeder waits for versions, because
they make room; keepers wait for the announcement, or the next poll. All wait for the database. A stop takes effect
between two steps, or where the database is away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from common.config_train import TrainConfig
from common.db import runs, steps, versions
from common.db.run_lock import RunLock
from common.db.runs import Run
from common.db.session import Database
from common.db.steps import ScoredGroup, Step, TrainedEpisode
from common.episode import ScoredEpisode
from common.errors import DatabaseUnavailable, SetupError
from common.object_store import open_store
from common.outcomes import Outcome
from common.weights import Published, VersionStore, WeightsDamaged, WeightsError, WeightsUnavailable
from trainer.advantages import Advantages, step_advantages
from trainer.check_input import check_groups, check_rows
from trainer.checkpoint import CheckpointStore, Owner
from trainer.evaluation import wait_for_evaluations
from trainer.failures import noting_failures, outlast_outage
from trainer.lora import adapter_writer
from trainer.policy import Policy
from trainer.publish import announce, version_writer
from trainer.ranks import Ranks
from trainer.restore import restore
from trainer.rewards import group_rewards, is_trained
from trainer.samples import Sample, make_samples, rows_by_episode, samples_digest
from trainer.schedule import warn_of_warm_up
from trainer.source import Work, wait_for_work
from trainer.step_metrics import taken_metrics, warn_of_silence
from trainer.teacher import Teacher, make_teacher, with_teacher_logprobs
from trainer.tracking import Tracker

logger = logging.getLogger(__name__)

OUTAGE_WAIT_S = 600.0
NUM_KEPT = 2
"""Versions that are never pruned, beside those that engines may still serve by the run's staleness: a keeper that is
about to load one has not said so yet."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One run's trainer with all that it talks to."""

    run: Run
    database: Database
    policy: Policy
    weights: VersionStore
    checkpoints: CheckpointStore
    lock: RunLock
    broker_url: str
    tracker: Tracker = field(default_factory=lambda: Tracker(()))
    teacher: Teacher | None = None
    outage_wait_s: float = OUTAGE_WAIT_S
    """How long it waits for a database, weight store or teacher that is away; for groups it waits without end."""

    def train(self, stop: threading.Event) -> bool:
        """Train until the run is over or `stop` is set; True = it is over."""
        if not outlast_outage(self._check_teacher, stop=stop, limit_s=self.outage_wait_s):
            return False
        version = outlast_outage(self.resume, stop=stop, limit_s=self.outage_wait_s)
        if version is None:
            return False
        warn_of_warm_up(self.run.id, train=self.run.config.train)
        while version < self.run.config.train.num_versions:
            work = wait_for_work(self.database, self.run, version=version, stop=stop, look_up=self.look_up)
            if work is None:
                logger.info("stopped run=%d version=%d", self.run.id, version)
                return not stop.is_set()
            with noting_failures(self.database, work.step):
                trained = self.train_step(work, stop)
            if not trained:
                logger.info("stopped in a step run=%d version=%d", self.run.id, version)
                return not stop.is_set()
            version += 1
        if not wait_for_evaluations(self.database, self.run, stop=stop, look_up=self.look_up):
            return False
        if outlast_outage(self._finish, stop=stop, limit_s=self.outage_wait_s) is None:
            return False
        logger.info("run finished run=%d version=%d", self.run.id, version)
        return True

    def _check_teacher(self) -> bool:
        if self.teacher is not None:
            self.teacher.check()
        return True

    def resume(self) -> int:
        """Stand where the run stands: load the newest version's state, see that engines can load it; its number.

        Raises RunTaken, with nothing touched, when the run has another trainer.
        """
        self.lock.hold()
        with self.database.begin() as conn:
            newest = versions.newest(conn, self.run.id)
        version = 0 if newest is None else newest.number
        self.checkpoints.check_owner()
        self._sweep()
        if newest is not None and version > 0:
            restore(self.policy, self.checkpoints, newest)
        self.ensure_published()
        announce(self.broker_url, run_id=self.run.id, version=version)
        logger.info("training run=%d from version=%d", self.run.id, version)
        return version

    def ensure_published(self) -> None:
        """See that engines can load the newest version: publish it again when its folder is gone or damaged.

        Raises RunTaken when the run has another trainer by now.
        """
        self.lock.hold()
        with self.database.begin() as conn:
            newest = versions.newest(conn, self.run.id)
        version = 0 if newest is None else newest.number
        try:
            if newest is not None:
                self.weights.check(newest.location, newest.manifest_sha256)
                return
        except WeightsDamaged as error:
            logger.warning("publishing again run=%d version=%d: %s", self.run.id, version, error)
        published = self.publish(version)
        with self.database.begin() as conn:
            versions.publish(conn, self.run.id, version, published)

    def look_up(self) -> None:
        """While no groups come: can engines load the newest version at all?"""
        try:
            self.ensure_published()
        except WeightsUnavailable as error:
            logger.warning("engines can't be given weights run=%d: %s", self.run.id, error)

    def train_step(self, work: Work, stop: threading.Event) -> bool:
        """One step, from groups to a published version that is marked done with them.

        False = the run was stopped meanwhile, or `stop` was set while the database or the weight store was away: its
        weights are no version. Raises SetupError when one stays away; then, too, the step is open and will be replayed.
        """
        version = work.step.version_in
        started = time.monotonic()
        train = self.run.config.train
        check_groups(work.groups, max_size=self.run.config.episodes_per_group)
        samples = rows_of(work.groups)
        sizes = self.policy.model.config.get_text_config()
        check_rows(samples, context=getattr(sizes, "max_position_embeddings", None), vocab_size=sizes.vocab_size)
        advantages, metrics = prepare(
            work.groups, samples, version=version, train=train, reference_kl=self.policy.reference_kl
        )
        trained_samples = [sample for sample in samples if sample.episode_id not in advantages.left_out]
        if (teacher := self.teacher) is not None:
            asked = outlast_outage(
                lambda: with_teacher_logprobs(trained_samples, teacher), stop=stop, limit_s=self.outage_wait_s
            )
            if asked is None:
                return False
            trained_samples, teacher_metrics = asked
            metrics |= teacher_metrics | {"teacher_s": time.monotonic() - started}
        metrics |= self.policy.train_step(trained_samples, advantages.by_episode, version=version)
        if not metrics["num_updates"]:
            warn_of_silence(work.step, metrics)
        trained = time.monotonic()
        if not outlast_outage(lambda: self.lock.may_write(work.step), stop=stop, limit_s=self.outage_wait_s):
            return False
        with _writing():
            self.checkpoints.save(version + 1, self.policy.write_state)
        published = outlast_outage(
            lambda: self.publish(version + 1) if self.lock.may_write(work.step) else None,
            stop=stop,
            limit_s=self.outage_wait_s,
        )
        if published is None:
            return False
        metrics |= {
            "wait_s": work.wait_s,
            "train_s": trained - started,
            "publish_s": time.monotonic() - trained,
        }
        trained_episodes, tries = account(samples, advantages), count(1)
        done = outlast_outage(
            lambda: self._finish_step(work.step, published, metrics, trained_episodes, repeated=next(tries) > 1),
            stop=stop,
            limit_s=self.outage_wait_s,
        )
        if not done:
            return False
        announce(self.broker_url, run_id=self.run.id, version=version + 1)
        _log_step(self.run.id, version + 1, metrics)
        self.tracker.log(version + 1, metrics)
        self.prune(version + 1)
        return True

    def _sweep(self) -> None:
        """Half-written folders of trainers that were killed: of a model of some size a few would fill the disk."""
        try:
            self.checkpoints.sweep()
            self.weights.sweep(self.run.name)
        except OSError as error:
            logger.warning("half-written folders not deleted run=%d: %s", self.run.id, error)

    def prune(self, newest: int) -> None:
        """Delete versions and checkpoints that nobody needs any more, now that `newest` is done.

        What can't be deleted now is the next step's to delete.
        """
        kept = self.run.config.train.keep_version_every
        try:
            self.checkpoints.prune(newest, num_kept=self.run.config.train.keep_checkpoints)
            with self.database.begin() as conn:
                needed = versions.needed(conn, self.run.id)
            pruned = self.weights.prune(
                self.run.name,
                keep_from=newest - self.run.config.train.max_staleness - NUM_KEPT + 1,
                keep=needed.union(range(0, newest, kept) if kept else ()),
            )
        except (DatabaseUnavailable, WeightsError, OSError) as error:
            logger.warning("old versions or checkpoints not deleted run=%d newest=%d: %s", self.run.id, newest, error)
        else:
            logger.debug("pruned run=%d versions=%s", self.run.id, pruned)

    def _finish_step(
        self,
        step: Step,
        published: Published,
        metrics: dict[str, float],
        trained: list[TrainedEpisode],
        *,
        repeated: bool,
    ) -> bool:
        with self.database.begin() as conn:
            if repeated and steps.is_done(conn, step, published):
                return True
            return steps.finish_step(conn, step, published=published, metrics=metrics, trained=trained)

    def _finish(self) -> bool:
        with self.database.begin() as conn:
            runs.check_end(conn, self.run)
            runs.finish(conn, self.run.id)
        return True

    def publish(self, version: int) -> Published:
        """Write the policy's present weights as `version`: an adapter, or the whole model."""
        config, model = self.run.config, self.policy.model
        weights = self.policy.weights()
        if config.train.lora_rank is None:
            write = version_writer(model, start=config.model, weights=weights)
        else:
            write = adapter_writer(model, weights=weights)
        with _writing():
            return self.weights.publish(self.run.name, version, write)


def make_trainer(
    run: Run,
    database: Database,
    *,
    data_dir: Path,
    weights_url: str | None = None,
    broker_url: str,
    lock: RunLock,
    ranks: Ranks | None = None,
    tracker: Tracker | None = None,
) -> Trainer:
    """The trainer of a run, with its start weights loaded; `ranks` if there are several, of which this is the first.

    Raises SetupError when the model folder holds none, or nothing here can open `weights_url`.
    """
    weights = open_store(weights_url, folder=data_dir / "weights")
    policy = Policy.load(run.config, ranks=ranks)
    with database.begin() as conn:
        made_at = runs.made_at(conn, run.id)
    owner = Owner(run=run.name, made_at=made_at.isoformat(), database=database.engine.url.render_as_string())
    return Trainer(
        run=run,
        database=database,
        policy=policy,
        teacher=make_teacher(run.config, policy),
        weights=weights,
        checkpoints=CheckpointStore(data_dir / "checkpoints", run.name, owner=owner),
        lock=lock,
        broker_url=broker_url,
        tracker=tracker or Tracker(()),
    )


def rows_of(groups: Sequence[ScoredGroup]) -> list[Sample]:
    """Rows of the episodes that ended by the agent's doing. Raises ValueError for one that is no training row."""
    return [row for group in groups for episode in of_agent(group) for row in make_samples(episode)]


def of_agent(group: ScoredGroup) -> list[ScoredEpisode]:
    """The group's episodes that ended by the agent's doing."""
    return [episode for episode in group.episodes if Outcome(episode.outcome).is_agent]


def prepare(
    groups: Sequence[ScoredGroup],
    samples: Sequence[Sample],
    *,
    version: int,
    train: TrainConfig,
    reference_kl: Callable[[Sequence[Sample]], Mapping[int, float]],
) -> tuple[Advantages, dict[str, float]]:
    """Advantages of the episodes that ended by the agent's doing, and metrics of what was taken.

    `samples` are the rows of these episodes. `reference_kl` gives nats by episode id; it is asked only where
    train.kl = "reward".
    """
    trainable = [of_agent(group) for group in groups]
    kl_by_episode = reference_kl(samples) if train.kl == "reward" else {}
    rewards_of_groups = [
        group_rewards(episodes, group_id=group.group_id, train=train, kl_by_episode=kl_by_episode)
        for group, episodes in zip(groups, trainable, strict=True)
    ]
    left_out = [episode.episode_id for group in trainable for episode in group if not is_trained(episode, train=train)]
    advantages = step_advantages(rewards_of_groups, train=train, left_out=left_out)
    metrics = taken_metrics(
        samples,
        advantages,
        num_groups=len(groups),
        rewards=[episode.reward for group in trainable for episode in group],
        shaped=[reward for group in rewards_of_groups for reward in group.shaped.values()],
        version=version,
        max_staleness=train.max_staleness,
    )
    return advantages, metrics


def account(samples: Sequence[Sample], advantages: Advantages) -> list[TrainedEpisode]:
    """What is stored of each trained episode: above all the digest of the arrays that entered the loss.

    Episodes that ended before their first turn count in the baseline, and nothing of them enters a loss.
    """
    return [
        TrainedEpisode(
            episode_id=episode_id,
            digest=samples_digest(rows),
            advantage=advantages.by_episode[episode_id],
            num_tokens=sum(row.num_tokens for row in rows),
        )
        for episode_id, rows in rows_by_episode(samples)
        if any(row.num_tokens for row in rows)
    ]


@contextmanager
def _writing() -> Iterator[None]:
    """What the file system refuses is for a person to mend; nothing of the step is committed by then."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SetupError(
            f"cannot write weights: {error}. Make room or mend the folder; the step is replayed"
        ) from error


def _log_step(run_id: int, version: int, metrics: dict[str, float]) -> None:
    gap = metrics.get("logprob_gap_max")
    logger.info(
        "trained run=%d version=%d reward=%.3f episodes=%d tokens=%d lag_max=%d gap=%s grad_norm=%.3f "
        "wait_s=%.2f train_s=%.2f publish_s=%.2f",
        run_id,
        version,
        metrics["reward_mean"],
        metrics["num_episodes"],
        metrics["num_tokens"],
        metrics["lag_max"],
        "-" if gap is None else f"{gap:.1e}",
        metrics["grad_norm"],
        metrics["wait_s"],
        metrics["train_s"],
        metrics["publish_s"],
    )
