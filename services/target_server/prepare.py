"""`python -m services.target_server.prepare`: a dry pass over the data, before anything trains.

Renders and packs one data epoch as a run would, without the target's weights. People read the
tables on stderr; stdout gets one JSON line with every figure.
"""

import json
import logging
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import RingTable, RunTable, TargetTable
from common.lifecycle import run_service
from common.telemetry import logs
from services.target_server.counts import SampleCounts
from services.target_server.data_config import DataTable
from services.target_server.estimate import row_bytes
from services.target_server.generation_config import GenerationTable
from services.target_server.packing import PackedRow
from services.target_server.progress import Progress

_PERCENTS = (1, 5, 25, 50, 75, 95, 99)
_log = logging.getLogger(__name__)


class PrepareConfig(Table):
    """What `python -m services.target_server.prepare` reads."""

    run: RunTable = RunTable()
    target: TargetTable
    data: DataTable
    generation: GenerationTable = GenerationTable()
    ring: RingTable = RingTable()


@dataclass
class Tally:
    """What the rows of one data epoch add up to."""

    num_rows: int = 0
    used_tokens: int = 0
    supervised_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each document."""
    supervised: list[int] = field(default_factory=list)
    """Supervised tokens of each document."""

    def add(self, row: PackedRow) -> None:
        """Count one row."""
        self.num_rows += 1
        self.used_tokens += row.used_tokens
        for document in row.documents:
            mask = row.loss_mask[document.start : document.start + document.length]
            self.lengths.append(document.length)
            self.supervised.append(int(np.count_nonzero(mask)))
        self.supervised_tokens = sum(self.supervised[-len(row.documents) :], self.supervised_tokens)


def run(config: PrepareConfig, stop: threading.Event) -> dict[str, Any]:
    """Return the report on one data epoch, or on what of it came before a stop."""
    # Imported here: they load torch, which `--dry-run` does not need.
    from common.target.loading import load_tokenizer
    from services.target_server.answered_rows import Prompts
    from services.target_server.conversations import Conversations
    from services.target_server.row_stream import RowStream

    kind = Prompts if config.data.source == "prompts" else Conversations
    tokenizer = load_tokenizer(config.target)
    source = kind(config.data, tokenizer, config.target.chat_template_kwargs, config.run.seed)
    one_epoch = config.data.model_copy(update={"data_epochs": 1})
    stream, tally = RowStream(source, one_epoch), Tally()
    with Progress("rows", None) as progress:
        for row in stream.rows():
            tally.add(row)
            progress.advance(1, row.used_tokens)
            if stop.is_set():
                break
    return report(config, tally, stream.counts, is_whole=not stop.is_set())


def report(
    config: PrepareConfig, tally: Tally, counts: SampleCounts, *, is_whole: bool
) -> dict[str, Any]:
    """Return every figure under the name that the JSON has."""
    tokens = max(tally.used_tokens, 1)
    return {
        "source": config.data.source,
        "is_whole": is_whole,
        "samples": len(tally.lengths),
        "tokens": tally.used_tokens,
        "lengths": _percentiles(tally.lengths),
        "length_histogram": _histogram(tally.lengths, config.data.row_tokens),
        "mask_coverage": round(tally.supervised_tokens / tokens, 4),
        "supervised_tokens": _percentiles(tally.supervised),
        "skipped": {
            reason: {"count": count, "first_ids": counts.skipped.first_ids[reason]}
            for reason, count in sorted(counts.skipped.counts.items())
        },
        "noted": dict(counts.noted.counts),
        "cut_answers": counts.num_cut_answers,
        "row_tokens": config.data.row_tokens,
        "rows": tally.num_rows,
        "data_epochs": config.data.data_epochs,
        "packing_efficiency": round(
            tally.used_tokens / max(tally.num_rows * config.data.row_tokens, 1), 4
        ),
        "documents_per_row": round(len(tally.lengths) / max(tally.num_rows, 1), 2),
        "bytes": estimate(config, tally.num_rows),
    }


def estimate(config: PrepareConfig, num_rows: int) -> dict[str, Any]:
    """Return what rows take in the ring, by the target's config alone."""
    found = row_bytes(config)
    return {**found, "per_epoch": found["per_row"] * num_rows}


def _percentiles(values: list[int]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, _PERCENTS, method="inverted_cdf")
    return {
        "min": int(min(values)),
        **{f"p{percent}": int(value) for percent, value in zip(_PERCENTS, found, strict=True)},
        "max": int(max(values)),
        "mean": round(float(np.mean(values)), 1),
    }


def _histogram(lengths: list[int], row_tokens: int) -> list[dict[str, int]]:
    """Return counts by powers of two, from the shortest's to the row's."""
    if not lengths:
        return []
    first = int(np.log2(min(lengths)))
    edges = [0 if i == first else 1 << i for i in range(first, int(np.log2(row_tokens)) + 1)]
    edges = [edge for edge in edges if edge < row_tokens] + [row_tokens + 1]
    counts = np.histogram(lengths, edges)[0]
    return [
        {"from": low, "to": high - 1, "samples": int(count)}
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


def main(stop: threading.Event) -> None:
    """Prepare by the command line."""
    config = parse(PrepareConfig, "target_server.prepare")
    if config is None:
        return
    logs.configure("prepare", "0", config.run.name, config.run.log_level)
    found = run(config, stop)
    from services.target_server.prepare_view import show

    show(found)
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(run_service(main))
