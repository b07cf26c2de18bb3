"""Where a target lives on disk, and a fingerprint of what lies there.

A target is a model folder, one GGUF file, or a hub id whose snapshot is in the local cache.
Nothing here goes to the network.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from common.config.shared import TargetTable
from common.errors import ConfigError

_WHOLE_FILE_BYTES = 1 << 20
_NUM_WINDOWS = 1024
_WINDOW_BYTES = 1024


@dataclass(frozen=True)
class TargetFiles:
    """A target's folder and, where its weights are one GGUF file, that file's name."""

    folder: Path
    gguf_name: str | None

    @property
    def source(self) -> dict[str, Any]:
        """Arguments by which transformers finds these files and stays off the network."""
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": str(self.folder),
            "local_files_only": True,
        }
        return source | ({"gguf_file": self.gguf_name} if self.gguf_name else {})

    @property
    def path(self) -> Path:
        """What the user would point at: the GGUF file or the folder."""
        return self.folder / self.gguf_name if self.gguf_name else self.folder

    def weight_files(self) -> list[Path]:
        """Return the files that hold the weights, sorted; raise `ConfigError` where none do."""
        if self.gguf_name:
            return [self.path]
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [self.folder / name for name in sorted(set(names))]
        else:
            files = [self.folder / "model.safetensors"]
        for file in files:
            if not file.is_file():
                raise ConfigError(
                    f"target.model {str(self.folder)!r}: weights missing, got no {file.name!r}, "
                    f"expected safetensors; fetch the whole model or convert its weights"
                )
        return files

    def fingerprint(self) -> str:
        """Return 16 hex digits that differ for another config or other weights.

        Large files are sampled in windows at even distances, so that a model of any size is
        hashed in about a second; a fine-tune touches every large tensor and so many windows.
        """
        digest = xxhash.xxh3_64()
        if not self.gguf_name:
            digest.update((self.folder / "config.json").read_bytes())
        for file in self.weight_files():
            _update_with_samples(digest, file)
        return digest.hexdigest()


def locate(table: TargetTable) -> TargetFiles:
    """Find the target's files, or raise `ConfigError` that says where they were looked for."""
    path = Path(table.model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"target.model {table.model!r}: got a file, expected a model folder or a .gguf file"
            )
        return TargetFiles(path.absolute().parent, path.name)
    folder = path.absolute() if path.is_dir() else _cached_snapshot(table.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"target.model {table.model!r}: {str(folder)!r} has no config.json; "
            f"point it at the folder that save_pretrained or the hub download wrote"
        )
    return TargetFiles(folder, None)


def _cached_snapshot(model: str) -> Path:
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"target.model {model!r}: no such folder, no such .gguf file, and no snapshot in the "
            f"local hub cache; correct the path, or download the model first (hf download ID)"
        ) from error


def _update_with_samples(digest: "xxhash.xxh3_64", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{size};".encode())
    with file.open("rb") as stream:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(stream.read())
            return
        for window in range(_NUM_WINDOWS):
            stream.seek(window * (size - _WINDOW_BYTES) // (_NUM_WINDOWS - 1))
            digest.update(stream.read(_WINDOW_BYTES))
