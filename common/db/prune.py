"""Takes a run that is over out of the database: what its turns say, or all of it. Piece by piece, so any size is fine.

A prune that was interrupted is finished by the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import text

from common.db.runs import Run
from common.db.session import Database
from common.errors import SetupError

EPISODES_AT_ONCE = 1000


def check_prunable(database: Database, run: Run, *, whole: bool) -> None:
    """Raise SetupError unless the run is over and nothing works on it; `whole` = all of it is to be deleted."""
    with database.begin() as conn:
        row = conn.execute(
            text(
                """
                SELECT state,
                       (SELECT count(*) FROM episode
                         WHERE run_id = r.id AND claim_token IS NOT NULL AND lease_until > now()) AS claimed,
                       (SELECT count(*) FROM sandbox s JOIN episode e ON e.id = s.episode_id
                         WHERE e.run_id = r.id AND s.destroyed_at IS NULL) AS sandboxes
                  FROM run r WHERE id = :id
                """
            ),
            {"id": run.id},
        ).one()
    if row.state not in ("FINISHED", "STOPPED"):
        raise SetupError(f"run {run.name} is {row.state}: only a run that is FINISHED or STOPPED is pruned")
    if row.claimed:
        raise SetupError(f"run {run.name}: {row.claimed} episodes are still worked on; try again when they are done")
    if whole and row.sandboxes:
        raise SetupError(
            f"run {run.name}: {row.sandboxes} sandboxes still stand, which nobody would find without it: "
            "let the reaper remove them first"
        )


def num_episodes(database: Database, run: Run) -> int:
    """Episodes that the run has."""
    with database.begin() as conn:
        num: int = conn.execute(text("SELECT count(*) FROM episode WHERE run_id = :id"), {"id": run.id}).scalar_one()
    return num


def empty_turns(database: Database, run: Run) -> Iterator[int]:
    """Delete token arrays, messages and files of the run's turns; yields how many episodes each piece had.

    Counts, versions, digests and timings stay, so that reports and views are as before.
    """
    yield from _piecewise(
        database,
        run,
        (
            "DELETE FROM turn_tokens USING turn t WHERE turn_id = t.id AND t.episode_id = ANY(:ids)",
            "DELETE FROM episode_files WHERE episode_id = ANY(:ids)",
            "UPDATE turn SET messages = '[]', compacted = NULL WHERE episode_id = ANY(:ids) AND messages <> '[]'",
        ),
    )


def delete_run(database: Database, run: Run) -> Iterator[int]:
    """Delete every row of the run, its name included; tasks stay. Yields how many episodes each piece had."""
    yield from _piecewise(
        database,
        run,
        (
            *(
                f"DELETE FROM {table} WHERE episode_id = ANY(:ids)"
                for table in ("trained_episode", "episode_event", "sandbox", "episode_files", "turn")
            ),
            "DELETE FROM episode WHERE id = ANY(:ids)",
        ),
    )
    with database.begin() as conn:
        for statement in (
            *(
                f"DELETE FROM {table} WHERE run_id = :id"
                for table in ("episode_group", "submission", "train_step", "evaluation_point", "policy_version")
            ),
            "UPDATE engine SET run_id = NULL, version = NULL WHERE run_id = :id",
            "DELETE FROM run WHERE id = :id",
        ):
            conn.execute(text(statement), {"id": run.id})


def _piecewise(database: Database, run: Run, statements: Sequence[str]) -> Iterator[int]:
    after = 0
    while True:
        with database.begin() as conn:
            ids = (
                conn.execute(
                    text("SELECT id FROM episode WHERE run_id = :run_id AND id > :after ORDER BY id LIMIT :limit"),
                    {"run_id": run.id, "after": after, "limit": EPISODES_AT_ONCE},
                )
                .scalars()
                .all()
            )
            if not ids:
                return
            for statement in statements:
                conn.execute(text(statement), {"ids": list(ids)})
        after = ids[-1]
        yield len(ids)
