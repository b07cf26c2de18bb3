"""Held-out rows as a file of the run: what the target wrote to prompts that nobody trains on.

    runs/<name>/held_out.safetensors     rows with hidden states, one leading dimension N of rows
                                         metadata: fingerprint of rows and prompts, names of the tags

The first target server writes it once, whole, before its ring opens; every worker reads it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.contracts.rows import RowSchema
from common.errors import ConfigError

FILE_NAME = "held_out.safetensors"


@dataclass(frozen=True)
class HeldOutRows:
    """Packed rows of prompts and greedy answers; the loss mask is 1 on the answers."""

    token_ids: Tensor  # [N, T] int32
    document_ids: Tensor  # [N, T] int32, -1 on padding
    position_ids: Tensor  # [N, T] int32
    loss_mask: Tensor  # [N, T] uint8
    aux_hidden_states: Tensor  # [N, T, L*H] bfloat16, zeros on padding
    document_tags: Tensor  # [N, D] int32, the tag of each document; -1 where there is none
    tags: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


_TENSORS = [name for name in HeldOutRows.__dataclass_fields__ if name != "tags"]


def write_held_out(path: Path, rows: HeldOutRows, fingerprint: str) -> None:
    """Write the file under a temporary name and rename it; raise `ConfigError` and leave nothing."""
    temporary = path.with_suffix(".unfinished")
    try:
        save_file(
            {name: getattr(rows, name).contiguous().cpu() for name in _TENSORS},
            temporary,
            metadata={"fingerprint": fingerprint, "tags": json.dumps(rows.tags)},
        )
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{path}: {rows.aux_hidden_states.nbytes >> 20} MiB of held-out rows cannot be written: "
            f"{error}; free space, or lower held_out.max_prompts"
        ) from error


def fingerprint_of(path: Path) -> str | None:
    """Return what the file was made of; None where there is none that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("fingerprint")
    except (OSError, SafetensorError):
        return None


def read_held_out(path: Path, schema: RowSchema) -> HeldOutRows:
    """Read the rows; raise `ConfigError` where they are not rows of this schema."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: held-out rows cannot be read: {error}; delete the file, and the target server "
            f"writes it again at its next start"
        ) from error
    expected = (schema.row_tokens, len(schema.target_layer_ids) * schema.hidden_size)
    got = tuple(tensors["aux_hidden_states"].shape[1:])
    made_for = metadata.get("fingerprint", "").split(":")[0]
    if got != expected or made_for != str(schema.fingerprint):
        raise ConfigError(
            f"{path}: held-out rows got shape {list(got)} for schema {made_for}, expected "
            f"{list(expected)} for {schema.fingerprint}; delete the file and start the target server again"
        )
    return HeldOutRows(**tensors, tags=tuple(json.loads(metadata["tags"])))
