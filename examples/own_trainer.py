"""A whole trainer of one's own, in plain torch: PPO's clip on verl-style batches.

rollmill up --config run.toml --trainer examples.own_trainer
"""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.log import setup_logging
from common.settings import settings
from trainer.batches import GroupSource, VerlBatch, open_groups, verl_batch
from trainer.publish import version_writer

PAD_ID = 0
CLIP = 0.2
LEARNING_RATE = 1e-3

logger = logging.getLogger(__name__)


def loss_of(model: Any, batch: VerlBatch) -> torch.Tensor:
    """Mean over the sampled tokens of the clipped, advantage-weighted ratio to the policy that sampled them."""
    num_response = batch.responses.shape[1]
    logits = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    ).logits[:, -num_response - 1 : -1]
    logprobs = logits.float().log_softmax(-1).gather(-1, batch.responses[..., None])[..., 0]
    mask = batch.response_mask.bool()
    ratio = torch.where(mask, logprobs - batch.rollout_log_probs, 0).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gains = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return -torch.where(mask, gains, 0).sum() / mask.sum().clamp(min=1)


def train(source: GroupSource, states: Path) -> int:
    """Train the run to its end, or until the source stops; the newest version.

    `states` keeps what made each version: it is written before the version is, so that a trainer that dies at any point
    finds the state of the version that it goes on from.
    """
    model = AutoModelForCausalLM.from_pretrained(source.run.config.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    write = version_writer(model, start=source.run.config.model)
    states.mkdir(parents=True, exist_ok=True)
    version = source.start(write)
    if version > 0:
        state = torch.load(states / f"{version}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    while (taken := source.take(version)) is not None:
        loss = loss_of(model, verl_batch(taken.rows, pad_id=PAD_ID))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        draft = states / "draft.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
        draft.rename(states / f"{version + 1}.pt")
        if not source.finish(taken, write, metrics={"loss": loss.item()}):
            break
        (states / f"{version}.pt").unlink(missing_ok=True)
        version += 1
        logger.info("version=%d reward=%.3f loss=%.4f", version, taken.metrics["reward_mean"], loss.item())
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    arguments = parser.parse_args()
    setup_logging("INFO")
    with open_groups(arguments.config) as source:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: source.stop.set())
        train(source, settings().data_dir / "own" / source.run.name)


if __name__ == "__main__":
    main()
