"""A published version holds the trainer's very weights and all that an engine needs, whole or not at all."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import pytest
import torch
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from safetensors.torch import load_file
from transformers import PreTrainedModel

from common.queues import WEIGHTS_EXCHANGE
from common.weights import WeightStore, verify
from trainer.publish import announce, version_writer


def test_version_holds_the_float32_weights_bit_for_bit(
    model: PreTrainedModel, start_folder: Path, tmp_path: Path
) -> None:
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight").add_(1e-5)
    published = WeightStore(tmp_path).publish("first", 7, version_writer(model, start=start_folder))
    verify(published.path, published.manifest_sha256)
    tensors = load_file(published.path / "model.safetensors")
    assert tensors.keys() == load_file(start_folder / "model.safetensors").keys()
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in tensors.items())
    assert json.loads((published.path / "config.json").read_text())["dtype"] == "float32"


def test_version_takes_the_tokenizer_from_the_start_folder(
    model: PreTrainedModel, start_folder: Path, tmp_path: Path
) -> None:
    published = WeightStore(tmp_path).publish("first", 7, version_writer(model, start=start_folder))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (published.path / name).read_bytes() == (start_folder / name).read_bytes()


def test_whoever_runs_the_engine_may_read_a_version(model: PreTrainedModel, start_folder: Path, tmp_path: Path) -> None:
    published = WeightStore(tmp_path).publish("first", 7, version_writer(model, start=start_folder))
    assert {file.name: oct(file.stat().st_mode & 0o044) for file in published.path.iterdir()} == dict.fromkeys(
        (file.name for file in published.path.iterdir()), "0o44"
    )


def test_failure_while_writing_leaves_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with pytest.raises(FileNotFoundError):
        store.publish("first", 7, version_writer(model, start=tmp_path / "gone"))
    assert list((tmp_path / "first").iterdir()) == []


def test_announcement_reaches_every_keeper() -> None:
    url = "memory://announcement"
    exchange = Exchange(WEIGHTS_EXCHANGE, type="fanout")
    received: list[tuple[str, object]] = []
    with Connection(url) as connection:
        queues = [Queue(name, exchange=exchange) for name in ("keeper-1", "keeper-2")]
        consumers = [
            connection.Consumer(
                [queue],
                callbacks=[lambda body, message: received.append((message.delivery_info["exchange"], body))],
                no_ack=True,
            )
            for queue in queues
        ]
        for consumer in consumers:
            consumer.consume()
        announce(url, run_id=5, version=7)
        for _ in queues:
            connection.drain_events(timeout=5)
    assert received == [(WEIGHTS_EXCHANGE, {"run": 5, "version": 7})] * 2


def test_broker_that_is_down_is_a_warning_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with caplog.at_level(logging.WARNING):
            announce(f"amqp://guest:secret@127.0.0.1:{port}//", run_id=5, version=7)
    (record,) = [record for record in caplog.records if record.name == "trainer.publish"]
    assert "run=5 version=7" in record.getMessage()
    assert "secret" not in record.getMessage()
