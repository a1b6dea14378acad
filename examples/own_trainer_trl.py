"""TRL's GRPOTrainer on groups of a run: it trains, the fleets play. Needs `pip install trl`, with its datasets.

rollmill up --config run.toml --trainer examples.own_trainer_trl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from common.log import setup_logging
from common.settings import settings
from trainer.batches import GroupSource, TakenStep, open_groups, trl_batch
from trainer.publish import version_writer


class Groups(TrainerCallback):
    """Gives GRPOTrainer the rows of a step, and publishes what it made of the version."""

    def __init__(self, source: GroupSource, states: Path, model: Any, version: int) -> None:
        self.source = source
        self.states = states
        self.version = version
        self.taken: TakenStep | None = None
        self.write = version_writer(model, start=source.run.config.model)

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL calls in place of generating."""
        self.taken = self.source.take(self.version)
        if self.taken is None:
            raise SystemExit("the run is over, or was stopped")
        rows = trl_batch(self.taken.rows)
        return {
            "prompt_ids": rows.prompt_ids,
            "completion_ids": rows.completion_ids,
            "logprobs": rows.logprobs,
            "env_mask": rows.tool_mask,
            "reward": rows.rewards,
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.taken is not None
        # Before the version is published: a trainer that dies in between trains the step again, from the state before.
        kwargs["model"].save_pretrained(self.states / f"{self.version + 1}")
        if not self.source.finish(self.taken, self.write):
            control.should_training_stop = True
        self.version += 1


def rewards(reward: list[float], **kwargs: Any) -> list[float]:
    """TRL's reward function: the evaluation has given them."""
    return reward


def train(source: GroupSource, states: Path) -> int:
    """Train the run to its end; the newest version. A restart goes on with its weights and a new optimizer."""
    config = source.run.config
    group_size = config.rollout.group_size
    batch_size = config.train.groups_per_step * group_size
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype="float32")
    version = source.start(version_writer(model, start=config.model))
    if version > 0:
        model = AutoModelForCausalLM.from_pretrained(states / f"{version}", dtype="float32")
    groups = Groups(source, states, model, version)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(config.model),
        reward_funcs=rewards,
        rollout_func=groups.rollout,
        callbacks=[groups],
        # The prompts come with the groups; TRL wants to count some.
        train_dataset=Dataset.from_list([{"prompt": ""}] * batch_size),
        args=GRPOConfig(
            output_dir=str(states / "trl"),
            per_device_train_batch_size=batch_size,
            num_generations=group_size,
            max_steps=config.train.num_versions - version,
            learning_rate=config.train.learning_rate,
            temperature=config.rollout.temperature,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    source.take(groups.version)
    return groups.version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    arguments = parser.parse_args()
    setup_logging("INFO")
    # GRPOTrainer compares each `num_generations` rows in turn.
    with open_groups(arguments.config, even=True) as source:
        train(source, settings().data_dir / "own" / source.run.name)


if __name__ == "__main__":
    main()
