"""Rows of the target's own answers: what was generated, each prompt once, over restarts too."""

import contextlib
import json
import threading

import numpy as np
import pytest

from common.config.shared import TargetTable
from common.contracts.sequences import ONE_RING, shards_of
from common.errors import ConfigError
from common.target.chat import render_prompt
from common.target.loading import load_target, load_tokenizer
from services.target_server.answered_rows import AnsweredRows, Prompts
from services.target_server.data_config import DataTable
from services.target_server.generation import AnswerWriter
from services.target_server.generation_config import GenerationTable
from services.target_server.packing import PackedRow, RecordedRow
from services.target_server.recipe_journal import RecipeJournal
from services.target_server.recipes import RecipeBook
from tests.targets import make_tiny_target
from tests.unit.test_generation import greedy
from tests.unit.test_recipes import Ledger

COUNT = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    table = TargetTable(
        model=str(make_tiny_target(tmp_path_factory.mktemp("target"))), dtype="float32"
    )
    return load_target(table, "cpu"), load_tokenizer(table)


@pytest.fixture
def data(tmp_path):
    lines = [
        json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": f"the dog {i}"}]})
        for i in range(COUNT)
    ]
    bad = ["{", json.dumps({"prompt": "x" * 200})]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines + bad) + "\n")
    return DataTable(source="prompts", path=path, row_tokens=128, packing_window=2)


_opened = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def journals_are_closed():
    with _opened:
        yield


class Run:
    """One process's worth of rows."""

    def __init__(self, target, data, folder, *, temperature=1.0, seed=5, shard=ONE_RING):
        model, tokenizer = target
        self.stop = threading.Event()
        prompts = Prompts(data, tokenizer, {}, seed)
        generation = GenerationTable(batch_size=3, temperature=temperature)
        self.rows = AnsweredRows(
            prompts,
            AnswerWriter(model, generation),
            data,
            max_new_tokens=9,
            seed=seed,
            journal=_opened.enter_context(
                RecipeJournal(folder / "journal.jsonl", prompts.fingerprint, shard)
            ),
            stop=self.stop,
        )


def made(row):
    return row.make() if isinstance(row, RecordedRow) else row


def samples_in(rows):
    return [document.sample_id for row in rows for document in made(row).documents]


def test_the_mask_covers_the_generated_answer_and_no_more(target, data, tmp_path):
    model, tokenizer = target
    run = Run(target, data, tmp_path, temperature=0.0)
    rows = list(run.rows.rows())
    assert sorted(samples_in(rows)) == list(range(COUNT))
    for row in rows:
        for document in row.documents:
            span = slice(document.start, document.start + document.length)
            ids, mask = row.token_ids[span].tolist(), row.loss_mask[span]
            messages = [{"role": "user", "content": f"the dog {document.sample_id}"}]
            prompt = render_prompt(tokenizer, messages, {})
            answer = greedy(model, prompt, 9)
            assert ids == prompt + answer
            assert mask.tolist() == [0] * len(prompt) + [1] * len(answer)
    assert run.rows.counts.skipped.counts == {"not_json": 1, "too_long": 1}
    assert 0 < run.rows.counts.num_cut_answers <= COUNT


def test_a_row_that_a_dead_worker_lost_comes_again_with_the_same_ids(target, data, tmp_path):
    ledger = Ledger()
    book = RecipeBook(Run(target, data, tmp_path).rows.rows(), ledger)
    first, second = book.next_row(), book.next_row()
    ledger.again.append(first.sequence)
    assert book.next_row() is first
    assert second.sequence == 1


def test_a_restart_makes_recorded_rows_again_and_takes_no_prompt_twice(target, data, tmp_path):
    straight = list(Run(target, data, tmp_path / "a").rows.rows())
    assert len(straight) >= 4
    rows = Run(target, data, tmp_path / "b").rows.rows()
    before = [next(rows), next(rows)]
    with (tmp_path / "b" / "journal.jsonl").open("a") as journal:
        journal.write('{"sequence": 2, "data_ep')  # torn by a kill
    after = list(Run(target, data, tmp_path / "b").rows.rows())
    assert [row.sequence for row in after] == list(range(len(after)))
    assert [isinstance(row, RecordedRow) for row in after[:3]] == [True, True, False]
    for old, recorded in zip(before, after, strict=False):
        assert np.array_equal(old.token_ids, made(recorded).token_ids)
        assert np.array_equal(old.loss_mask, made(recorded).loss_mask)
    assert sorted(samples_in(after)) == list(range(COUNT))


def test_rows_that_are_settled_are_not_generated_again(target, data, tmp_path):
    all_rows = list(Run(target, data, tmp_path).rows.rows())
    again = list(Run(target, data, tmp_path).rows.rows(start=2))
    assert [row.sequence for row in again] == list(range(2, len(all_rows)))


def test_a_recorded_row_is_made_where_it_is_wanted_alone(target, data, tmp_path):
    count = len(list(Run(target, data, tmp_path).rows.rows()))
    ledger = Ledger()
    ledger.held = set(range(count - 1))
    book = RecipeBook(Run(target, data, tmp_path).rows.rows(), ledger)
    row = book.next_row()
    assert isinstance(row, PackedRow)
    assert row.sequence == count - 1
    assert all(isinstance(book._kept[i], RecordedRow) for i in range(count - 1))
    ledger.again.append(0)
    assert book.next_row().sequence == 0


def test_a_stop_ends_rows_without_a_short_one(target, data, tmp_path):
    run = Run(target, data, tmp_path)
    rows = run.rows.rows()
    first = next(rows)
    run.stop.set()
    assert list(rows) == []
    rest = list(Run(target, data, tmp_path).rows.rows())
    assert made(rest[0]).documents == first.documents
    assert sorted(samples_in(rest)) == list(range(COUNT))


def test_the_rings_of_a_run_share_its_prompts_out_and_each_goes_on_with_its_own(
    target, data, tmp_path
):
    shards = shards_of(2)
    both = []
    for shard in shards:
        folder = tmp_path / str(shard.index)
        first = next(Run(target, data, folder, shard=shard).rows.rows(shard.to_global(0), shard))
        rows = list(Run(target, data, folder, shard=shard).rows.rows(shard.to_global(0), shard))
        assert [row.sequence for row in rows] == [shard.to_global(n) for n in range(len(rows))]
        assert np.array_equal(made(rows[0]).token_ids, first.token_ids)
        both.append(samples_in(rows))
    assert sorted(both[0] + both[1]) == list(range(COUNT))
    assert abs(len(both[0]) - len(both[1])) <= 2  # of the rows that take turns, two are bad
    with pytest.raises(ConfigError, match=r"ring 0 of 2.*target\.replicas=2"):
        Run(target, data, tmp_path / "0")


def test_a_ring_that_no_prompt_is_left_for_has_no_row(target, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the dog"}\n')
    data = DataTable(source="prompts", path=tmp_path / "prompts.jsonl", row_tokens=128)
    counts = []
    for shard in shards_of(2):
        run = Run(target, data, tmp_path / str(shard.index), shard=shard)
        counts.append(len(list(run.rows.rows(shard.to_global(0), shard))))
    assert sorted(counts) == [0, 1]


@pytest.mark.parametrize("key", ["train_only_last_turn", "one_row_a_turn", "allow_full_mask"])
def test_a_setting_that_prompts_have_no_use_for_is_refused(data, key):
    with pytest.raises(ValueError, match=f"data.{key}=true does nothing"):
        DataTable(**(data.model_dump() | {key: True}))


def test_a_journal_whose_heading_was_torn_begins_anew(target, data, tmp_path):
    straight = samples_in(Run(target, data, tmp_path / "a").rows.rows())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "journal.jsonl").write_text('{"fingerprint": "12')
    for _ in range(2):
        assert samples_in(Run(target, data, tmp_path / "b").rows.rows()) == straight


def test_a_journal_of_other_prompts_is_refused(target, data, tmp_path):
    list(Run(target, data, tmp_path).rows.rows())
    with pytest.raises(ConfigError, match="other prompts"):
        Run(target, data, tmp_path, seed=6)


def test_prompts_that_nobody_can_answer_end_the_run(target, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"messages": []}\n')
    data = DataTable(source="prompts", path=tmp_path / "prompts.jsonl", row_tokens=128)
    with pytest.raises(ConfigError, match="none of the prompts"):
        list(Run(target, data, tmp_path).rows.rows())


def test_half_a_surrogate_pair_is_skipped_and_counted(target, data, tmp_path):
    with data.path.open("a") as file:
        file.write('{"id": "h", "prompt": "half \\ud83d"}\n')
        file.write('{"id": "t", "prompt": "a", "tools": [{"name": "\\ud83d"}]}\n')
    run = Run(target, data, tmp_path, temperature=0.0)
    assert sorted(samples_in(run.rows.rows())) == list(range(COUNT))
    assert run.rows.counts.skipped.counts == {"not_json": 1, "too_long": 1, "bad_utf8": 2}
