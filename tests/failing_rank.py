"""One of two ranks, the second of which fails alone: `python -m tests.failing_rank` in torchrun's environment."""

from __future__ import annotations

import sys

from common.errors import RollmillError, SetupError
from trainer.ranks import AgreedError, AgreedSetupError, Ranks, on_all_ranks

COLLECTIVE_TIMEOUT_S = 600.0
AGREED, GATHERED, LOST = "agreed", "gathered", "lost"


class Calls:
    """What rank 0 calls."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @on_all_ranks
    def agree_to_fail(self) -> None:
        raise AgreedError(f"all of {self.ranks.gather(self.ranks.rank)}")

    @on_all_ranks
    def have_too_long_a_row(self) -> None:
        raise AgreedSetupError("each has too long a row")

    @on_all_ranks
    def gather(self) -> list[int]:
        return self.ranks.gather(self.ranks.rank)

    @on_all_ranks
    def gather_without_one(self) -> None:
        """Rank 0 is in a collective that the other never enters."""
        if self.ranks.rank:
            raise SetupError("only I have too long a row")
        self.ranks.gather(0)


def tell(what: str, value: object) -> None:
    sys.stdout.write(f"{what} {value}\n")


def main() -> None:
    """As rank 0, say what became of each call; the other does what `follow` does."""
    ranks = Ranks.join(timeout_s=COLLECTIVE_TIMEOUT_S)
    calls = Calls(ranks)
    if ranks.rank:
        ranks.follow(calls)
        return
    for fail in (calls.agree_to_fail, calls.have_too_long_a_row):
        try:
            fail()
        except AgreedError as error:
            tell(AGREED, error)
    tell(GATHERED, calls.gather())
    try:
        calls.gather_without_one()
    except RollmillError as error:
        tell(LOST, error)
    ranks.leave()


if __name__ == "__main__":
    main()
