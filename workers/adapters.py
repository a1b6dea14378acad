"""LoRA versions on an engine: beside one another, loaded while requests run, named by them, unloaded when out of use.

For the weight keeper. Nothing is paused: a request keeps the adapter that it named to its end, and a new one names the
newest. A name is a version's and never used for anything else, so whoever names it gets it or is refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from common.db.versions import PolicyVersion
from common.weights import is_start_name, parse_version_name, version_name
from workers.engine_client import EngineClient
from workers.engine_errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an engine holds of a run."""

    numbers: frozenset[int]
    """Versions whose adapters requests can name."""
    foreign: bool
    """The target's name is taken by another folder: of a database that is gone, or a data folder that was moved."""

    @property
    def newest(self) -> int | None:
        return max(self.numbers, default=None)


async def held(client: EngineClient, url: str, target: PolicyVersion, *, folder: Path, base: str) -> Held:
    """The engine's adapters of the target's run; `folder` is where the target belongs, `base` the name of the weights
    under them.

    Raises EngineError where those are not what the engine was started with: every token would be of a wrong policy.
    """
    if not is_start_name(base):
        raise EngineError(f"engine {url} has weights {base}, and adapters belong on start weights: start it again")
    folders = await client.adapters(url)
    name = version_name(target.run, target.number)
    foreign = name in folders and folders[name] != str(folder)
    parsed = (parse_version_name(other) for other in folders if not (foreign and other == name))
    numbers = frozenset(of[1] for of in parsed if of is not None and of[0] == target.run)
    return Held(numbers=numbers, foreign=foreign)


async def load(client: EngineClient, url: str, target: PolicyVersion, *, folder: Path, foreign: bool) -> None:
    """Make the engine take requests for the target. Raises EngineError; its other adapters serve on."""
    name = version_name(target.run, target.number)
    if foreign:
        await client.unload_adapter(url, name)
    await client.load_adapter(url, folder, name)
    logger.info("adapter loaded engine=%s version=%s", url, name)


async def unload_old(client: EngineClient, url: str, target: PolicyVersion, *, numbers: frozenset[int]) -> None:
    """Unload what is out of the run's window, but for what a request still uses. What fails is left to the next time.

    Whatever stays is bounded by the engine: it holds as many adapters as it was started for, and no more.
    """
    assert target.adapters_kept is not None
    doomed = sorted(number for number in numbers if number <= target.number - target.adapters_kept)
    if not doomed:
        return
    try:
        in_use = await client.adapters_in_use(url)
        for number in doomed:
            name = version_name(target.run, number)
            if name not in in_use:
                await client.unload_adapter(url, name)
                logger.info("adapter unloaded engine=%s version=%s", url, name)
    except EngineError as error:
        logger.warning("old adapters stay engine=%s: %s", url, error)
