"""The fleets: INIT, RUN and EVAL, with the feeder and the reaper beside them.

app: the Celery application and its three tasks · stage: claim, work, save, hand on · init, run, eval: what each stage
does · agent: the turns of an episode · feeder: makes episodes · reaper: brings back what stands still.
"""

from __future__ import annotations
