"""One rank of a policy in training, started by torchrun: trains made-up rows and writes what came of it.

python -m torch.distributed.run ... -m tests.ranks START CASES.json OUT
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import RunConfig
from common.episode import ScoredEpisode, TurnTokens
from common.errors import SetupError
from trainer.checkpoint import CheckpointStore, Owner
from trainer.lora import adapter_writer
from trainer.policy import Policy
from trainer.publish import version_writer
from trainer.ranks import Ranks
from trainer.samples import Sample, make_samples
from trainer.teacher import LoadedTeacher, with_teacher_logprobs
from trainer.tiny import VOCAB_SIZE
from trainer.update import TrainingError

NUM_STEPS = 2
PUT_TOGETHER = NUM_STEPS + 1
"""The checkpoint with the last weights and the optimizer's state after the first step."""
OWNER = Owner(run="one", made_at="2026-01-02T03:04:05.000006", database="postgresql://rl:***@a/one")
SMALL_DISK_BYTES = 50_000
TIMEOUT_S = 100.0


def random_rows(*, lengths: Sequence[int], seed: int) -> list[Sample]:
    """One-turn episodes of so many positions, in groups of two."""
    rng = np.random.default_rng(seed)
    rows = []
    for episode_id, length in enumerate(lengths):
        sampled = length // 2
        turn = TurnTokens(
            suffix_ids=rng.integers(0, VOCAB_SIZE, length - sampled, dtype=np.int32),
            sampled_ids=rng.integers(0, VOCAB_SIZE, sampled, dtype=np.int32),
            logprobs=rng.uniform(-7, -5, sampled).astype(np.float32),
            versions=np.zeros(sampled, np.int32),
        )
        rows += make_samples(
            ScoredEpisode(
                episode_id=episode_id, group_id=episode_id // 2, outcome="finished", reward=1.0, turns=(turn,)
            )
        )
    return rows


def policy_of(case: dict[str, Any], *, start: Path, ranks: Ranks | None = None) -> Policy:
    """The start weights with the case's section `train`."""
    config = RunConfig.model_validate({"name": "test", "model": start, "train": case["train"]})
    return Policy.load(config, ranks=ranks)


def play(policy: Policy, case: dict[str, Any], *, out: Path, start: Path, restarts: bool = True) -> None:
    """Train some steps, each from a checkpoint if it `restarts`; write metrics, checkpoints and a version's folder."""
    rows = random_rows(lengths=case["lengths"], seed=1)
    advantages = {row.episode_id: 1.0 if row.episode_id % 2 else -0.5 for row in rows}
    if (distill := policy.train.distill) is not None:
        rows, _ = with_teacher_logprobs(rows, LoadedTeacher(Path(distill.teacher), start=start, policy=policy))
    if "broken" in case:
        advantages[case["broken"]] = float("nan")
    checkpoints, metrics = CheckpointStore(out.parent / "checkpoints", out.name, owner=OWNER), []
    if "checkpoint" in case:
        policy.restore(CheckpointStore(Path(case["checkpoint"]), "one").load(1))
    checkpoints.save(0, policy.write_state)
    for version in range(NUM_STEPS):
        if restarts:
            policy.restore(checkpoints.load(version))
        metrics.append(policy.train_step(rows, advantages, version=version))
        checkpoints.save(version + 1, policy.write_state)
    if case.get("even"):
        even = dict.fromkeys(advantages, 0.0)
        metrics.append(policy.train_step(rows, even, version=NUM_STEPS))
        checkpoints.save(NUM_STEPS, policy.write_state)
        policy.restore(checkpoints.load(0))
        metrics.append(policy.train_step(rows, even, version=0))
        policy.restore(checkpoints.load(NUM_STEPS))
    kl = policy.reference_kl(rows) if policy.train.kl != "none" else {}
    out.mkdir()
    (out / "metrics.json").write_text(json.dumps({"steps": metrics, "kl": kl}))
    weights = policy.weights()
    if policy.train.lora_rank is None:
        version_writer(policy.model, start=start, weights=weights)(out)
    else:
        adapter_writer(policy.model, weights=weights)(out)
    policy.restore(checkpoints.load(1), weights=policy.published_state(out))
    checkpoints.save(PUT_TOGETHER, policy.write_state)


def main() -> None:
    """Play each case in turn.

    A case with `dies` ends the last rank in the middle of its first step; with `full` it can write small files only.
    """
    start, cases, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    ranks = Ranks.join(timeout_s=TIMEOUT_S)
    for name, case in json.loads(cases.read_text()).items():
        policy = policy_of(case, start=start, ranks=ranks)
        if case.get("dies") and ranks.rank:
            policy.optimizer.register_step_pre_hook(lambda *_: os._exit(9))
        if ranks.rank:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if case.get("full"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK_BYTES, limits[1]))
            ranks.follow(policy)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            continue
        try:
            play(policy, case, out=out / name, start=start)
        except (TrainingError, SetupError) as error:
            (out / f"{name}.error").write_text(str(error))
        ranks.dismiss()
    ranks.leave()


if __name__ == "__main__":
    main()
