"""Episodes of every model family on real vLLM: trained ids are those on the wire, log-probs those of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pytest
from tokenizers import Tokenizer

from common.config import RolloutConfig, RunConfig
from common.weights import version_name
from tests.vllm.episodes import SAMPLINGS, Played, RunStage, TappedHttp, compare, play_until_enough
from tests.vllm.relay import Relay, relay
from tests.vllm.serving import RUN
from tests.vllm.warm_models import FAMILIES, Family, make_warm_model
from workers.engine_client import EngineClient
from workers.render.of_run import renderer_of

NUM_EPISODES = 100
"""With enough turns, for each way of sampling."""
MIN_CALL_SHARE = 0.3
"""Of all turns; fewer would show little."""


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    families = {family.name: family for family in FAMILIES}
    chosen = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    folder = tmp_path_factory.mktemp("families")
    names = [name for name in families if name in chosen]
    with relay(names, lambda name: make_warm_model(families[name], folder / name)) as servers:
        yield servers


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_each_family_trains_what_the_engine_was_sent_and_sampled(
    family: Family, servers: Relay, figures: dict[str, object], report: list[str]
) -> None:
    server = servers.take(family.name)
    for temperature, top_p in SAMPLINGS:
        rollout = RolloutConfig(
            temperature=temperature, top_p=top_p, max_turns=3, max_tokens_per_turn=56, on_format_error="tell"
        )
        config = RunConfig(name=RUN, model=server.model, rollout=rollout, render=family.render)
        http = TappedHttp()
        async with EngineClient(timeout_s=120, http=http) as client:
            await client.update_weight_version(server.url, version_name(RUN, 0))
            episodes = await play_until_enough(RunStage(client, server.url, config), num_episodes=NUM_EPISODES)
        found = compare(episodes, http, config)
        found.add_to(figures, family=family.name)
        turns = TurnKinds.of(episodes, config)
        report.append(
            f"{family.name} temperature={temperature} top_p={top_p} episodes={found.num_long} turns={turns.num_all} "
            f"calling={turns.num_calling} respelled={turns.num_respelled} other_ends={turns.num_other_ends} "
            f"tokens={found.num_tokens} id_differences={found.num_id_differences} "
            f"max_dlogprob={found.max_dlogprob:.1e} nucleus_edges={found.num_edges}"
        )
        found.check(num_episodes=NUM_EPISODES)
        assert turns.num_calling >= MIN_CALL_SHARE * turns.num_all
        if temperature == 1:
            # Without such turns, ids that are kept could not be told from ids of the same text, or of whole renders.
            assert turns.num_respelled > 0
            assert turns.num_other_ends > 0


@dataclass(frozen=True, kw_only=True)
class TurnKinds:
    """What kinds of turns were played."""

    num_all: int
    num_calling: int
    """In which the family's parser found calls."""
    num_respelled: int
    """Whose text would be tokenised to other ids than were sampled."""
    num_other_ends: int
    """That stopped at another token than the one that closes a turn."""

    @classmethod
    def of(cls, episodes: list[Played], config: RunConfig) -> Self:
        turns = [turn for played in episodes for turn in played.turns]
        renderer = renderer_of(config)
        tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))
        sampled = [list(turn.sampled.ids) for turn in turns]
        texts = tokenizer.decode_batch(sampled, skip_special_tokens=False)
        again = tokenizer.encode_batch(texts, add_special_tokens=False)
        return cls(
            num_all=len(turns),
            num_calling=sum(bool(turn.messages[0].tool_calls) for turn in turns),
            num_respelled=sum(ids != encoding.ids for ids, encoding in zip(sampled, again, strict=True)),
            num_other_ends=sum(ids[-1] in renderer.stop_ids[1:] for ids in sampled),
        )
