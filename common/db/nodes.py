"""Nodes: RUN says that it lives there, the reaper asks which are silent while episodes wait for them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

WAITS_FOR_NODE = """
    claim_token IS NULL AND state = 'READY' AND node IS NOT NULL AND run_id IN (SELECT run_id FROM engine)"""
"""Episodes that only their node's RUN fleet can take, and would."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """How a node stands."""

    name: str
    num_waiting: int
    """Episodes that wait for its RUN fleet."""
    silent_s: float | None
    """Since a RUN process of it last said that it lives; None = none ever did."""


def beat(conn: Connection, node: str, *, every_s: float) -> None:
    """RUN lives on the node. Many processes of it may say so: one row a node is written about once in `every_s`."""
    conn.execute(
        text(
            """
            INSERT INTO node (name, seen_at) VALUES (:node, now())
            ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at
             WHERE node.seen_at < excluded.seen_at - :every_s * 0.5 * interval '1 second'
            """
        ),
        {"node": node, "every_s": every_s},
    )


def silent(conn: Connection, *, silent_s: float) -> dict[str, int]:
    """Nodes for which episodes wait and on which RUN did not live within `silent_s`, with the number that waits.

    None while RUN lives nowhere: there is no other node to go to.
    """
    rows = conn.execute(
        text(
            f"""
            SELECT node, count(*) AS num FROM episode
             WHERE {WAITS_FOR_NODE}
               AND node NOT IN (SELECT name FROM node WHERE seen_at > now() - :silent_s * interval '1 second')
               AND EXISTS (SELECT FROM node WHERE seen_at > now() - :silent_s * interval '1 second')
             GROUP BY node
            """
        ),
        {"silent_s": silent_s},
    )
    return {row.node: row.num for row in rows}


def states(conn: Connection, *, within_s: float) -> list[NodeState]:
    """Nodes on which RUN lived within `within_s`, and all for which episodes wait; in the order of their names."""
    rows = conn.execute(
        text(
            """
            WITH waiting AS (
                SELECT node AS name, count(*) AS num FROM episode
                 WHERE claim_token IS NULL AND state = 'READY' AND node IS NOT NULL GROUP BY node
            )
            SELECT name, coalesce(w.num, 0) AS num,
                   CAST(extract(epoch FROM now() - n.seen_at) AS float8) AS silent_s
              FROM node n FULL JOIN waiting w USING (name)
             WHERE w.num > 0 OR n.seen_at > now() - :within_s * interval '1 second'
             ORDER BY name
            """
        ),
        {"within_s": within_s},
    )
    return [NodeState(name=row.name, num_waiting=row.num, silent_s=row.silent_s) for row in rows]
