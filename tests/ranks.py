"""One rank of a policy in training, started by torchrun: trains made-up rows and writes what came of it.

python -m torch.distributed.run ... -m tests.ranks START CASES.json OUT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from common.config import RunConfig
from common.episode import ScoredEpisode, TurnTokens
from trainer.lora import adapter_writer
from trainer.policy import Policy, TrainingError
from trainer.publish import version_writer
from trainer.ranks import Ranks
from trainer.samples import Sample, make_samples
from trainer.teacher import LoadedTeacher, with_teacher_logprobs
from trainer.tiny import VOCAB_SIZE

NUM_STEPS = 2
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


def cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def play(policy: Policy, case: dict[str, Any], *, out: Path, start: Path) -> None:
    """Train some steps, one of them from a state put back, and write metrics, state and a version's folder."""
    rows = random_rows(lengths=case["lengths"], seed=1)
    advantages = {row.episode_id: 1.0 if row.episode_id % 2 else -0.5 for row in rows}
    if (distill := policy.train.distill) is not None:
        rows, _ = with_teacher_logprobs(rows, LoadedTeacher(Path(distill.teacher), start=start, policy=policy))
    if "broken" in case:
        advantages[case["broken"]] = float("nan")
    even, metrics = dict.fromkeys(advantages, 0.0), []
    start_state = cloned(policy.state())
    for version in range(NUM_STEPS):
        if version:
            policy.restore(policy.state())
        metrics.append(policy.train_step(rows, advantages, version=version))
    if case.get("even"):
        metrics.append(policy.train_step(rows, even, version=NUM_STEPS))
        trained = cloned(policy.state())
        policy.restore(start_state)
        metrics.append(policy.train_step(rows, even, version=0))
        policy.restore(trained)
    kl = policy.reference_kl(rows) if policy.train.kl != "none" else {}
    out.mkdir(parents=True)
    (out / "metrics.json").write_text(json.dumps({"steps": metrics, "kl": kl}))
    save_file({name: tensor.contiguous() for name, tensor in policy.state().items()}, out / "state.safetensors")
    weights = policy.weights()
    if policy.train.lora_rank is None:
        version_writer(policy.model, start=start, weights=weights)(out)
    else:
        adapter_writer(policy.model, weights=weights)(out)


def main() -> None:
    """Play each case in turn; a case with `dies` ends the last rank in the middle of its first step."""
    start, cases, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    ranks = Ranks.join(timeout_s=TIMEOUT_S)
    for name, case in json.loads(cases.read_text()).items():
        policy = policy_of(case, start=start, ranks=ranks)
        if case.get("dies") and ranks.rank:
            policy.optimizer.register_step_pre_hook(lambda *_: os._exit(9))
        if ranks.rank:
            ranks.follow(policy)
            continue
        try:
            play(policy, case, out=out / name, start=start)
        except TrainingError as error:
            (out / f"{name}.error").write_text(str(error))
        ranks.dismiss()
    ranks.leave()


if __name__ == "__main__":
    main()
