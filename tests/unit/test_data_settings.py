"""Each key of [data] and [[data.sources]] changes what comes out; none is read and forgotten."""

import pytest

from common.errors import ConfigError
from services.target_server.conversations import Conversations, manifest_of
from services.target_server.cursors import Cursors
from services.target_server.data_config import DataTable, SourceTable
from services.target_server.row_stream import RowStream
from tests.conversation_files import TOKENIZER, turns, write

TWO_TURNS = [
    {
        "id": str(n),
        "messages": [*turns(answer="a " + "fox " * (n * 7 % 19)), *turns(answer=f"the dog {n}")],
        "finish_reason": "length" if n == 3 else "stop",
    }
    for n in range(40)
]
BOTH_FORMS = [{**TWO_TURNS[0], "prompt": turns(answer="jumps over")}]
ALL_SUPERVISED = [{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}]
BROKEN = ["{", *TWO_TURNS]


def outcome(folder, table):
    """Return everything that a run makes of a table: rows or an error, their count, cursors, tags."""
    source = Conversations(table, TOKENIZER, {}, seed=0)
    cursors = folder / "cursors"
    stream = RowStream(source, table, Cursors(cursors, lambda: 0))
    try:
        rows = [
            (row.documents, row.token_ids.tobytes(), row.loss_mask.tobytes())
            for row in stream.rows()
        ]
    except ConfigError:
        rows = []
    saved = sorted(path.name for path in cursors.iterdir())
    for path in cursors.iterdir():
        path.unlink()
    return rows, rows and stream.count_rows(), saved, manifest_of(table).tags


# By key: the value to set, the rows of the file, and what else both tables have.
TABLE_CASES = {
    "path": ("other.jsonl", TWO_TURNS, {}),
    "sources": (({"path": "other.jsonl"},), TWO_TURNS, {}),
    "row_tokens": (256, TWO_TURNS, {}),
    "max_documents": (1, TWO_TURNS, {}),
    "shuffle": (False, TWO_TURNS, {}),
    "shuffle_buffer": (2, TWO_TURNS, {"path": "data.jsonl.gz"}),
    "data_epochs": (2, TWO_TURNS, {}),
    "max_conversations": (5, TWO_TURNS, {}),
    "keep_cut_answers": (False, TWO_TURNS, {}),
    "on_bad_row": ("fail", BROKEN, {}),
    "packing_window": (1, TWO_TURNS, {"row_tokens": 256}),
    "count_ahead_bytes": (1, TWO_TURNS, {}),
    "cursor_rows": (1, TWO_TURNS, {}),
    "train_only_last_turn": (True, TWO_TURNS, {}),
    "one_row_a_turn": (True, TWO_TURNS, {}),
    "allow_full_mask": (True, ALL_SUPERVISED, {}),
}
SOURCE_CASES = {
    "path": ("other.jsonl", TWO_TURNS),
    "weight": (0.5, TWO_TURNS),
    "tag": ("chat", TWO_TURNS),
    "format": ("prompt", BOTH_FORMS),
}


def test_no_key_is_without_its_case():
    # What `source` changes is in test_prepare.py and test_answered_rows.py.
    assert {"source", *TABLE_CASES} == set(DataTable.model_fields)
    assert set(SOURCE_CASES) == set(SourceTable.model_fields)


def in_folder(folder, value):
    """Put the folder before the names of files in a setting."""
    if isinstance(value, tuple):
        return tuple({"path": folder / source["path"]} for source in value)
    return folder / value if isinstance(value, str) and value.startswith("other") else value


@pytest.mark.parametrize("key", TABLE_CASES)
def test_a_key_of_data_changes_the_outcome(tmp_path, key):
    value, rows, others = TABLE_CASES[key]
    write(tmp_path / "other.jsonl", TWO_TURNS[6:])
    path = write(tmp_path / others.get("path", "data.jsonl"), rows)
    before = {"row_tokens": 128, **others, "path": path}
    after = before | {key: in_folder(tmp_path, value)}
    if key == "sources":
        del after["path"]
    first, second = (outcome(tmp_path, DataTable(**table)) for table in (before, after))
    assert first != second
    assert outcome(tmp_path, DataTable(**before)) == first


@pytest.mark.parametrize("key", SOURCE_CASES)
def test_a_key_of_a_source_changes_the_outcome(tmp_path, key):
    value, rows = SOURCE_CASES[key]
    write(tmp_path / "other.jsonl", TWO_TURNS[6:])
    before = {"path": write(tmp_path / "data.jsonl", rows)}
    after = before | {key: in_folder(tmp_path, value)}
    first, second = (
        outcome(tmp_path, DataTable(row_tokens=128, sources=(source,)))
        for source in (before, after)
    )
    assert first != second
