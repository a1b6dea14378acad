"""Episodes of every model family on real vLLM: trained ids are those on the wire, log-probs those of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from common.config import RolloutConfig, RunConfig
from common.weights import version_name
from tests.vllm.episodes import SAMPLINGS, Played, RunStage, TappedClient, compare, play_until_enough
from tests.vllm.relay import Relay, relay
from tests.vllm.serving import RUN
from tests.vllm.warm_models import FAMILIES, Family, make_warm_model
from workers.render import Renderer
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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_each_family_trains_what_the_engine_was_sent_and_sampled(
    family: Family, servers: Relay, figures: dict[str, object], report: list[str]
) -> None:
    server = servers.take(family.name)
    tokenizer = Tokenizer.from_file(str(server.model / "tokenizer.json"))
    for temperature, top_p in SAMPLINGS:
        rollout = RolloutConfig(
            temperature=temperature, top_p=top_p, max_turns=3, max_tokens_per_turn=48, on_format_error="tell"
        )
        config = RunConfig(name=RUN, model=server.model, rollout=rollout, render=family.render)
        async with TappedClient(timeout_s=60) as client:
            await client.update_weight_version(server.url, version_name(RUN, 0))
            episodes = await play_until_enough(RunStage(client, server.url, config), num_episodes=NUM_EPISODES)
        found = compare(episodes, client, config)
        found.add_to(figures, family=family.name)
        num_turns = sum(len(played.turns) for played in episodes)
        call_share, drift_share = num_calling(episodes) / num_turns, num_drifting(episodes, tokenizer) / num_turns
        report.append(
            f"{family.name} temperature={temperature} top_p={top_p} episodes={found.num_long} turns={num_turns} "
            f"tokens={found.num_tokens} call_turns={call_share:.0%} respelled_turns={drift_share:.0%} "
            f"id_differences={found.num_id_differences} max_dlogprob={found.max_dlogprob:.1e}"
        )
        found.check(num_episodes=NUM_EPISODES)
        assert call_share >= MIN_CALL_SHARE
        assert num_other_ends(episodes, renderer_of(config)) > 0
        # Else the test could not tell ids that were kept from ids of the same text.
        assert drift_share > 0 or temperature < 1


def num_calling(episodes: list[Played]) -> int:
    """Turns in which the family's parser found calls."""
    return sum(bool(turn.messages[0].tool_calls) for played in episodes for turn in played.turns)


def num_other_ends(episodes: list[Played], renderer: Renderer) -> int:
    """Turns that stopped at another token than the one that closes a turn."""
    ends = [turn.sampled.ids[-1] for played in episodes for turn in played.turns]
    return sum(end in renderer.stop_ids and end != renderer.close_id for end in ends)


def num_drifting(episodes: list[Played], tokenizer: Tokenizer) -> int:
    """Turns whose text would be tokenised to other ids than were sampled."""
    sampled = [list(turn.sampled.ids) for played in episodes for turn in played.turns]
    texts = tokenizer.decode_batch(sampled, skip_special_tokens=False)
    again = tokenizer.encode_batch(texts, add_special_tokens=False)
    return sum(ids != encoding.ids for ids, encoding in zip(sampled, again, strict=True))
