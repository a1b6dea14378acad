"""Each role does its process's whole work with the real functions, and is refused what is not its own.

Over 400 lines: one role after the other over the same tables, so that a grant which nobody tries is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import IntegrityError

from common.config import RolloutConfig, SharingConfig
from common.db import (
    engines,
    episode_files,
    episodes,
    groups,
    nodes,
    report,
    retries,
    runs,
    sandboxes,
    sharing,
    snapshot,
    standstill,
    steps,
    tasks,
    turns,
    versions,
)
from common.db.episodes import Claim, Wakeup
from common.db.roles import Role, grant_roles, user_of
from common.db.session import Database, check_schema
from common.db.steps import TrainedEpisode
from common.episode import EpisodeState, Stage
from common.errors import SetupError
from common.outcomes import Outcome
from common.weights import Published
from deploy.export import export_run
from deploy.roles import make_roles, read_passwords
from tests.integration.world import World, make_turn

PUBLISHED = Published(location="/weights/0", manifest_sha256="0" * 64)
PASSWORDS = {role: f"secret-of-{role}" for role in Role}


class Cast:
    """A connection for every role."""

    def __init__(self, url: str, owner: Database) -> None:
        self.url = url
        self.owner = owner
        self.prefix = f"t{uuid4().hex[:8]}"
        self.databases: dict[Role, Database] = {}

    def grant(self) -> list[bool]:
        with self.owner.begin() as conn:
            return [access.created for access in grant_roles(conn, prefix=self.prefix, passwords=PASSWORDS)]

    def __getitem__(self, role: Role) -> Database:
        if role not in self.databases:
            user = user_of(role, prefix=self.prefix)
            url = make_url(self.url).set(username=user, password=PASSWORDS[role])
            self.databases[role] = Database.connect(url.render_as_string(hide_password=False), pool_size=1)
        return self.databases[role]

    def close(self) -> None:
        for database in self.databases.values():
            database.dispose()
        users = ", ".join(user_of(role, prefix=self.prefix) for role in Role)
        with self.owner.begin() as conn:
            conn.execute(text(f"DROP OWNED BY {users}"))
            conn.execute(text(f"DROP ROLE {users}"))

    def refuses(self, role: Role, statement: str, *, named: str = "permission denied for table") -> None:
        with pytest.raises(SetupError, match=named), self[role].begin() as conn:
            # The reader's transactions may only read, unless it says otherwise.
            conn.execute(text(f"SET TRANSACTION READ WRITE; {statement}"))


@pytest.fixture
def cast(database_url: str, world: World) -> Iterator[Cast]:
    cast = Cast(database_url, world.database)
    assert cast.grant() == [True] * len(Role)
    yield cast
    cast.close()


def claim_as(database: Database, wakeup: Wakeup) -> Claim:
    with database.begin() as conn:
        claim = episodes.claim(conn, wakeup, worker="w", token=uuid4(), lease_s=60, configs={})
        assert claim is not None
        assert episodes.renew(conn, [claim.token], lease_s=60) == {claim.token}
    return claim


def feed(cast: Cast, world: World, *, num_groups: int, wanted: int | None = None) -> list[Wakeup]:
    with cast[Role.FEEDER].begin() as conn:
        assert [run.name for run in runs.active(conn)] == ["run-a"]
        assert [load.episodes for load in sharing.loads(conn)] == [0]
        cursor = runs.lock_cursor(conn, world.run.id)
        assert cursor is not None
        engines.live_version(conn, world.run.id)
        tasks.load(conn, dataset="run-a", handler="calculator", payloads=[("new", {"n": 1})])
        assert tasks.ids(conn, world.run.config.dataset_name)[: len(world.task_ids)] == world.task_ids
        assert groups.num_in_flight(conn, world.run.id, live_version=0) == 0
        assert groups.num_not_dropped(conn, world.run.id) == 0
        wakeups = groups.create(conn, run_id=world.run.id, task_ids=world.task_ids[:num_groups], size=2, wanted=wanted)
        runs.move_cursor(conn, world.run.id, replace(cursor, index=num_groups))
    return wakeups


def prepare(cast: Cast, wakeup: Wakeup) -> Wakeup:
    claim = claim_as(cast[Role.INIT], wakeup)
    with cast[Role.INIT].begin() as conn:
        sandboxes.record(conn, claim, backend="folder", node="here", handle=f"box-{wakeup.episode_id}")
        moved = episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared={"sandbox": None})
    assert moved is not None
    return moved


def sample(cast: Cast, wakeup: Wakeup) -> Wakeup:
    claim = claim_as(cast[Role.RUN], wakeup)
    with cast[Role.RUN].begin() as conn:
        turns.save(conn, claim, make_turn(0))
        for content in (b"first", b"again"):
            episode_files.save(conn, claim, content=content, num_files=1, left_out={"link": 2})
        assert turns.load(conn, claim.episode_id, claim.attempt) == [make_turn(0)]
        return turns.save_last(conn, claim, make_turn(1), outcome=Outcome.FINISHED)


def score(cast: Cast, wakeup: Wakeup, reward: float = 1.0) -> None:
    claim = claim_as(cast[Role.EVAL], wakeup)
    with cast[Role.EVAL].begin() as conn:
        assert [message["content"] for turn in claim.transcript for message in turn] == ["said", "said"]
        handed = episode_files.load(conn, claim.episode_id, claim.attempt)
        assert handed == episode_files.StoredFiles(content=b"again", left_out={"link": 2})
        episodes.move(conn, claim, EpisodeState.SCORED, why="scored", reward=reward, reward_parts={"right": reward})


def train(cast: Cast, world: World) -> list[int]:
    with cast[Role.TRAINER].begin() as conn:
        run = runs.open_run(conn, world.run.config)
        assert versions.newest(conn, run.id) is None
        versions.publish(conn, run.id, 0, PUBLISHED)
        versions.publish(conn, run.id, 0, PUBLISHED)
        assert steps.open_step(conn, run.id) is None
        step = steps.take_groups(conn, run.id, version_in=0, num_groups=2, max_staleness=1, max_refills=1).step
        assert step is not None
        loaded = [episode for group in steps.load_groups(conn, step.id) for episode in group.episodes]
        trained = [
            TrainedEpisode(episode_id=e.episode_id, digest=b"d", advantage=0.5, num_tokens=len(e.turns[0].sampled_ids))
            for e in loaded
        ]
        steps.finish_step(conn, step, published=PUBLISHED, metrics={"loss": 0.5}, trained=trained)
        heavier = world.run.config.model_copy(update={"sharing": SharingConfig(weight=2)})
        assert runs.open_run(conn, heavier).config == heavier
        runs.check_end(conn, run)
        runs.finish(conn, run.id)
    return [episode.episode_id for episode in loaded]


def test_the_roles_do_a_whole_run_between_them(cast: Cast, world: World, tmp_path: Path) -> None:
    even, *wakeups = feed(cast, world, num_groups=3)
    for number, wakeup in enumerate((even, *wakeups)):
        score(cast, sample(cast, prepare(cast, wakeup)), reward=float(number < 2 or number % 2))
    # The first group's rewards are equal: it is dropped.
    assert train(cast, world) == [wakeup.episode_id for wakeup in wakeups[1:]]
    with cast[Role.READER].begin() as conn:
        now = snapshot.take_snapshot(conn, world.run.id)
        assert (now.episodes[EpisodeState.SCORED], now.version_newest) == (6, 1)
        assert report.summary(conn, world.run.id).episodes_trained == 4
    assert export_run(cast[Role.READER], world.run, tmp_path / "out", report=lambda *_: None)["turns"] == 12


def test_the_trainer_pauses_a_run_that_stands_still(cast: Cast, world: World) -> None:
    for wakeup in feed(cast, world, num_groups=1):
        claim = claim_as(cast[Role.INIT], wakeup)
        with cast[Role.INIT].begin() as conn:
            retries.retry(conn, claim, outcome=Outcome.HANDLER_FAILED, detail="bug", afresh=True, max_attempts=1)
    with cast[Role.TRAINER].begin() as conn:
        steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1)
    with cast[Role.TRAINER].begin() as conn:
        reason = standstill.pause_if_still(conn, world.run.id, version=0, max_dropped=1)
    with cast[Role.READER].begin() as conn:
        assert snapshot.take_snapshot(conn, world.run.id).pause_reason == reason
    assert reason is not None


def test_every_process_may_see_that_its_schema_is_right(cast: Cast) -> None:
    for role in Role:
        check_schema(cast[role])


def test_eval_cancels_the_stragglers_of_a_group_that_has_enough(cast: Cast, world: World) -> None:
    with world.database.begin() as conn:
        config = world.run.config.model_copy(update={"rollout": RolloutConfig(group_size=2, oversample=1)})
        world.run = runs.open_run(conn, config)
    (first, second) = feed(cast, world, num_groups=1, wanted=1)
    score(cast, sample(cast, prepare(cast, first)))
    with world.database.begin() as conn:
        states = conn.execute(text("SELECT state FROM episode ORDER BY id")).scalars().all()
    assert (states, second.stage) == (["SCORED", "CANCELLED"], Stage.INIT)


@pytest.mark.parametrize("role", [Role.INIT, Role.RUN, Role.EVAL])
def test_each_stage_may_retry_fail_and_hand_back(cast: Cast, world: World, role: Role) -> None:
    def waiting(wakeup: Wakeup) -> Wakeup:
        steps_before = {Role.INIT: (), Role.RUN: (prepare,), Role.EVAL: (prepare, sample)}[role]
        for step in steps_before:
            wakeup = step(cast, wakeup)
        return wakeup

    retried, handed_back, failed, failed_too = (waiting(wakeup) for wakeup in feed(cast, world, num_groups=2))
    claim = claim_as(cast[role], handed_back)
    with cast[role].begin() as conn:
        assert len(retries.release(conn, [claim.token], why="ends")) == 1
    claim = claim_as(cast[role], retried)
    for wakeup, max_attempts in ((retried, 5), (failed, 1), (failed_too, 1)):
        claim = claim if wakeup is retried else claim_as(cast[role], wakeup)
        with cast[role].begin() as conn:
            again = retries.retry(
                conn, claim, outcome=Outcome.HANDLER_FAILED, detail="bug", afresh=False, max_attempts=max_attempts
            )
        assert (again is None) == (max_attempts == 1)
    with cast[Role.READER].begin() as conn:
        states = conn.execute(text("SELECT state FROM episode_group ORDER BY id")).scalars().all()
    assert states == ["OPEN", "COMPLETE"]


def test_the_reaper_reaps_resends_and_sweeps(cast: Cast, world: World) -> None:
    dead, lost, poison, _ = feed(cast, world, num_groups=2)
    prepare(cast, lost)
    for wakeup in (dead, poison):
        claim_as(cast[Role.INIT], wakeup)
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET lease_until = now() - interval '1 s' WHERE claim_token IS NOT NULL"))
        conn.execute(text("UPDATE episode SET failures = 4 WHERE id = :id"), {"id": poison.episode_id})
    with cast[Role.REAPER].begin() as conn:
        assert [wakeup.episode_id for wakeup in retries.reap(conn, max_attempts=5)] == [dead.episode_id]
    with cast[Role.REAPER].begin() as conn:
        assert len(episodes.resend(conn, after_s=0)) == 3
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET attempt = 2 WHERE id = :id"), {"id": lost.episode_id})
    with cast[Role.REAPER].begin() as conn:
        (orphan,) = sandboxes.orphans(conn, node="here")
        sandboxes.destroyed(conn, [orphan.id])
        assert sandboxes.orphans(conn, node="here") == []


def test_a_node_that_run_has_left_is_left_by_the_reaper(cast: Cast, world: World) -> None:
    wakeup, other = feed(cast, world, num_groups=1)
    claim = claim_as(cast[Role.INIT], wakeup)
    with cast[Role.INIT].begin() as conn:
        episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared={"sandbox": "1-1"}, node="here")
    with cast[Role.RUN].begin() as conn:
        nodes.beat(conn, "there", every_s=1)
        nodes.beat(conn, "there", every_s=0)
    with cast[Role.REAPER].begin() as conn:
        assert nodes.silent(conn, silent_s=60) == {"here": 1}
        (again,) = retries.leave_node(conn, "here", silent_s=60, max_attempts=5)
    assert again == Wakeup(stage=Stage.INIT, episode_id=wakeup.episode_id, attempt=2)
    playing = claim_as(cast[Role.RUN], prepare(cast, other))
    with cast[Role.RUN].begin() as conn:
        sandboxes.record(conn, playing, backend="docker", node="there", handle="2-1")
    with cast[Role.READER].begin() as conn:
        assert [state.name for state in nodes.states(conn, within_s=60)] == ["there"]


def test_the_run_fleet_keeps_its_engines(cast: Cast, world: World) -> None:
    with cast[Role.RUN].begin() as conn:
        (engine,) = engines.own(conn, "keeper", lease_s=60)
        engines.failed(conn, engine.id, owner="keeper", error="no answer", quarantine_after=3)
        claim = engines.starts_loading(conn, engine.id, owner="keeper", version=0)
        engines.loaded(conn, engine.id, owner="keeper", version=0, wire="vllm-generate")
        assert claim is not None
        assert (engines.claim(conn, engine.id, owner="keeper") or 0) > claim
        assert engines.claim(conn, engine.id, owner="another") is None
        assert [serving.version for serving in engines.serving(conn, world.run.id)] == [0]
        engines.serves(conn, engine.id, owner="keeper", version=None)
        assert versions.newest(conn, world.run.id) is None


def test_only_eval_may_give_a_reward(cast: Cast, world: World) -> None:
    (wakeup, _) = feed(cast, world, num_groups=1)
    sample(cast, prepare(cast, wakeup))
    rewarded = f"UPDATE episode SET state = 'SCORED', reward = 1 WHERE id = {wakeup.episode_id}"
    for role in set(Role) - {Role.EVAL, Role.READER}:
        cast.refuses(role, rewarded)
    cast.refuses(
        Role.FEEDER, "INSERT INTO episode (run_id, group_id, index, state, reward) VALUES (1, 1, 9, 'SCORED', 1)"
    )
    with pytest.raises(IntegrityError, match="reward_iff_scored"), cast[Role.RUN].begin() as conn:
        conn.execute(text(f"UPDATE episode SET state = 'SCORED' WHERE id = {wakeup.episode_id}"))


@pytest.mark.parametrize("role", [Role.INIT, Role.RUN])
def test_a_stage_that_names_a_reward_in_its_move_is_refused(cast: Cast, world: World, role: Role) -> None:
    (wakeup, _) = feed(cast, world, num_groups=1)
    claim = claim_as(cast[role], wakeup if role is Role.INIT else prepare(cast, wakeup))
    to = EpisodeState.READY if role is Role.INIT else EpisodeState.SAMPLED
    with pytest.raises(SetupError, match=f"{role}: permission denied"), cast[role].begin() as conn:
        episodes.move(conn, claim, to, why="mine", reward=1.0, reward_parts={})


def test_nobody_but_run_stores_turns_and_nobody_changes_them(cast: Cast, world: World) -> None:
    (wakeup, _) = feed(cast, world, num_groups=1)
    sample(cast, prepare(cast, wakeup))
    for role in set(Role) - {Role.RUN, Role.READER}:
        cast.refuses(
            role, "INSERT INTO turn_tokens (turn_id, suffix_ids, sampled_ids, logprobs) VALUES (1, '', '', '')"
        )
    for role in set(Role) - {Role.READER}:
        cast.refuses(role, "UPDATE turn_tokens SET logprobs = ''")
        cast.refuses(role, "UPDATE turn SET digest = ''")
        cast.refuses(role, "DELETE FROM turn")


def test_what_each_process_may_not_write_besides(cast: Cast) -> None:
    refused = {
        Role.INIT: ("UPDATE engine SET version = 9", "UPDATE run SET state = 'STOPPED'"),
        Role.RUN: ("UPDATE episode SET prepared = NULL", "INSERT INTO policy_version VALUES (1, 1, 'p', 's')"),
        Role.EVAL: (
            "UPDATE episode SET prepared = NULL",
            "INSERT INTO sandbox (episode_id) VALUES (1)",
            "UPDATE episode_group SET wanted = 1",
            "UPDATE run SET weight = 9",
        ),
        Role.TRAINER: (
            "UPDATE episode SET state = 'NEW'",
            "UPDATE run SET config = '{}'",
            "UPDATE run SET resumed_at = now()",
            "DELETE FROM train_step",
        ),
        Role.FEEDER: (
            "UPDATE episode SET state = 'READY'",
            "UPDATE run SET state = 'FINISHED'",
            "UPDATE run SET pause_reason = 'no'",
            "UPDATE run SET weight = 9",
            "UPDATE sandbox SET destroyed_at = now()",
        ),
        Role.REAPER: ("INSERT INTO episode (run_id) VALUES (1)", "UPDATE sandbox SET handle = '/'"),
    }
    for role, statements in refused.items():
        for statement in statements:
            cast.refuses(role, statement)


def test_the_reader_reads_every_table_and_view_and_writes_nothing(cast: Cast, world: World) -> None:
    world.finish(world.feed()[0])
    with world.database.begin() as conn:
        found = "SELECT relname FROM pg_class WHERE relnamespace = CAST('public' AS regnamespace) AND relkind = :kind"
        tables, views = (conn.execute(text(found), {"kind": kind}).scalars().all() for kind in ("r", "v"))
        columns = {name: next(iter(conn.execute(text(f"SELECT * FROM {name} LIMIT 0")).keys())) for name in tables}
    assert {"episode", "turn_tokens"} <= set(tables)
    assert {"samples", "staleness"} <= set(views)
    for name in (*tables, *views):
        with cast[Role.READER].begin() as conn:
            conn.execute(text(f"SELECT * FROM {name}"))
    for name, column in columns.items():
        denied = f"permission denied for table {name}"
        cast.refuses(Role.READER, f"DELETE FROM {name}", named=denied)
        cast.refuses(Role.READER, f'UPDATE {name} SET "{column}" = NULL', named=denied)
        cast.refuses(Role.READER, f'INSERT INTO {name} ("{column}") VALUES (NULL)', named=denied)
    with cast[Role.READER].begin() as conn:
        assert conn.execute(text("SHOW transaction_read_only")).scalar_one() == "on"


def test_the_reader_sees_no_secret_of_the_server(cast: Cast) -> None:
    cast.refuses(Role.READER, "SELECT * FROM pg_authid")
    cast.refuses(Role.READER, "SELECT pg_read_file('/etc/hostname')", named="permission denied for function")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE mine (id int)",
        "CREATE TEMPORARY TABLE mine (id int)",
        "ALTER TABLE episode DROP CONSTRAINT episode_reward_iff_scored_check",
        "DROP TABLE turn_tokens",
        "TRUNCATE episode_event",
        "CREATE ROLE mine",
        "CREATE SCHEMA mine",
        "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    ],
)
def test_nobody_but_the_owner_changes_the_schema(cast: Cast, statement: str) -> None:
    for role in Role:
        cast.refuses(role, statement, named="permission denied|must be owner")


def test_granting_again_mends_what_was_changed_and_takes_what_is_too_much(cast: Cast) -> None:
    user = user_of(Role.EVAL, prefix=cast.prefix)
    with cast.owner.begin() as conn:
        conn.execute(text(f"GRANT INSERT, UPDATE (digest) ON turn TO {user}"))
        conn.execute(text(f"REVOKE SELECT ON episode FROM {user}"))
    assert cast.grant() == [False] * len(Role)
    cast.refuses(Role.EVAL, "UPDATE turn SET digest = ''")
    with cast[Role.EVAL].begin() as conn:
        conn.execute(text("SELECT * FROM episode"))


def test_who_may_not_create_roles_is_told_so_in_one_line(cast: Cast) -> None:
    one_line = r"^database user .*_trainer may not create roles: set ROLLMILL_DATABASE_URL .*CREATEROLE\)$"
    with pytest.raises(SetupError, match=one_line), cast[Role.TRAINER].begin() as conn:
        grant_roles(conn, prefix="other", passwords=PASSWORDS)


def test_who_does_not_own_the_tables_is_told_so_and_grants_nothing(cast: Cast) -> None:
    user = user_of(Role.TRAINER, prefix=cast.prefix)
    with cast.owner.begin() as conn:
        conn.execute(text(f"ALTER ROLE {user} CREATEROLE"))
    with pytest.raises(SetupError, match="is not the owner of the tables"), cast[Role.TRAINER].begin() as conn:
        grant_roles(conn, prefix="other", passwords=PASSWORDS)


def test_a_prefix_that_is_no_name_is_refused(cast: Cast) -> None:
    with pytest.raises(SetupError, match="prefix 'x; DROP' of the roles"), cast.owner.begin() as conn:
        grant_roles(conn, prefix="x; DROP", passwords=PASSWORDS)


def test_the_command_keeps_passwords_that_the_server_accepts(database_url: str, tmp_path: Path) -> None:
    prefix, file = f"t{uuid4().hex[:8]}", tmp_path / "secrets" / "roles"
    owner = Database.connect(database_url)
    try:
        first, second = (make_roles(owner, prefix=prefix, passwords_file=file) for _ in range(2))
        assert ({access.created for access in first}, {access.created for access in second}) == ({True}, {False})
        assert file.stat().st_mode & 0o777 == 0o600
        known = read_passwords(file)
        assert list(known) == [f"{prefix}_{role}" for role in Role]
        for user, password in known.items():
            url = make_url(database_url).set(username=user, password=password).render_as_string(hide_password=False)
            Database.connect(url).dispose()
    finally:
        users = ", ".join(f"{prefix}_{role}" for role in Role)
        with owner.begin() as conn:
            conn.execute(text(f"DROP OWNED BY {users}"))
            conn.execute(text(f"DROP ROLE {users}"))
        owner.dispose()
