"""Files of conversations for tests, in every form that a source may have."""

import gzip
import json
from pathlib import Path

from services.target_server.conversations import Conversations
from services.target_server.data_config import DataTable
from tests.targets import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


def turns(question="the dog?", answer="the quick fox"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path: Path, rows) -> Path:
    """Write rows, objects or raw lines, as the file's name says: .jsonl, .gz, .zst, .parquet, a folder."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    encoded = [line.encode() if isinstance(line, str) else line for line in lines]
    content = b"".join(line + b"\n" for line in encoded)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content, mtime=0))
    elif path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.compress(content))
    elif path.suffix in (".parquet", ""):
        import datasets

        dataset = datasets.Dataset.from_list(list(rows))
        if path.suffix:
            dataset.to_parquet(str(path))
        else:
            dataset.save_to_disk(str(path))
    else:
        path.write_bytes(content)
    return path


def conversations(path: Path, seed=0, kwargs=None, index_folder=None, **settings) -> Conversations:
    settings = {"path": path} | settings if path is not None else settings
    table = DataTable(**({"row_tokens": 128} | settings))
    return Conversations(table, TOKENIZER, kwargs or {}, seed, index_folder)
