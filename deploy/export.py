"""`rollmill export`: a run as Parquet files, for notebooks and archives. Written aside, then renamed: all or nothing.

Token arrays are lists of int32 and float32 with the very bits that are stored; JSON columns are text.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.db import export
from common.db.export import EPISODES, EVENTS, STEPS, TURNS, Extract
from common.db.runs import Run
from common.db.session import Database
from common.errors import SetupError

ROWS_AT_ONCE = 500
ROW_GROUP_BYTES = 32_000_000
"""What is held in memory before it is written; small row groups are slow to read."""

Report = Callable[[str, int, int], None]
"""Called with table, rows done, rows in all."""

_TIME = pa.timestamp("us", tz="UTC")
_IDS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())
SCHEMAS: Mapping[Extract, pa.Schema] = {
    EPISODES: pa.schema(
        {
            "episode_id": pa.int64(),
            "group_id": pa.int64(),
            "index": pa.int32(),
            "dataset": pa.string(),
            "task": pa.string(),
            "handler": pa.string(),
            "state": pa.string(),
            "attempt": pa.int16(),
            "failures": pa.int16(),
            "outcome": pa.string(),
            "detail": pa.string(),
            "reward": pa.float64(),
            "reward_parts": pa.string(),
            "version_min": pa.int32(),
            "version_max": pa.int32(),
            "num_turns": pa.int32(),
            "num_sampled": pa.int32(),
            "eval_version": pa.int32(),
            "group_state": pa.string(),
            "drop_reason": pa.string(),
            "step_id": pa.int64(),
            "advantage": pa.float64(),
            "first_messages": pa.string(),
            "created_at": _TIME,
            "finished_at": _TIME,
        }
    ),
    TURNS: pa.schema(
        {
            "episode_id": pa.int64(),
            "attempt": pa.int16(),
            "index": pa.int16(),
            "sample": pa.int16(),
            "finish_reason": pa.string(),
            "suffix_ids": _IDS,
            "sampled_ids": _IDS,
            "logprobs": _LOGPROBS,
            "versions": _IDS,
            "messages": pa.string(),
            "compacted": pa.string(),
            "digest": pa.binary(),
            "engine": pa.string(),
            "latency_ms": pa.int32(),
            "created_at": _TIME,
        }
    ),
    EVENTS: pa.schema(
        {
            "id": pa.int64(),
            "episode_id": pa.int64(),
            "at": _TIME,
            "attempt": pa.int16(),
            "from_state": pa.string(),
            "to_state": pa.string(),
            "worker": pa.string(),
            "why": pa.string(),
        }
    ),
    STEPS: pa.schema(
        {
            "step_id": pa.int64(),
            "version_in": pa.int32(),
            "state": pa.string(),
            "metrics": pa.string(),
            "started_at": _TIME,
            "finished_at": _TIME,
        }
    ),
}


def export_run(database: Database, run: Run, folder: Path, *, report: Report) -> dict[str, int]:
    """Write the run's tables into a new folder; rows by table. Raises SetupError where the folder can't be made."""
    if folder.exists():
        raise SetupError(f"{folder} exists: an export makes its own folder, give --out another name")
    if not folder.parent.is_dir():
        raise SetupError(f"there is no folder {folder.parent} to write into: make it, or give --out another place")
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise SetupError(f"cannot write into {folder.parent} ({error.strerror}): give --out another place") from None
    try:
        num_rows = _write_all(database, run, aside, report)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError as error:
        raise SetupError(f"export to {folder} failed: {error.strerror or error}") from None
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(aside)
    return num_rows


def _write_all(database: Database, run: Run, folder: Path, report: Report) -> dict[str, int]:
    about = {"run": run.name, "state": run.state, "config": json.loads(run.config.model_dump_json())}
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    num_rows = {}
    with database.begin() as conn:
        export.hold_still(conn)
        for extract, schema in SCHEMAS.items():
            total = export.count(conn, run.id, extract)
            done = 0
            report(extract.name, done, total)
            with _Writer(folder / f"{extract.name}.parquet", schema) as writer:
                for rows in export.stream(conn, run.id, extract, num_rows=ROWS_AT_ONCE):
                    writer.add(_batch(rows, schema))
                    done += len(rows)
                    report(extract.name, done, total)
            num_rows[extract.name] = done
    return num_rows


class _Writer:
    """A Parquet file in row groups of a good size."""

    def __init__(self, file: Path, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []

    def __enter__(self) -> _Writer:
        self._parquet = pq.ParquetWriter(self._file, self._schema, compression="zstd")
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self._parquet.close()
        with self._file.open("rb") as written:
            os.fsync(written.fileno())

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        if sum(waiting.nbytes for waiting in self._waiting) >= ROW_GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            self._parquet.write_table(pa.Table.from_batches(self._waiting, self._schema))
            self._waiting = []


def _batch(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.record_batch(
        [_array(field, values) for field, values in zip(schema, columns, strict=True)],
        schema=schema,
    )


def _array(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    if field.name == "versions":
        return _lists([_versions(spans) for spans in values])
    if field.type == _IDS:
        return _lists([np.frombuffer(packed, "<i4") for packed in values])
    if field.type == _LOGPROBS:
        return _lists([np.frombuffer(packed, "<f4") for packed in values])
    return pa.array([bytes(value) if isinstance(value, memoryview) else value for value in values], field.type)


def _lists(arrays: Sequence[np.ndarray]) -> pa.ListArray:
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def _versions(spans: Sequence[Mapping[str, int]]) -> np.ndarray:
    """[T] the policy version of each sampled id."""
    numbers = np.array([span["version"] for span in spans], dtype=np.int32)
    return np.repeat(numbers, [span["end"] - span["start"] for span in spans])
