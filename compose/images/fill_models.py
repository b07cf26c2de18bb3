"""Sees that the target is there before the services start: `MODEL=org/name python3 fill_models.py`.

Without MODEL the demo's target is copied from this image into the volume of models. A hub id is
fetched into the volume of the Hugging Face cache, with the token in the file at HF_TOKEN_PATH where it
has one; libraries read that file themselves, so that the token is in no environment and no log. A path
is left alone. The second time nothing is done.
"""

import os
import shutil
import sys
from pathlib import Path

_DEMO = Path("/ringdraft/demo/SmolLM2-135M-Instruct")
_MODELS = Path("/ringdraft/models")
# What targets are loaded from; other formats of the same weights are left out.
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")


def main(model: str) -> None:
    """Bring the target that `model` names."""
    if not model:
        copy_demo(_DEMO, _MODELS / _DEMO.name)
    elif model.startswith("/"):
        print(f"{model}: a path, nothing to fetch")
    else:
        fetch(model)


def copy_demo(source: Path, folder: Path) -> None:
    """Copy the folder, whole or not at all."""
    if (folder / "config.json").exists():
        print(f"{folder}: there")
        return
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished)
    unfinished.rename(folder)
    print(f"{folder}: copied")


def fetch(model: str) -> None:
    """Fetch a model of the hub into the cache; what is there already is not fetched again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(model, allow_patterns=list(_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        sys.exit(
            f"MODEL={model}: cannot be fetched: {error}; check the name, and for a gated model give a "
            f"file with your token as HF_TOKEN_FILE, readable by uid {os.getuid()}"
        )
    print(f"{model}: in {folder}")


if __name__ == "__main__":
    main(os.environ.get("MODEL", ""))
