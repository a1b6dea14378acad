"""`python -m trainer merge`: a LoRA adapter's folder and its start weights become a whole model's folder, for whoever
has no use for the two apart, such as `rollmill eval`."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from common.errors import SetupError
from common.weights import ADAPTER_WEIGHTS, MANIFEST, WeightsDamaged, read_safetensors_header, verify
from trainer.modelling import load_model
from trainer.publish import version_writer

_PREFIX = "base_model.model."


def merge(adapter: Path, *, base: Path, out: Path) -> None:
    """Write the model of `base` with the adapter added to its weights, in float32, into the folder `out`.

    It is there whole or not at all. Raises SetupError that names the layer for an adapter of another model.
    """
    # Half a second and 100 MB that the rest of the trainer need not spend.
    from peft import PeftModel

    model = load_model(base)
    try:
        if (adapter / MANIFEST).exists():
            verify(adapter, hashlib.sha256((adapter / MANIFEST).read_bytes()).hexdigest())
        check_layers(adapter, model, base=base)
        with warnings.catch_warnings():
            # PEFT still asks transformers under a name that is to go.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
        merged = adapted.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError, WeightsDamaged) as error:
        raise SetupError(f"adapter {adapter} cannot be merged into model {base}: {error}") from error
    _write(merged, base=base, out=out)


def check_layers(adapter: Path, model: PreTrainedModel, *, base: Path) -> None:
    """Raise SetupError for the first matrix of the adapter that fits no layer of the model. Raises WeightsDamaged."""
    sizes = {name: module.weight.shape for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, tensor in sorted(read_safetensors_header(adapter / ADAPTER_WEIGHTS).items()):
        layer, found, kind = name.removeprefix(_PREFIX).partition(".lora_")
        if not found or kind not in ("A.weight", "B.weight"):
            continue
        if layer not in sizes:
            raise SetupError(f"adapter {adapter} is of another model than {base}, which has no linear layer {layer}")
        rows, columns = sizes[layer]
        there, wanted = (tensor.shape[1], columns) if kind == "A.weight" else (tensor.shape[0], rows)
        if there != wanted:
            raise SetupError(
                f"adapter {adapter} is of another model than {base}: {layer} has "
                f"{'inputs' if kind[0] == 'A' else 'outputs'} of {wanted}, the adapter's of {there}"
            )


def _write(model: PreTrainedModel, *, base: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=out.parent))
    try:
        version_writer(model, start=base)(draft)
        # Engines may run as another user.
        draft.chmod(0o755)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def main(argv: Sequence[str]) -> int:
    """Merge, as a command. Exit code 2 = something outside has to be mended."""
    parser = argparse.ArgumentParser(prog="python -m trainer merge", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the start weights")
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    given = parser.parse_args(argv)
    try:
        merge(given.adapter, base=given.model, out=given.out)
    except SetupError as error:
        sys.stderr.write(f"trainer: {error}\n")
        return 2
    return 0
