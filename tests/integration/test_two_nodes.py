"""INIT and RUN on two nodes over RabbitMQ: each episode is played where its sandbox lies, until one node is killed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import audit, groups, tasks
from common.db.episodes import Wakeup
from common.db.session import Database
from common.queues import QueueKind
from deploy.broker_queues import check_queues
from deploy.ports import free_port
from tests.integration.broker_stack import Node, Processes, open_run, wait_until
from tests.integration.test_broker import announce
from workers.feeder import read_tasks

NUM_GROUPS, GROUP_SIZE = 12, 4
NUM_EPISODES = NUM_GROUPS * GROUP_SIZE
TIMEOUT_S = 120.0
AUDITED = (
    "lost",
    "groups_miscounted",
    "turns_doubled",
    "turn_gaps",
    "turns_damaged",
    "infra_rewards",
    "broken_histories",
)
"""The audit's checks that need no trainer."""
CONFIG = RunConfig(
    name="run-a",
    handler="workers.handlers.shell:Shell",
    model=TINY_MODELS / "tiny-shell",
    num_tasks=NUM_GROUPS,
    rollout=RolloutConfig(group_size=GROUP_SIZE, max_turns=4),
    train=TrainConfig(groups_per_step=NUM_GROUPS, minibatches=1, num_versions=2),
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Two nodes' fleets, beside a node with EVAL and the reaper."""

    database: Database
    processes: Processes
    folder: Path

    def start(self, stage: str, node: str, *more: str) -> int:
        """A fleet of a node, with a data folder of its own; its process number."""
        process = self.processes.start(
            f"{stage}-{node}",
            *("workers.fleet", stage, *more),
            ROLLMILL_NODE=node,
            ROLLMILL_DATA_DIR=str(self.folder / node),
        )
        return process.pid

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes.running[name].kill()

    def count(self, query: str, **parameters: object) -> Counter[Any]:
        """A query of two columns: what is counted, how often."""
        with self.database.begin() as conn:
            return Counter({row[0]: row[1] for row in conn.execute(text(query), parameters)})

    def until(self, query: str, at_least: dict[str, int], *, what: str) -> None:
        def reached() -> bool:
            found = self.count(query)
            return all(found[key] >= number for key, number in at_least.items())

        wait_until(reached, timeout_s=TIMEOUT_S, what=f"{what}: {self.processes.logs()}")


PLAYED = """
    SELECT s.node, count(*) FROM episode_event v JOIN sandbox s USING (episode_id, attempt)
     WHERE v.to_state = 'SAMPLED' GROUP BY s.node"""
"""Episodes by the node of their sandbox."""
PLAYED_BY = """
    SELECT s.node || ' ' || v.worker, count(*) FROM episode_event v JOIN sandbox s USING (episode_id, attempt)
     WHERE v.to_state = 'SAMPLED' GROUP BY 1"""
"""The same, with the process that played them."""
BOUND = "SELECT node, count(*) FROM episode WHERE state = 'READY' GROUP BY node"
STATES = "SELECT state, count(*) FROM episode GROUP BY state"


def announce_episodes(node: Node, database: Database, run_id: int) -> None:
    """Once both INITs listen, so that each gets its part."""
    given = node.settings(QueueKind.CLASSIC)
    wait_until(lambda: num_consumers(node, "init") == 2, timeout_s=TIMEOUT_S, what="two INIT fleets")
    with database.begin() as conn:
        tasks.load(conn, dataset="tasks", handler=CONFIG.handler, payloads=read_tasks(CONFIG))
        wakeups: list[Wakeup] = groups.create(conn, run_id=run_id, task_ids=tasks.ids(conn, "tasks"), size=GROUP_SIZE)
    assert len(wakeups) == NUM_EPISODES
    announce(given, *wakeups)


def num_consumers(node: Node, name: str) -> int | None:
    return {queue.name: queue.num_consumers for queue in check_queues(node.settings(QueueKind.CLASSIC)).queues}[name]


def test_each_episode_is_played_where_its_sandbox_lies_and_elsewhere_once_the_node_is_gone(
    node: Node, database: Database, database_url: str, tmp_path: Path
) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    port = free_port()
    run = open_run(database, CONFIG, engine_url=f"http://127.0.0.1:{port}", weights=tmp_path / "weights")
    env = node.env(QueueKind.CLASSIC, database_url, tmp_path) | {
        "ROLLMILL_LEASE_S": "4",
        "ROLLMILL_HEARTBEAT_S": "0.5",
        "ROLLMILL_REAP_EVERY_S": "0.3",
        "ROLLMILL_NODE_LOST_AFTER_S": "1",
        # A fleet that is killed may have moved an episode on, and not said so.
        "ROLLMILL_RESEND_AFTER_S": "8",
    }
    with Processes(folder=tmp_path, env=env) as processes:
        scene = Scene(database=database, processes=processes, folder=tmp_path)
        processes.start("engine", "benchmarks.scripted_policy", "shell", "--port", str(port), "--token-s", "0.005")
        pids = {}
        for name in ("a", "b"):
            scene.start("init", name, "--concurrency", "2")
            pids[name] = scene.start("run", name, "--concurrency", "2")
        scene.start("eval", "c")
        processes.start("reaper", "workers.reaper", ROLLMILL_NODE="b", ROLLMILL_DATA_DIR=str(tmp_path / "b"))
        scene.until("SELECT name, count(*) FROM node GROUP BY name", {"a": 1, "b": 1}, what="RUN on both")
        announce_episodes(node, database, run.id)
        scene.until(BOUND, {"a": 4, "b": 4}, what="prepared on both")
        scene.until(PLAYED, {"a": 2}, what="played on a")
        scene.kill("run-a", "init-a")
        assert 2 <= scene.count(PLAYED)["a"] < NUM_EPISODES // 2
        scene.until(STATES, {"SCORED": NUM_EPISODES}, what="all scored")
    check_end(scene, run.id, pids)


def check_end(scene: Scene, run_id: int, pids: dict[str, int]) -> None:
    """Each on its own node, nothing lost or doubled, and no failure of infrastructure has a reward."""
    by_process = scene.count(PLAYED_BY)
    assert {(line.split()[0], int(line.rpartition(":")[2])) for line in by_process} == set(pids.items())
    assert sum(by_process.values()) == NUM_EPISODES
    ended = "SELECT to_state, count(DISTINCT episode_id) FROM episode_event WHERE to_state = 'SCORED' GROUP BY 1"
    assert scene.count(ended) == {"SCORED": NUM_EPISODES}
    moved = scene.count("""
        SELECT e.node, count(DISTINCT e.id) FROM episode e JOIN episode_event v ON v.episode_id = e.id
         WHERE v.why LIKE 'node_lost: %node a,%' GROUP BY 1""")
    assert list(moved) == ["b"]
    assert "lost node=a: no RUN fleet there" in scene.processes.log("reaper")
    with scene.database.begin() as conn:
        found = audit.violations(conn, run_id)
    assert {name: found[name] for name in AUDITED} == dict.fromkeys(AUDITED, 0)
