"""The console script `rollmill`, as `python -m deploy` too. The command line itself is deploy/cli.py."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command line and hand over. Until it is there, which takes a second, Ctrl-C ends us without a word."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
