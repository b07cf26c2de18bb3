"""`python -m services.target_server.inspect`: one conversation as a run would see it.

Shows its tokens by the loss mask, its tag and lengths, and whether and why it would be skipped.
On a terminal supervised tokens are green and underlined, and shades tell tokens apart; elsewhere
supervised text stands in [[double brackets]].
"""

import logging
import sys
import threading
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import RunTable, TargetTable
from common.errors import ConfigError, RowRejectedError
from common.lifecycle import run_service
from common.telemetry import logs
from services.target_server.data_config import DataTable

_ENOUGH_TOKENS = 1 << 30
# Two shades each, so that the borders of tokens show.
_STYLES = {0: ("", "dim"), 1: ("green underline", "bold bright_green underline")}
_UNFINISHED = "\ufffd"
_log = logging.getLogger(__name__)


class InspectionTable(Table):
    """[inspection]: what to show."""

    id: str
    """A conversation's own id, a line's number, or what the list of skipped ones calls it."""


class InspectConfig(Table):
    """What `python -m services.target_server.inspect` reads."""

    run: RunTable = RunTable()
    target: TargetTable
    data: DataTable
    inspection: InspectionTable


@dataclass(frozen=True)
class Piece:
    """Tokens that make up whole characters, and whether they are supervised."""

    text: str
    is_supervised: int
    first_token: int


def run(config: InspectConfig, console: Console) -> None:
    """Print the conversation; raise `ConfigError` where no source has it."""
    # Imported here: they load torch, which `--dry-run` does not need.
    from common.target.loading import load_tokenizer
    from services.target_server.conversations import Conversations
    from services.target_server.inputs.mixture import source_of

    table, kwargs = config.data, config.target.chat_template_kwargs
    sample_id, place, row = find(table, config.inspection.id)
    tokenizer = load_tokenizer(config.target)
    # What a row has no room for is shown all the same.
    roomy = table.model_copy(update={"row_tokens": _ENOUGH_TOKENS, "keep_cut_answers": True})
    strict, lenient = (Conversations(t, tokenizer, kwargs, config.run.seed) for t in (table, roomy))
    tag = table.all_sources[source_of(sample_id)].tag_name
    console.print(f"{place}, id {row.get('id')!r}, tag {tag!r}, finish_reason "
                  f"{row.get('finish_reason')!r}")  # fmt: skip
    try:
        strict.samples_of(sample_id, row)
    except RowRejectedError as error:
        console.print(f"skipped: {error}")
    else:
        console.print("used")
    try:
        samples = lenient.samples_of(sample_id, row)
    except RowRejectedError:
        return
    for sample in samples:
        _print_sample(sample, tokenizer, table.row_tokens, console)


def find(table: DataTable, name: str) -> tuple[int, str, dict[str, Any]]:
    """Return sample id, place and content of the row of that name; its own id goes before its line."""
    from services.target_server.inputs.formats import name_of, parse
    from services.target_server.inputs.mixture import Mixture

    mixture = Mixture(table.model_copy(update={"shuffle": False}), 0, None)
    by_line: tuple[int, str, dict[str, Any]] | RowRejectedError | None = None
    for ref in mixture.rows(0):
        raw = mixture.read(ref) if ref.raw is None else ref.raw
        line = f"line {ref.number + 1}"
        place = f"{mixture.readers[ref.source].path.name} {line}"
        is_line = name in (place, line, line.removeprefix("line "))
        if not is_line and isinstance(raw, bytes) and name.encode() not in raw:
            continue
        try:
            row = parse(raw)
        except RowRejectedError as error:
            if is_line and by_line is None:
                by_line = error
            continue
        if name_of(row, "") == name:
            return ref.sample_id, place, row
        if is_line and by_line is None:
            by_line = ref.sample_id, place, row
    if isinstance(by_line, RowRejectedError):
        raise ConfigError(f"inspection.id={name!r}: that row is skipped: {by_line}")
    if by_line is None:
        raise ConfigError(
            f"inspection.id={name!r}: no conversation has that id, and no line that number; give an "
            f"id, a line's number, or a name from the skipped ones of `ringdraft prepare`"
        )
    return by_line


def pieces(tokenizer: Any, token_ids: list[int], loss_mask: list[int]) -> list[Piece]:
    """Return the text of the tokens; those that share a character stay together."""
    found, start = [], 0
    for stop in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[start:stop], clean_up_tokenization_spaces=False)
        is_border = stop == len(token_ids) or loss_mask[stop] != loss_mask[start]
        if not is_border and text.endswith(_UNFINISHED) and stop - start < 8:
            continue
        found.append(Piece(visible(text), int(loss_mask[start]), start))
        start = stop
    return found


def visible(text: str) -> str:
    """Return text without control characters, which could steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def _print_sample(sample: Any, tokenizer: Any, row_tokens: int, console: Console) -> None:
    mask = sample.loss_mask.tolist()
    console.print(
        f"{len(mask)} tokens, {sum(mask)} of them supervised ({sum(mask) / len(mask):.1%})"
    )
    for note in sample.notes:
        console.print(f"odd: {note}")
    found = pieces(tokenizer, sample.token_ids.tolist(), mask)
    text = _coloured(found, row_tokens) if console.is_terminal else _bracketed(found, row_tokens)
    console.print(text, soft_wrap=True)


def _coloured(found: list[Piece], row_tokens: int) -> Text:
    text = Text()
    for number, piece in enumerate(found):
        if _is_at_end(found, number, row_tokens):
            text.append(_end_mark(row_tokens), "bold red")
        text.append(piece.text, _STYLES[piece.is_supervised][number % 2])
    return text


def _bracketed(found: list[Piece], row_tokens: int) -> Text:
    parts = []
    numbered = groupby(enumerate(found), key=lambda pair: pair[1].is_supervised)
    for is_supervised, run_of_pieces in numbered:
        part = "".join(
            (_end_mark(row_tokens) if _is_at_end(found, number, row_tokens) else "") + piece.text
            for number, piece in run_of_pieces
        )
        parts.append(f"[[{part}]]" if is_supervised else part)
    return Text("".join(parts))


def _is_at_end(found: list[Piece], number: int, row_tokens: int) -> bool:
    """Say whether the row's last token lies before this piece and not before the one before it."""
    before = found[number - 1].first_token if number else -1
    return before < row_tokens <= found[number].first_token


def _end_mark(row_tokens: int) -> str:
    return f"<<a row ends here, at {row_tokens} tokens>>"


def main(stop: threading.Event) -> None:  # noqa: ARG001
    """Inspect by the command line."""
    config = parse(InspectConfig, "target_server.inspect")
    if config is None:
        return
    logs.configure("inspect", "0", config.run.name, config.run.log_level)
    run(config, Console(highlight=False, markup=False, soft_wrap=True))


if __name__ == "__main__":
    sys.exit(run_service(main))
