"""Do rendering, masking and packing on one core keep ahead of a target, and what do they add to
the tokenizer?

    python -m benchmarks.data_path [--model FOLDER] [--data FILE] [--rounds 5] [--json]

The file's turns are put together to conversations of lengths as in chats (log-normal, a median of
600 tokens); `short_ratio` is the same for the file as it is. Each round streams the packed rows, as a target server does, and tokenizes the same renders
with the bare tokenizer (`tokenizer(text)`, one text a call), in turns and in small pieces, so that a
loaded machine slows both alike. Rates are tokens a second of CPU time in one process, all of it on
one core, and of the best round of each; a ratio is the median of the rounds' own. `encoder_tokens_per_second` is the tokenizer's Rust core
alone, without the Python around it. `packing_efficiency` is used tokens over all tokens of a row for
50,000 such lengths and the default [data] table.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.script import positive
from common.config.shared import TargetTable
from common.target.loading import load_tokenizer
from services.target_server.conversations import Conversations
from services.target_server.data_config import DataTable
from services.target_server.inputs.formats import parse, read_conversation
from services.target_server.packing import Packer, pack
from services.target_server.row_stream import RowStream

TARGET_TOKENS_PER_SECOND = 50_000
PIECE_ROWS = 4


class Meter:
    """CPU seconds and tokens of one kind of work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0

    def add(self, work: Callable[[], int]) -> None:
        """Do some work that returns its tokens."""
        start = time.process_time()
        self.tokens += work()
        self.seconds += time.process_time() - start

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def main() -> None:
    """Print one line of figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=Path("examples/smollm2/train.jsonl"))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.model, options.data, options.rounds)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value}")


def measure(model: str, data: Path, num_rounds: int) -> dict[str, Any]:
    """Return the figures."""
    tokenizer = load_tokenizer(TargetTable(model=model))
    with tempfile.TemporaryDirectory() as folder:
        chats = DataTable(path=as_chats(data, Path(folder) / "chats.jsonl"))
        (stream, bare, encoder), ratio = rates(tokenizer, chats, num_rounds)
    (short, _, _), short_ratio = rates(tokenizer, DataTable(path=data), num_rounds)
    return {
        "tokens_per_second": round(stream),
        "tokenizer_tokens_per_second": round(bare),
        "ratio": round(ratio, 3),
        "encoder_tokens_per_second": round(encoder),
        "ratio_to_a_target": round(stream / TARGET_TOKENS_PER_SECOND, 2),
        "short_tokens_per_second": round(short),
        "short_ratio": round(short_ratio, 3),
        "packing_efficiency": round(packing_efficiency(chats), 4),
    }


def as_chats(data: Path, chats: Path) -> Path:
    """Write the turns of a file as conversations of log-normal lengths, in characters 4 a token."""
    lengths = np.random.default_rng(0).lognormal(np.log(600), 0.8, 100_000)
    messages: list[Any] = []
    with data.open("rb") as lines, chats.open("w", encoding="utf-8") as output:
        for line in lines:
            content = read_conversation(parse(line)).content
            assert isinstance(content, list), "the demo's data are conversations"
            messages += content
            if sum(len(m["content"]) + 20 for m in messages) >= 4 * lengths[0]:
                output.write(json.dumps({"messages": messages}) + "\n")
                messages, lengths = [], lengths[1:]
    return chats


def rates(tokenizer: Tokenizer, table: DataTable, num_rounds: int) -> tuple[list[float], float]:
    """Return tokens a second of stream, tokenizer and its core, and the first over the second."""
    texts = renders(tokenizer, table)
    rounds = [one_round(tokenizer, table, texts) for _ in range(num_rounds)]
    best = [max(meter.rate for meter in kind) for kind in zip(*rounds, strict=True)]
    return best, median(stream.rate / bare.rate for stream, bare, _ in rounds)


def one_round(
    tokenizer: Tokenizer, table: DataTable, texts: list[str]
) -> tuple[Meter, Meter, Meter]:
    """Take the whole file through the stream, the tokenizer and its core, piece by piece."""
    stream, bare, encoder = Meter(), Meter(), Meter()
    rows = RowStream(Conversations(table, tokenizer, {}, seed=0), table).rows()
    pieces = list(np.array_split(np.arange(len(texts)), max(1, len(texts) // 20)))
    is_open = True
    while is_open or pieces:
        before = stream.tokens
        stream.add(lambda: sum(row.used_tokens for row in islice(rows, PIECE_ROWS)))
        is_open = stream.tokens > before
        piece = [texts[i] for i in pieces.pop(0)] if pieces else []
        bare.add(lambda: sum(len(ids) for ids in tokenized(tokenizer, piece)))  # noqa: B023
        encoder.add(lambda: sum(len(ids) for ids in encoded(tokenizer, piece)))  # noqa: B023
    return stream, bare, encoder


def tokenized(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Yield ids by the tokenizer as a program calls it."""
    for text in texts:
        yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encoded(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Yield ids by the tokenizer's core."""
    for text in texts:
        yield tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def renders(tokenizer: Tokenizer, table: DataTable) -> list[str]:
    """Return each conversation's text by the chat template."""
    assert table.path is not None
    with table.path.open("rb") as lines:
        contents = [read_conversation(parse(line)).content for line in lines]
    return [tokenizer.apply_chat_template(messages, tokenize=False) for messages in contents]


def packing_efficiency(table: DataTable) -> float:
    """Return the share of tokens that are used, for lengths as in chats."""
    lengths = np.random.default_rng(0).lognormal(np.log(600), 0.8, 50_000).astype(int)
    samples = [range(n) for n in lengths.tolist() if 8 <= n <= table.row_tokens]
    packer: Packer[range] = Packer(table.row_tokens, table.max_documents, table.packing_window)
    rows = sum(1 for _ in pack(packer, samples))
    return sum(map(len, samples)) / (table.row_tokens * rows)


if __name__ == "__main__":
    main()
