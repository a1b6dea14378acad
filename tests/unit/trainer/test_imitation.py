"""The loss of rows to imitate, by hand and however they are split, and the steps that lower it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import RunConfig
from common.errors import SetupError
from trainer.imitation import Imitator
from trainer.sft_rows import WeightedRow
from trainer.tiny import VOCAB_SIZE
from trainer.update import TrainingError

MakeImitator = Callable[..., Imitator]


@pytest.fixture
def make_imitator(start_folder: Path) -> MakeImitator:
    """An imitator from the start folder; keyword arguments are fields of the [train] section."""

    def make(**train: object) -> Imitator:
        return Imitator.load(RunConfig.model_validate({"name": "test", "model": start_folder, "train": train}))

    return make


def row(ids: Sequence[int], weights: Sequence[float], *, number: int = 1) -> WeightedRow:
    """A row as it would be read from a file."""
    weights_L = np.array(weights, dtype=np.float32)
    return WeightedRow.of_ids(ids, weights_L, number=number, where=f"rows.jsonl:{number}")


def random_rows(*lengths: int) -> list[WeightedRow]:
    rng = np.random.default_rng(0)
    return [
        row(
            rng.integers(0, VOCAB_SIZE, length).tolist(),
            [0, *(rng.integers(0, 4, length - 2) / 2).tolist(), 1.0],
            number=number,
        )
        for number, length in enumerate(lengths, start=1)
    ]


def weights_of(imitator: Imitator) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in imitator.model.parameters()])


def gradients_of(imitator: Imitator) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in imitator.model.parameters() if p.grad is not None])


def test_the_loss_is_the_mean_over_the_weights_of_all_rows(make_imitator: MakeImitator) -> None:
    imitator = make_imitator()
    rows = [row([5, 6, 7, 8], [0, 0, 1, 3], number=1), row([9, 0, 0], [0, 0, 0.5], number=2)]
    with torch.no_grad():
        first, second = (
            imitator.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1) for ids in ([5, 6, 7, 8], [9, 0, 0])
        )
    expected = -(first[1, 7] + 3 * first[2, 8] + 0.5 * second[1, 0]).item() / 4.5

    assert imitator.imitation_loss(rows) == pytest.approx(expected, rel=1e-5)
    assert imitator.imitate(rows, step=1)[0] == pytest.approx(expected, rel=1e-5)


def test_weights_count_against_each_other_and_not_by_their_size(make_imitator: MakeImitator) -> None:
    imitator = make_imitator()
    rows, larger = random_rows(6, 9), random_rows(6, 9)
    larger = [
        row(one.sample.ids_L.tolist(), (one.weights_L * 1e5).tolist(), number=1 + n) for n, one in enumerate(rows)
    ]

    assert imitator.imitation_loss(larger) == pytest.approx(imitator.imitation_loss(rows), rel=1e-5)


@pytest.mark.parametrize(
    "split",
    [
        {"max_positions": 1},
        {"max_positions": 40},
        {"packing": True},
        {"packing": True, "max_positions": 40},
        {"max_logits": VOCAB_SIZE * 3},
        {"packing": True, "max_logits": VOCAB_SIZE * 3, "gradient_checkpointing": True},
    ],
)
def test_a_step_is_the_same_however_its_rows_are_split(make_imitator: MakeImitator, split: dict[str, object]) -> None:
    rows = random_rows(3, 30, 8, 17, 5)
    whole, parts = make_imitator(), make_imitator(**split)

    assert parts.imitate(rows, step=1) == pytest.approx(whole.imitate(rows, step=1), rel=1e-4)
    torch.testing.assert_close(gradients_of(parts), gradients_of(whole), rtol=1e-3, atol=1e-6)


def test_a_row_that_is_drawn_twice_counts_twice(make_imitator: MakeImitator) -> None:
    imitator = make_imitator()
    one, other = random_rows(5, 9)
    with torch.no_grad():
        parts = [(imitator.imitation_loss([row]), float(row.weights_L.sum())) for row in (one, one, other)]
    expected = sum(loss * weight for loss, weight in parts) / sum(weight for _, weight in parts)

    assert imitator.imitation_loss([one, one, other]) == pytest.approx(expected, rel=1e-5)


def test_steps_lower_the_loss_at_the_rate_that_is_asked_for(make_imitator: MakeImitator) -> None:
    rows = random_rows(8, 12)
    full, none = make_imitator(learning_rate=3e-3), make_imitator(learning_rate=3e-3)
    before, start = full.imitation_loss(rows), weights_of(none)
    for step in range(1, 6):
        full.imitate(rows, step=step)
        none.imitate(rows, step=step, rate_share=0.0)

    assert full.imitation_loss(rows) < before - 1
    assert torch.equal(weights_of(none), start)


def test_the_gradient_is_clipped(make_imitator: MakeImitator) -> None:
    imitator = make_imitator(grad_clip=1e-3)
    _, grad_norm = imitator.imitate(random_rows(8), step=1)

    assert grad_norm > 0.1
    assert gradients_of(imitator).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_an_adapter_learns_alone_and_merged_it_says_the_same(make_imitator: MakeImitator, start_folder: Path) -> None:
    rows = random_rows(8, 12)
    imitator = make_imitator(lora_rank=4, learning_rate=1e-2)
    before = imitator.imitation_loss(rows)
    for step in range(1, 6):
        imitator.imitate(rows, step=step)
    taught = imitator.imitation_loss(rows)
    assert taught < before - 0.3
    config = RunConfig.model_validate({"name": "test", "model": start_folder})
    merged = imitator.finished(config, dtype=torch.float32).requires_grad_(True)

    assert not any("lora" in name for name, _ in merged.named_parameters())
    again = Imitator(merged, train=config.train, temperature=1.0, seed=0)
    assert again.imitation_loss(rows) == pytest.approx(taught, rel=1e-4)


def test_a_loss_that_is_not_finite_names_the_row_and_changes_nothing(make_imitator: MakeImitator) -> None:
    imitator = make_imitator()
    with torch.no_grad():
        imitator.model.get_input_embeddings().get_parameter("weight")[7] = torch.nan
        before = weights_of(imitator)
    # The head is tied to the embedding: any row's logits have the broken one among them.
    with pytest.raises(TrainingError, match=r"step 3: the loss is not finite in rows.jsonl:1, rows.jsonl:2$"):
        imitator.imitate([row([5, 7], [0, 1], number=1), row([5, 8], [0, 1], number=2)], step=3)
    assert torch.equal(weights_of(imitator).nan_to_num(), before.nan_to_num())


def test_weights_that_a_dtype_cannot_hold_are_refused(make_imitator: MakeImitator, start_folder: Path) -> None:
    imitator = make_imitator()
    with torch.no_grad():
        imitator.model.get_input_embeddings().get_parameter("weight")[7, 0] = 1e5
    config = RunConfig.model_validate({"name": "test", "model": start_folder})
    with pytest.raises(SetupError, match=r"embed_tokens.weight has weights that torch.float16 cannot hold: take"):
        imitator.finished(config, dtype=torch.float16)


def test_with_muon_every_parameter_has_one_optimizer(make_imitator: MakeImitator) -> None:
    imitator = make_imitator()
    imitator.add_muon()
    assert imitator.muon is not None
    matrices, rest = (one.param_groups[0]["params"] for one in (imitator.muon, imitator.optimizer))

    assert {id(p) for p in matrices}.isdisjoint(id(p) for p in rest)
    assert {id(p) for p in (*matrices, *rest)} == {id(p) for p in imitator.model.parameters()}
    assert any(p is imitator.model.get_input_embeddings().weight for p in rest)
