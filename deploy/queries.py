"""`rollmill queries`: every worked query with a run's own answers, on the terminal or as the page docs/queries.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from common.db.examples import EXAMPLES, MORE_EXAMPLES, Answer, Example, run_example
from common.db.runs import Run
from common.db.session import Database
from common.errors import SetupError
from deploy.tables import answer_table, short_cell

MAX_ROWS = 12

Answers = Sequence[tuple[Example, Answer]]

HEAD = """\
# Queries

What people ask of a run, with the answers of `{run}`,
a run of the demo in which a worker was killed on purpose. Put your run's name into a query and give it to
`rollmill sql` or `rollmill psql`; `rollmill queries RUN` asks them all. Where a query picks an episode or a group, put
an id in place of the sub-select. Answers are shortened here: a long list ends in its length.

Written by `rollmill queries {run} --markdown docs/queries.md`.
The queries live in `common/db/examples.py`.
"""


def ask_all(database: Database, run: Run) -> Answers:
    """All worked queries with their answers."""
    with database.begin() as conn:
        return [(example, run_example(conn, example, run.name)) for example in (*EXAMPLES, *MORE_EXAMPLES)]


def print_all(answers: Answers, run: Run, *, console: Console) -> None:
    """Show them on the terminal."""
    for example, answer in answers:
        console.print(f"\n[bold]{example.title}[/]")
        console.print(Text(example.for_run(run.name), "cyan"), soft_wrap=True)
        console.print(answer_table(answer, max_rows=MAX_ROWS))


def write_markdown(answers: Answers, run: Run, file: Path) -> None:
    """Write them as a page."""
    sections = (
        f"\n## {example.title}\n\n```sql\n{example.for_run(run.name)}\n```\n\n" + "".join(_table(answer))
        for example, answer in answers
    )
    try:
        file.write_text(HEAD.format(run=run.name) + "".join(sections))
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from None


def _table(answer: Answer) -> Iterator[str]:
    if not answer.rows:
        yield "No rows.\n"
        return
    yield _line(answer.columns)
    yield _line(["---"] * len(answer.columns))
    for row in answer.rows[:MAX_ROWS]:
        yield _line([short_cell(value).replace("|", "\\|") for value in row])
    if (more := len(answer.rows) - MAX_ROWS) > 0:
        yield f"\n… {more} more.\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"
