"""A run whose episodes are all scored before its trainer starts: another like it comes to the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import JsonValue
from safetensors.numpy import load_file
from sqlalchemy import text

from common.config import RunConfig, load_run_config
from common.db import audit, engines, episodes, report, runs, tasks, turns, versions
from common.db.runs import Run
from common.db.session import Database
from common.episode import EpisodeState, Turn
from common.outcomes import Outcome
from common.weights import verify
from tests.conftest import clone
from tests.integration.doomed import Point, run_until
from tests.integration.trained import sampled_turns
from tests.integration.world import World
from trainer.policy import Policy

NUM_VERSIONS, GROUPS_PER_STEP, GROUP_SIZE = 4, 2, 2
NUM_EPISODES = NUM_VERSIONS * GROUPS_PER_STEP * GROUP_SIZE
LIFE_TIMEOUT_S = 120.0
TOML = f"""
name = "{{name}}"
model = "{{model}}"
[rollout]
group_size = {GROUP_SIZE}
[train]
groups_per_step = {GROUPS_PER_STEP}
num_versions = {NUM_VERSIONS}
max_staleness = {NUM_VERSIONS - 1}
keep_checkpoints = {{keep_checkpoints}}
"""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a finished run came to."""

    metrics: tuple[Mapping[str, float], ...]
    """Of each step, but for times."""
    weights: bytes
    """The last published version's."""
    state: Mapping[str, bytes]
    """The last checkpoint's weights and optimizer state by name."""

    def distance(self, other: Curve) -> float:
        """Largest difference of a step's loss."""
        return max(abs(a["loss"] - b["loss"]) for a, b in zip(self.metrics, other.metrics, strict=True))


MakeRun = Callable[..., "FixedRun"]


@dataclass(frozen=True, kw_only=True)
class FixedRun:
    """The run with the folder of its trainer's files."""

    run: Run
    database: Database
    database_url: str
    folder: Path

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    def train(self, point: Point | None = None) -> int | None:
        """Exit code of a trainer process that lives until the point, or the run's end."""
        return run_until(
            ["trainer", "--config", str(self.folder / "run.toml")],
            environment={
                "ROLLMILL_DATABASE_URL": self.database_url,
                "ROLLMILL_BROKER_URL": "memory://",
                "ROLLMILL_DATA_DIR": str(self.data_dir),
            },
            log=self.folder / "trainer.log",
            point=point,
            timeout_s=LIFE_TIMEOUT_S,
        )

    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()

    def standing(self) -> tuple[int, int]:
        """(steps done, steps open)."""
        with self.database.begin() as conn:
            states = (
                conn.execute(text("SELECT state FROM train_step WHERE run_id = :id"), {"id": self.run.id})
                .scalars()
                .all()
            )
        return states.count("DONE"), states.count("OPEN")

    def wrongs(self) -> dict[str, int]:
        """What the audit finds amiss, and how many groups were lost."""
        with self.database.begin() as conn:
            found = audit.violations(conn, self.run.id)
            twice = report.summary(conn, self.run.id).episodes_trained_twice
            trained = conn.execute(
                text("SELECT count(*) FROM episode_group WHERE run_id = :id AND state = 'TRAINED'"), {"id": self.run.id}
            ).scalar_one()
        found |= {"trained_twice": twice, "groups_lost": NUM_VERSIONS * GROUPS_PER_STEP - trained}
        return {name: count for name, count in found.items() if count}

    def curve(self) -> Curve:
        with self.database.begin() as conn:
            steps = conn.execute(
                text("SELECT metrics FROM train_step WHERE run_id = :id AND state = 'DONE' ORDER BY version_in"),
                {"id": self.run.id},
            ).scalars()
            metrics = [{name: value for name, value in step.items() if not name.endswith("_s")} for step in steps]
            newest = versions.newest(conn, self.run.id)
        assert newest is not None
        verify(newest.path, newest.manifest_sha256)
        state = load_file(self.checkpoint(newest.number) / "state.safetensors")
        return Curve(
            metrics=tuple(metrics),
            weights=(newest.path / "model.safetensors").read_bytes(),
            state={name: tensor.tobytes() for name, tensor in state.items()},
        )

    def checkpoint(self, version: int) -> Path:
        return self.data_dir / "checkpoints" / self.run.name / f"{version:06d}"

    def drafts(self) -> list[Path]:
        return list(self.data_dir.rglob(".draft-*"))


def make_fixed_run(
    name: str,
    *,
    database_url: str,
    database: Database,
    model: Path,
    folder: Path,
    played: list[list[Turn]],
    keep_checkpoints: int = 1,
) -> FixedRun:
    """A new run with all its episodes scored; `played` are the turns of each, sampled by version 0."""
    folder.mkdir()
    (folder / "run.toml").write_text(TOML.format(name=name, model=model, keep_checkpoints=keep_checkpoints))
    config = load_run_config(folder / "run.toml")
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, f"http://{name}", run_id=run.id)
        payloads: list[tuple[str, dict[str, JsonValue]]] = [(str(index), {}) for index in range(config.num_groups)]
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=payloads)
        world = World(database, run, tasks.ids(conn, config.dataset_name))
    _play(world, config, played)
    return FixedRun(run=run, database=database, database_url=database_url, folder=folder)


def _play(world: World, config: RunConfig, played: list[list[Turn]]) -> None:
    for number, (wakeup, episode) in enumerate(zip(world.feed(config.num_groups), played, strict=True)):
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            for turn in episode:
                turns.save(conn, claim, turn)
            moved = episodes.move(conn, claim, EpisodeState.SAMPLED, why="finished", outcome=Outcome.FINISHED)
        assert moved is not None
        world.score(moved, reward=float(number % 2))


@pytest.fixture(scope="module")
def make_run(
    start_folder: Path, postgres_url: str, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeRun]:
    """Makes runs that differ in nothing but their names, in one database."""
    root = tmp_path_factory.mktemp("runs")
    (root / "run.toml").write_text(TOML.format(name="any", model=start_folder, keep_checkpoints=1))
    policy = Policy.load(load_run_config(root / "run.toml"))
    played = [sampled_turns(policy, seed=index, version=0) for index in range(NUM_EPISODES)]
    with clone(postgres_url, template_database) as url:
        database = Database.connect(url)

        def make(**given: int) -> FixedRun:
            name = f"run-{len(list(root.iterdir()))}"
            return make_fixed_run(
                name,
                database_url=url,
                database=database,
                model=start_folder,
                folder=root / name,
                played=played,
                **given,
            )

        yield make
        database.dispose()


@pytest.fixture(scope="module")
def undisturbed(make_run: MakeRun) -> Curve:
    """What a run comes to whose trainer nobody kills."""
    run = make_run()
    assert run.train() == 0, run.log()
    assert run.wrongs() == {}
    curve = run.curve()
    losses = [step["loss"] for step in curve.metrics]
    assert len(set(losses)) == NUM_VERSIONS, "each step must be told from the others"
    return curve
