"""Held-out rows: written once by the target, and measured as decoding would go over them."""

import json
import threading
from pathlib import Path

import pytest
import torch

from common.config.shared import HeldOutTable, RunTable, TargetTable
from common.contracts.rows import RowSchema
from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.metrics import replay_walk
from common.drafters.dflash.objective import DFlashObjective
from common.errors import ConfigError
from common.held_out import FILE_NAME, HeldOutRows, read_held_out, write_held_out
from common.target.features import FeatureTap
from common.target.loading import load_target, load_tokenizer
from services.drafter_worker.held_out import HeldOut, open_held_out
from services.target_server.config import TargetServerConfig
from services.target_server.data_config import DataTable
from services.target_server.held_out import prepare_held_out
from tests.drafters import make_drafter, make_row, make_spec, make_tables
from tests.rings import make_schema
from tests.targets import make_tiny_target
from tests.unit.test_generation import greedy

NUM_TOKENS, NUM_ANCHORS, BLOCK_SIZE = 128, 16, 6
# Documents of a row: tokens of the prompt and of the answer, and their tag.
DOCUMENTS = (((5, 20, 0), (9, 1, 1), (30, 41, 1)), ((70, 40, 0), (3, 2, 1)))


def make_rows(width: int, vocab_size: int) -> HeldOutRows:
    """Return two rows; every third answer token repeats, so that drafts are right now and then."""
    spec = make_spec(hidden_size=width, vocab_size=vocab_size)
    rows = []
    for index, documents in enumerate(DOCUMENTS):
        lengths = tuple(prompt + answer for prompt, answer, _ in documents)
        row = make_row(spec, lengths, NUM_TOKENS, seed=index)
        row.loss_mask.zero_()
        start = 0
        for prompt, answer, _ in documents:
            row.loss_mask[start + prompt : start + prompt + answer] = 1
            start += prompt + answer
        rows.append(row._replace(token_ids=row.token_ids % 3))
    tags = torch.full((len(rows), 4), -1, dtype=torch.int32)
    for index, documents in enumerate(DOCUMENTS):
        tags[index, : len(documents)] = torch.tensor([tag for _, _, tag in documents])
    stacked = (torch.stack(parts) for parts in list(zip(*(row[:5] for row in rows), strict=True)))
    return HeldOutRows(*stacked, document_tags=tags, tags=("chat", "code"))


def make_objective() -> DFlashObjective:
    spec = make_spec(block_size=BLOCK_SIZE)
    embedding, head = make_tables(spec)
    # Tokens 0 to 2 are likely, so that some drafts are right.
    head[3:] *= 0.1
    return DFlashObjective(
        make_drafter(spec), embedding=embedding, head=head, num_anchors=NUM_ANCHORS,
        max_documents=8, loss_chunk_rows=32, backend="dense",
    )  # fmt: skip


def walked(objective: DFlashObjective, rows: HeldOutRows) -> dict[tuple[str, str], list[int]]:
    """Return answers, tokens and passes by tag and context, drafting one anchor at a time."""
    sums: dict[tuple[str, str], list[int]] = {}
    for index, documents in enumerate(DOCUMENTS):
        start = 0
        for prompt, answer, tag in documents:
            stop = start + prompt + answer
            ids = rows.token_ids[index, start:stop]
            context = DraftContext(objective.drafter, objective.embedding, objective.head)
            context.append(rows.aux_hidden_states[index, start:stop].float())
            prefixes = []
            for place in range(prompt, prompt + answer):
                drafts = context.propose(ids[place][None].long(), torch.tensor([place]))[0]
                text = ids[place + 1 : place + BLOCK_SIZE]
                right = drafts.argmax(-1)[: len(text)] == text
                prefixes.append(int(right.long().cumprod(0).sum()))
            start = stop
            if answer < 2:
                continue
            for key in (("", ""), (rows.tags[tag], "under 256")):
                total = sums.setdefault(key, [0, 0, 0])
                total[0] += 1
                total[1] += answer - 1
                total[2] += len(replay_walk(prefixes, answer))
    return sums


def test_figures_are_those_of_drafting_and_walking_answer_by_answer() -> None:
    objective = make_objective()
    rows = make_rows(48, 97)
    figures = HeldOut(objective, rows, torch.float32).measure()
    expected = walked(objective, rows)
    assert {(record.tag, record.context) for record in figures} == set(expected)
    assert figures[0].tag == figures[0].context == ""
    for record in figures:
        answers, emitted, passes = expected[record.tag, record.context]
        assert record.num_answers == answers
        assert record.acceptance_length == pytest.approx(emitted / passes)
    assert 1.0 < figures[0].acceptance_length < BLOCK_SIZE
    assert 0 < figures[0].acceptance_rate_at[0] < 1


def test_measuring_changes_nothing() -> None:
    objective = make_objective()
    before = [parameter.clone() for parameter in objective.drafter.parameters()]
    held_out = HeldOut(objective, make_rows(48, 97), torch.float32)
    assert held_out.measure() == held_out.measure()
    for parameter, old in zip(objective.drafter.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


def schema_of(rows: HeldOutRows) -> RowSchema:
    return make_schema(hidden_size=rows.aux_hidden_states.shape[2] // 3, target_layer_ids=(1, 3, 5))


def test_file_holds_rows_of_one_schema_alone(tmp_path: Path) -> None:
    rows, path = make_rows(48, 97), tmp_path / FILE_NAME
    schema = schema_of(rows)
    assert open_held_out(tmp_path, schema, make_objective(), torch.float32) is None
    write_held_out(path, rows, f"{schema.fingerprint}:prompts")
    again = read_held_out(path, schema)
    assert again.tags == rows.tags
    assert torch.equal(again.aux_hidden_states, rows.aux_hidden_states)
    assert open_held_out(tmp_path, schema, make_objective(), torch.float32) is not None
    with pytest.raises(ConfigError, match=r"held-out rows got shape .* delete the file"):
        read_held_out(path, schema.model_copy(update={"feature_engine": "another"}))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_held_out(path, schema)


def test_a_place_that_cannot_be_written_is_named_with_what_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "gone" / FILE_NAME
    with pytest.raises(ConfigError, match=r"MiB of held-out rows cannot be written: .*max_prompts"):
        write_held_out(path, make_rows(48, 97), "1:prompts")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = make_tiny_target(tmp_path_factory.mktemp("target"))
    table = TargetTable(model=str(folder), dtype="float32")
    return table, load_target(table, "cpu"), load_tokenizer(table)


def config_for(target: tuple, folder: Path, **changes: object) -> TargetServerConfig:
    files = []
    for name in ("chat", "code"):
        path = folder / f"{name}.jsonl"
        questions = [{"messages": [{"role": "user", "content": f"the {name} {i}"}]} for i in (1, 2)]
        path.write_text("\n".join(map(json.dumps, questions)))
        files.append(path)
    held_out = HeldOutTable(prompts=tuple(files), max_new_tokens=9, **changes)
    data = DataTable(path=files[0], row_tokens=128, max_documents=4)
    run = RunTable(directory=folder / "run")
    run.directory.mkdir(exist_ok=True)
    return TargetServerConfig(run=run, target=target[0], data=data, held_out=held_out)


def prepare(target: tuple, config: TargetServerConfig, schema: RowSchema) -> Path:
    _, model, tokenizer = target
    with FeatureTap(model, schema.target_layer_ids) as tap:
        prepare_held_out(
            config, schema, model, tap, tokenizer, is_packed=True, stop=threading.Event()
        )
    return config.run.directory / FILE_NAME


@pytest.mark.parametrize("aux_dtype", ["bfloat16", "float8_e4m3fn"])
def test_target_answers_greedily_once_and_keeps_tags(
    target: tuple, tmp_path: Path, aux_dtype: str
) -> None:
    config = config_for(target, tmp_path)
    schema = make_schema(hidden_size=target[1].config.hidden_size, aux_dtype=aux_dtype)
    path = prepare(target, config, schema)
    rows = read_held_out(path, schema)
    assert rows.tags == ("chat", "code")
    assert sorted(rows.document_tags[rows.document_tags >= 0].tolist()) == [0, 0, 1, 1]
    for index in range(len(rows)):
        for document in range(int(rows.document_ids[index].max()) + 1):
            where = rows.document_ids[index] == document
            ids, mask = rows.token_ids[index][where], rows.loss_mask[index][where] != 0
            prompt, answer = ids[~mask].tolist(), ids[mask].tolist()
            assert answer == greedy(target[1], prompt, len(answer))
        assert rows.aux_hidden_states[index][rows.document_ids[index] >= 0].any(-1).all()
    written = path.stat().st_mtime_ns
    assert prepare(target, config, schema).stat().st_mtime_ns == written
    fewer = config_for(target, tmp_path, max_prompts=1)
    assert prepare(target, fewer, schema).stat().st_mtime_ns != written
    assert (read_held_out(path, schema).document_tags >= 0).sum() == 2


def test_prompts_without_answers_end_the_start_with_a_way_out(
    target: tuple, tmp_path: Path
) -> None:
    config = config_for(target, tmp_path)
    for path in config.held_out.prompts:
        path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"held_out.prompts: .*none of the prompts has an answer"):
        prepare(target, config, make_schema(hidden_size=target[1].config.hidden_size))
