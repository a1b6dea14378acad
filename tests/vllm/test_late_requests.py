"""A keeper stands still, another takes its engine over, and then the first one's request arrives after all."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path

import pytest

from common.db import engines
from common.db.session import Database
from common.weights import LOADING
from tests.unit.workers.waiting import until
from tests.vllm.gate import Gate, Side
from tests.vllm.lone_keeper import keepers
from tests.vllm.playing import WITHIN_S, Trainee, judge, playing, until_whole
from tests.vllm.serving import RUN
from workers.engine_client import EngineClient

pytestmark = pytest.mark.long

NAME = "/update_weight_version"
LOAD = "/collective_rpc"


class When(StrEnum):
    """When it arrives."""

    MID_LOAD = "mid_load"
    """The new owner has loaded, and not yet named what it loaded."""
    DONE = "done"
    """The new owner's version serves."""


LATE = (
    ("/pause", "", When.MID_LOAD),
    (NAME, LOADING, When.MID_LOAD),
    (LOAD, "", When.MID_LOAD),
    (NAME, RUN, When.MID_LOAD),
    ("/resume", "", When.MID_LOAD),
    (LOAD, "", When.DONE),
    (NAME, RUN, When.DONE),
)
"""Route, and a word of its body."""


async def test_what_arrives_late_changes_nothing(
    database: Database,
    database_url: str,
    gate: Gate,
    client: EngineClient,
    tiny: Path,
    tmp_path: Path,
    figures: dict[str, object],
) -> None:
    """Else old weights would serve under the new name, or be named wrongly, or leave their keys and values behind."""
    trainee = Trainee(database, tiny, tmp_path / "weights")
    with database.begin() as conn:
        engines.register(conn, gate.url, run_id=trainee.run.id)

    with keepers(database_url, tmp_path) as group:
        trainee.publish_next()
        owner = group.start()
        await until_whole(trainee, client, gate.url, number=0, owner=owner)
        with playing(trainee, tmp_path) as players:
            for path, word, when in LATE:
                late = gate.stop_next(path, Side.BEFORE, word=word)
                trainee.publish_next()
                await late.wait(within_s=WITHIN_S)
                group.stop(owner)
                loading = gate.stop_next(LOAD, Side.AFTER)
                number = trainee.publish_next()
                next_owner = group.start()
                await loading.wait(within_s=WITHIN_S)
                if when is When.DONE:
                    loading.release(delivers=True)
                    await until_whole(trainee, client, gate.url, number=number, owner=next_owner)
                num_refused = gate.num_refused
                late.release(delivers=True)
                await until(lambda late=late: late.status is not None, within_s=WITHIN_S)  # type: ignore[misc]
                assert (path, when, late.status) == (path, when, 409)
                if when is When.MID_LOAD:
                    assert await client.is_paused(gate.url)
                    assert await client.weight_version(gate.url) == LOADING
                # It learns of it, and what it still does is refused, too: it resumes whatever it paused.
                group.go_on(owner)
                if path != "/resume":
                    await until(lambda n=num_refused: gate.num_refused >= n + 2, within_s=WITHIN_S)  # type: ignore[misc]
                group.kill(owner)
                loading.release(delivers=True)
                await until_whole(trainee, client, gate.url, number=number, owner=next_owner)
                owner = next_owner
            await asyncio.to_thread(players.end)
            verdict = judge(trainee, players)
    assert verdict.num_episodes > 0
    figures |= {"late_requests": len(LATE), "late_request_episodes": verdict.num_episodes}
