"""Whether another run uses an engine, for `rollmill engine add`: it serves one run, and a second stops the first."""

from __future__ import annotations

from common.errors import SetupError
from common.weights import LOADING, parse_version_name
from deploy.engine_ask import ask, asked


def check_unclaimed(url: str, *, run: str, holder: str | None) -> None:
    """Raise SetupError that says what the engine serves if it is not the run's own, nor a start name.

    `holder` is the run that this database gave the engine to, unless that is over. Engines do not say which database
    a version is of, so another run of the same name is taken for this one.
    """
    advice = f"remove it there first (`rollmill engine remove {url}`), or take it with --force"
    if holder not in (None, run):
        raise SetupError(f"engine {url} serves run {holder} of this database, which is not over: {advice}")
    name = _weights(url)
    if name == LOADING and holder is None:
        raise SetupError(f"engine {url} is loading weights for some run: {advice}")
    for what, version in (("serves", name), *(("holds adapter", model) for model in _models(url))):
        parsed = parse_version_name(version)
        if parsed is not None and parsed[0] != run:
            raise SetupError(
                f"engine {url} {what} {version}, of another run than {run}: {advice}, which is right once that run "
                "uses it no more"
            )


def _weights(url: str) -> str:
    """The name of its weights; empty for what has none, of which other checks say that it is no engine."""
    for path in ("/weight_info", "/model_info"):
        status, reply = ask(url, path)
        if status == 200 and (name := asked(reply, "weight_version")) is not None:
            return str(name)
    return ""


def _models(url: str) -> list[str]:
    """All names that requests may give, the adapters' among them."""
    status, reply = ask(url, "/v1/models")
    cards = asked(reply, "data") if status == 200 else None
    return [str(asked(card, "id")) for card in cards] if isinstance(cards, list) else []
