"""What a chaos session shows while it runs: a live panel on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from benchmarks.killer import Killer
from common.db.snapshot import Snapshot
from common.episode import FINAL_STATES

PLAIN_EVERY_S = 10.0


class Display:
    """A live panel on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, *, episodes: int, seconds: float) -> None:
        self._console = console
        self._episodes = episodes
        self._seconds = seconds
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown_s = 0.0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, what: str) -> None:
        """A line about what we wait for."""
        self._console.print(what, highlight=False)

    def show(self, now_s: float, snapshot: Snapshot | None, killer: Killer) -> None:
        every_s = 0.25 if self._live else PLAIN_EVERY_S
        if now_s - self._shown_s < every_s or snapshot is None:
            return
        self._shown_s = now_s
        if self._live:
            self._live.update(self._panel(now_s, snapshot, killer), refresh=True)
        else:
            final = sum(snapshot.episodes[state] for state in FINAL_STATES)
            self._console.print(
                f"{now_s:4.0f} s  kills {killer.kills.total()}  final {final}/{self._episodes}  "
                f"version {snapshot.version_newest}",
                highlight=False,
            )

    def _panel(self, now_s: float, snapshot: Snapshot, killer: Killer) -> Group:
        table = Table(box=None, show_header=False)
        table.add_row("kills", "  ".join(f"{kind} {num}" for kind, num in sorted(killer.kills.items())))
        table.add_row("episodes", "  ".join(f"{state} {num}" for state, num in snapshot.episodes.items() if num))
        table.add_row("groups", "  ".join(f"{state} {num}" for state, num in snapshot.groups.items() if num))
        table.add_row("version", f"{snapshot.version_newest}, live {snapshot.version_live}")
        final = sum(snapshot.episodes[state] for state in FINAL_STATES)
        bars = [
            ProgressBar(total=self._seconds, completed=now_s, width=60),
            ProgressBar(total=self._episodes, completed=final, width=60),
        ]
        return Group(f"{now_s:.0f} of {self._seconds:.0f} s, {final} of {self._episodes}", *bars, table)
