"""Names on the broker. A message carries an episode's id and attempt, nothing else; losing one loses nothing."""

from __future__ import annotations

from common.episode import Stage

EXCHANGE = "rollmill"
WEIGHTS_EXCHANGE = "rollmill.weights"
"""Fanout: announces that a run has a new policy version. Keepers poll too, so a lost announcement costs a second."""

TASK_OF = {stage: f"rollmill.{stage}" for stage in Stage}
"""Celery task name of each stage; explicit, so that messages outlive module names."""
