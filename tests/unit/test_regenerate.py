"""The target answers each prompt once, as plain greedy decoding would, over any number of kills."""

import json
import threading

import pytest
import torch

from common.config.loading import load
from common.config.shared import TargetTable
from common.errors import ConfigError
from common.target.loading import load_target, load_tokenizer
from services.target_server.generation import AnswerWriter
from services.target_server.regenerate import RegenerateConfig, run
from tests.targets import make_tiny_target

MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(target):
    return load_target(TargetTable(model=str(target), dtype="float32"), "cpu")


def prompt(number):
    question = {"role": "user", "content": "the dog " * (number % 3 + 1) + str(number)}
    return {"id": f"p{number}", "messages": [question]}


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def regenerate(target, folder, stop=None, **settings):
    values = {"batch_size": 2, "max_new_tokens": MAX_NEW_TOKENS} | settings
    assignments = [
        f"target.model={target}", "target.dtype=float32",
        f"regeneration.prompts={folder / 'prompts.jsonl'}",
        f"regeneration.output={folder / 'output.jsonl'}",
        *(f"regeneration.{key}={value}" for key, value in values.items()),
    ]  # fmt: skip
    run(load(RegenerateConfig, [], assignments, {}), stop or threading.Event())
    return read(folder / "output.jsonl")


def greedy(model, token_ids, length):
    written = []
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([token_ids + written]), use_cache=False).logits
        written.append(logits[0, -1].argmax().item())
    return written


def test_every_prompt_is_answered_with_its_messages_kept(target, tmp_path):
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(5)])
    rows = regenerate(target, tmp_path)
    assert {row["id"] for row in rows} == {f"p{number}" for number in range(5)}
    for row in rows:
        assert row["messages"][:-1] == prompt(int(row["id"][1:]))["messages"]
        assert row["messages"][-1]["role"] == "assistant"
        assert row["finish_reason"] in ("stop", "length")


def test_killed_run_goes_on_without_duplicates(target, tmp_path):
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(3)])
    before = regenerate(target, tmp_path)
    with (tmp_path / "output.jsonl").open("a") as output:
        output.write('{"id": "p3", "messages": [{"role": "us')  # where a kill cut the line
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(7)])
    rows = regenerate(target, tmp_path)
    assert rows[:3] == before
    assert sorted(row["id"] for row in rows) == [f"p{number}" for number in range(7)]


def test_stopped_run_has_whole_batches_and_a_finished_one_writes_nothing(target, tmp_path):
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(5)])
    stop = threading.Event()
    stop.set()
    assert regenerate(target, tmp_path, stop) == []
    rows = regenerate(target, tmp_path)
    assert regenerate(target, tmp_path) == rows


def test_unusable_lines_are_left_out_and_old_answers_written_anew(target, tmp_path):
    answered = prompt(1)
    answered["messages"] = [*answered["messages"], {"role": "assistant", "content": "OLD"}]
    no_user = {"id": "s", "messages": [{"role": "system", "content": "a"}]}
    nameless = {"messages": prompt(2)["messages"]}
    write(tmp_path / "prompts.jsonl", [answered, "{", no_user, nameless, prompt(1), ""])
    first, second = regenerate(target, tmp_path)
    assert first["id"] == "p1"
    assert "OLD" not in json.dumps(first)
    assert len(second["id"]) == 16


def test_missing_prompts_are_a_config_error(target, tmp_path):
    with pytest.raises(ConfigError, match=r"regeneration\.prompts"):
        regenerate(target, tmp_path)


def test_two_runs_cannot_write_one_output(target, tmp_path):
    import fcntl

    write(tmp_path / "prompts.jsonl", [prompt(0)])
    with (tmp_path / "output.jsonl").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is writing it"):
            regenerate(target, tmp_path)


def test_batched_greedy_answers_equal_plain_decoding(target, model):
    tokenizer = load_tokenizer(TargetTable(model=str(target)))
    prompts = [list(range(10, 10 + length)) for length in (3, 9, 5)]
    writer = AnswerWriter(
        model, tokenizer, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, seed=0
    )  # fmt: skip
    for ids, answer in zip(prompts, writer.answer(prompts), strict=True):
        expected = tokenizer.decode(greedy(model, ids, MAX_NEW_TOKENS), skip_special_tokens=True)
        assert answer.content == expected
        assert (answer.finish_reason, answer.num_tokens) == ("length", MAX_NEW_TOKENS)


def test_answer_ends_at_the_end_of_turn(target):
    model = load_target(TargetTable(model=str(target), dtype="float32"), "cpu")
    tokenizer = load_tokenizer(TargetTable(model=str(target)))
    ids = list(range(10, 20))
    written = greedy(model, ids, MAX_NEW_TOKENS)
    end = next(token for token in written if token != written[0])
    model.generation_config.eos_token_id = [end]
    writer = AnswerWriter(
        model, tokenizer, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, seed=0
    )  # fmt: skip
    (answer,) = writer.answer([ids])
    length = written.index(end)
    assert answer.content == tokenizer.decode(written[:length], skip_special_tokens=True)
    assert (answer.finish_reason, answer.num_tokens) == ("stop", length + 1)


def test_sampled_answers_follow_the_seed(target, model):
    tokenizer = load_tokenizer(TargetTable(model=str(target)))

    def answers(seed):
        writer = AnswerWriter(model, tokenizer, max_new_tokens=20, temperature=2.0, seed=seed)
        return [answer.content for answer in writer.answer([[10, 11, 12]])]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
