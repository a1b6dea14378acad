"""The truth in Postgres. Every statement lives here as a named function that takes a connection.

session: connections and schema check · models: the tables · runs, tasks, groups, episodes, turns, engines, versions,
steps: one module per noun · report: what people look at.
"""

from __future__ import annotations
