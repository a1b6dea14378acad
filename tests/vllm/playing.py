"""Episodes through the real RUN stage, pool and database while things are killed, and what became of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from sqlalchemy import text
from transformers import PreTrainedModel

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, groups, runs, tasks, turns, versions
from common.db.engines import EngineRow
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import EpisodeState, FinishReason, Stage, Turn
from common.settings import Settings
from common.weights import WeightStore, version_name
from tests.unit.workers.waiting import until
from tests.vllm.serving import RUN, publish
from trainer.modelling import load_model
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.handlers.calculator import Calculator
from workers.handlers.registry import load_handler
from workers.init import PreparedEpisode
from workers.leases import Leases
from workers.render.of_run import renderer_of
from workers.run import Run
from workers.run_loop import RunLoop
from workers.sandbox import open_backend
from workers.stage import StageWorker

GROUP_SIZE = 2
NUM_TASKS = 50
AT_ONCE = 8
LONGEST_WAIT_S = 240.0
"""Of a turn for an engine: all of them may be starting anew."""
END_TIMEOUT_S = 120.0
WITHIN_S = 60.0
"""For a keeper to have loaded a version."""
MAX_DLOGPROB = 1e-4


class Trainee:
    """A run whose versions are all different, so that a token's log-prob tells which one sampled it."""

    def __init__(self, database: Database, model: Path, folder: Path, **rollout: Any) -> None:
        self.database = database
        self._model = model
        self._store = WeightStore(folder)
        self.models: dict[int, PreTrainedModel] = {}
        config = RunConfig(
            name=RUN,
            model=model,
            rollout=RolloutConfig(
                group_size=GROUP_SIZE, max_turns=3, max_tokens_per_turn=40, on_format_error="tell", **rollout
            ),
            train=TrainConfig(max_staleness=1),
        )
        payloads = [(str(number), task) for number, task in enumerate(Calculator().tasks(seed=1, num_tasks=NUM_TASKS))]
        with database.begin() as conn:
            self.run = runs.open_run(conn, config)
            tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=payloads)
            self.task_ids = tasks.ids(conn, config.dataset_name)
        self.payloads = dict(zip(self.task_ids, (payload for _, payload in payloads), strict=True))

    def publish_next(self) -> int:
        """Publish a version as the trainer does; returns its number."""
        number = len(self.models)
        self.models[number] = shifted(load_model(self._model), seed=number)
        published = publish(self._store, number, self.models[number], tokenizer=self._model)
        with self.database.begin() as conn:
            versions.publish(conn, self.run.id, number, published)
        return number

    def engine(self, url: str) -> Any:
        """The engine's row."""
        with self.database.begin() as conn:
            return conn.execute(text("SELECT * FROM engine WHERE url = :url"), {"url": url}).one()

    def serves(self, url: str, number: int) -> bool:
        """Whether the database says that the engine takes work for this version."""
        row = self.engine(url)
        return row.version == number and row.state == "SERVING"


def shifted(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Weights beside the start: as a policy nearly as good, and told from others by each log-prob."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


class Players:
    """A RUN process without its queue: threads that feed a group, and play its episodes to their end, until told."""

    def __init__(self, trainee: Trainee, folder: Path) -> None:
        self._trainee = trainee
        self._database = trainee.database
        self.loop = RunLoop()
        self.client = EngineClient(timeout_s=60)
        self.pool = EnginePool(self.client, self._engines_of, wait_s=LONGEST_WAIT_S)
        settings = Settings(engine_wait_s=LONGEST_WAIT_S, data_dir=folder)
        stage = Run(
            database=self._database,
            engines=self.pool,
            handler=load_handler,
            renderer=renderer_of,
            backend=open_backend(settings),
            node=settings.node,
        )
        self._leases = Leases(self._database, lease_s=60, heartbeat_s=3)
        self._worker = StageWorker(
            Stage.RUN,
            lambda claim: self.loop.work(stage(claim)),
            database=self._database,
            leases=self._leases,
            settings=settings,
            worker="players",
            publish=self._publish,
        )
        self.published: queue.SimpleQueue[Wakeup] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._play, args=(n,), daemon=True) for n in range(AT_ONCE)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let the episodes end that are under way."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(END_TIMEOUT_S)
            assert not thread.is_alive(), "an episode does not come to an end"

    def close(self) -> None:
        self._is_over.set()
        self._worker.stop()
        self.loop.submit(self.client.close()).result(10)
        self._leases.close()
        self.loop.close()

    def _engines_of(self, run_id: int) -> list[EngineRow]:
        with self._database.begin() as conn:
            return engines.serving(conn, run_id)

    def _publish(self, wakeups: list[Wakeup]) -> None:
        for wakeup in wakeups:
            self.published.put(wakeup)

    def _play(self, number: int) -> None:
        task_id = self._trainee.task_ids[number]
        while not self._is_over.is_set():
            for wakeup in self._feed(task_id):
                self._worker.perform(wakeup.episode_id, wakeup.attempt)

    def _feed(self, task_id: int) -> list[Wakeup]:
        """A group whose episodes wait for RUN."""
        prepared = Calculator().init(self._trainee.payloads[task_id])
        stored = PreparedEpisode(messages=prepared.messages, tools=prepared.tools, sandbox=None).model_dump(mode="json")
        ready = []
        with self._database.begin() as conn:
            for wakeup in groups.create(conn, run_id=self._trainee.run.id, task_ids=[task_id], size=GROUP_SIZE):
                claim = episodes.claim(conn, wakeup, worker="feeder", token=uuid4(), lease_s=60, configs={})
                assert claim is not None
                moved = episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared=stored)
                assert moved is not None
                ready.append(moved)
        return ready


@contextmanager
def playing(trainee: Trainee, folder: Path) -> Iterator[Players]:
    """Episodes are under way in the block, and closed after it."""
    players = Players(trainee, folder)
    try:
        yield players
    finally:
        players.close()


async def until_whole(trainee: Trainee, client: EngineClient, url: str, *, number: int, owner: str) -> None:
    """Wait until the engine serves a version: under its name, owned by this keeper, and not paused."""
    await until(lambda: trainee.serves(url, number), within_s=WITHIN_S)
    assert trainee.engine(url).owner == owner
    assert await client.weight_version(url) == version_name(RUN, number)
    assert not await client.is_paused(url)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of all episodes."""

    num_episodes: int
    num_tokens: int
    longest_turn: int
    """In sampled tokens."""
    straddling: int
    """Turns with tokens of several versions."""
    versions: frozenset[int]
    """That tokens are of."""
    engines: frozenset[str]
    """That finished turns."""


def judge(trainee: Trainee, players: Players) -> Verdict:
    """Assert that no episode was lost, doubled or tried twice, and that each token is of the version it says."""
    with trainee.database.begin() as conn:
        rows = conn.execute(text("SELECT id, state, attempt, failures, num_turns FROM episode ORDER BY id")).all()
        played = [turns.load(conn, row.id, 1) for row in rows]
    handed_on = [players.published.get() for _ in range(players.published.qsize())]
    assert [(row.state, row.attempt, row.failures) for row in rows] == [("SAMPLED", 1, 0)] * len(rows)
    assert sorted(wakeup.episode_id for wakeup in handed_on) == [row.id for row in rows]
    assert [[turn.index for turn in episode] for episode in played] == [list(range(row.num_turns)) for row in rows]
    wrong = [gap for episode in played for gap in gaps(trainee.models, episode) if gap > MAX_DLOGPROB]
    assert wrong == []
    all_turns = [turn for episode in played for turn in episode]
    assert {turn.sampled.finish_reason for turn in all_turns} <= {FinishReason.STOP, FinishReason.LENGTH}
    return Verdict(
        num_episodes=len(rows),
        num_tokens=sum(len(turn.sampled.ids) for turn in all_turns),
        longest_turn=max(len(turn.sampled.ids) for turn in all_turns),
        straddling=sum(len(turn.sampled.spans) > 1 for turn in all_turns),
        versions=frozenset(span.version for turn in all_turns for span in turn.sampled.spans),
        engines=frozenset(turn.engine for turn in all_turns),
    )


def gaps(models: dict[int, PreTrainedModel], episode: list[Turn]) -> Iterator[float]:
    """For each version span, how far its log-probs are from those of the version that it names."""
    ids = [token for turn in episode for token in (*turn.suffix_ids, *turn.sampled.ids)]
    versions_in = {span.version for turn in episode for span in turn.sampled.spans}
    with torch.no_grad():
        logprobs = {v: models[v](input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1) for v in versions_in}
    start = 0
    for turn in episode:
        start += len(turn.suffix_ids)
        own = torch.tensor(turn.sampled.logprobs)
        chosen = torch.tensor(turn.sampled.ids)
        for span in turn.sampled.spans:
            rows = logprobs[span.version][start - 1 + span.start : start - 1 + span.end]
            theirs = rows.gather(1, chosen[span.start : span.end, None])[:, 0]
            yield float((theirs - own[span.start : span.end]).abs().max())
        start += len(turn.sampled.ids)
