"""Supervised training on what a run sampled: the very ids, on one process and on torchrun's two."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.config import TINY_MODELS, RunConfig
from common.db import episodes, groups, turns
from common.episode import EpisodeState
from common.errors import SetupError
from common.model_folder import read_model_shape
from common.outcomes import Outcome
from tests.integration.world import World, make_turn
from trainer.imitation import Imitator
from trainer.sft import train
from trainer.sft_rows import read_rows, rows_of_run

START = TINY_MODELS / "tiny-calculator"
SHAPE = read_model_shape(START)
LAUNCH_TIMEOUT_S = 240.0


def play(world: World, rewards: list[float], *, first_id: int = 5) -> list[int]:
    """Groups of two episodes with these rewards, each of two turns with ids of its own; the ids of the episodes."""
    wakeups = world.feed(len(rewards) // 2)
    for number, (wakeup, reward) in enumerate(zip(wakeups, rewards, strict=True)):
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            for index in range(2):
                turns.save(conn, claim, make_turn(index, ids=tuple(range(first_id, first_id + 1 + number))))
            moved = episodes.move(conn, claim, EpisodeState.SAMPLED, why="finished", outcome=Outcome.FINISHED)
        assert moved is not None
        world.score(moved, reward=reward)
    return [wakeup.episode_id for wakeup in wakeups]


def test_rows_are_the_ids_of_training_episodes_with_the_reward(world: World) -> None:
    played = play(world, [0.0, 1.0, 0.7, 0.5])
    with world.database.begin() as conn:
        held_out = groups.create(
            conn, run_id=world.run.id, task_ids=world.task_ids[:1], size=1, wanted=1, eval_version=0
        )
    world.finish(held_out[0], reward=1.0)
    rows = rows_of_run(world.database, "run-a", min_reward=0.7, model=START, shape=SHAPE)

    assert [row.sample.episode_id for row in rows] == played[1:3]
    assert rows[0].sample.ids_L.tolist() == [1, 2, 3, 5, 6, 1, 2, 3, 5, 6]
    assert rows[0].weights_L.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert rows[1].where == f"run run-a episode {played[2]} row 0"


def test_what_cannot_be_learned_of_a_run_is_said(world: World) -> None:
    play(world, [1.0, 0.0], first_id=575)

    def take(name: str = "run-a", *, min_reward: float = 1.0) -> None:
        rows_of_run(world.database, name, min_reward=min_reward, model=START, shape=SHAPE)

    with pytest.raises(SetupError, match=r"no training episode with tokens and a reward of 1.5 or more: lower --min"):
        take(min_reward=1.5)
    with pytest.raises(SetupError, match=r"^run run-a: episode \d+ row 0: id 576 is not in the model's vocabulary"):
        take(min_reward=0.0)
    with pytest.raises(SetupError, match="other"):
        take("other")
    take()


def launch(*options: str, database_url: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    return subprocess.run(
        # The launcher takes --run for one of its own, unless two dashes stand before.
        [sys.executable, "-m", *launcher, "-m", "--", "trainer", "sft", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ROLLMILL_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
    )


def test_two_ranks_write_what_one_does(world: World, database_url: str, tmp_path: Path) -> None:
    """Of an adapter, which rank 0 gathers and merges; three rows, so that a rank is idle in a pass."""
    play(world, [1.0, 1.0, 1.0, 0.0])
    options = ["--model", str(START), "--run", "run-a", "--min-reward", "1", "--dtype", "float32", "--lora-rank", "2"]
    options += ["--steps", "3", "--batch-size", "3", "--max-positions", "10", "--learning-rate", "1e-2"]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f'{{"ids": {[1, *range(9, 9 + n)]}, "weights": {[0] + [1] * n}}}\n' for n in (2, 9, 4)))
    done = launch(*options, "--held-out", str(held_out), "--out", str(tmp_path / "out"), database_url=database_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sft: steps=3 rows=3 loss=")
    two = load_file(tmp_path / "out" / "model.safetensors")

    section = {"lora_rank": 2, "learning_rate": 1e-2, "grad_clip": 1.0}
    config = RunConfig.model_validate({"name": "sft", "model": START, "train": section})
    policy = Imitator.load(config)
    rows = rows_of_run(world.database, "run-a", min_reward=1.0, model=START, shape=SHAPE)
    _, loss = train(policy, [rows], steps=[3], batch_size=3, seed=0, held_out=read_rows(held_out, shape=SHAPE))
    said = re.search(r" held_out_loss=(\S+) ", done.stdout)
    assert said is not None
    assert float(said[1]) == pytest.approx(loss, abs=2e-4)
    one, start = policy.finished(config, dtype=torch.float32).state_dict(), load_file(START / "model.safetensors")
    assert two.keys() == start.keys()
    for name, tensor in two.items():
        torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-5)
    moved = "model.layers.0.self_attn.q_proj.weight"
    assert (two[moved] - start[moved].float()).abs().max() > 1e-3
