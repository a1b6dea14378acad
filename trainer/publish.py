"""Publishes a policy version: its folder for the engines, then the announcement for the weight keepers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from kombu.connection import Connection
from kombu.entity import Exchange
from kombu.exceptions import OperationalError
from transformers import PreTrainedModel

from common.queues import WEIGHTS_EXCHANGE
from common.settings import masked
from common.weights import MANIFEST

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index"})
"""Files of the start folder that hold its own weights, not what any version of it needs."""
TIMEOUT_S = 2.0
TRANSPORT_OPTIONS = dict.fromkeys(
    ("read_timeout", "write_timeout", "socket_timeout", "socket_connect_timeout"), TIMEOUT_S
)
"""The first two bound an AMQP broker that hangs, the others a Redis one."""
RETRY_POLICY = {"max_retries": 2, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}


def version_writer(
    model: PreTrainedModel, *, start: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> Callable[[Path], None]:
    """A function that writes the model into a folder, with the tokenizer files of the start folder.

    `weights` are the model's where it has only a rank's part of them.

    The weights are the trainer's float32, unrounded: then behaviour log-probs are those of the very weights that are
    trained, to about 1e-5 nats. Rounded to float16, those of the tiny model are off by up to 0.02 nats.
    """

    def write(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        for file in start.iterdir():
            is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            if file.is_file() and not is_weights and file.name != MANIFEST and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        for file in folder.iterdir():
            # safetensors lets nobody else read, and engines may be other users.
            file.chmod(0o644)

    return write


def announce(broker_url: str, *, run_id: int, version: int) -> None:
    """Tell the weight keepers that a version is there. Failure is a warning: they poll as well."""
    exchange = Exchange(WEIGHTS_EXCHANGE, type="fanout")
    try:
        with Connection(broker_url, connect_timeout=TIMEOUT_S, transport_options=TRANSPORT_OPTIONS) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=TIMEOUT_S)
            connection.Producer(serializer="json").publish(
                {"run": run_id, "version": version},
                exchange=exchange,
                declare=[exchange],
                retry=True,
                retry_policy=RETRY_POLICY,
            )
    except (OperationalError, OSError) as error:
        logger.warning(
            "version not announced, keepers will find it by polling: run=%d version=%d broker=%s: %s",
            run_id,
            version,
            masked(broker_url),
            error,
        )
