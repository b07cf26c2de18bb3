"""The target answers each prompt once, as plain greedy decoding would, over any number of kills."""

import json
import random
import signal
import threading
import time

import pytest

from common.config.loading import load
from common.config.shared import TargetTable
from common.errors import ConfigError
from common.target.chat import render_prompt
from common.target.loading import load_target, load_tokenizer
from services.target_server.regenerate import run
from services.target_server.regeneration_config import RegenerateConfig
from services.target_server.target_answers import _message
from tests.bad_server import serving
from tests.runs import start
from tests.targets import CHATML, make_tiny_target, make_tiny_tokenizer
from tests.unit.test_generation import greedy

MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("target"))


def prompt(number):
    question = {"role": "user", "content": "the dog " * (number % 3 + 1) + str(number)}
    return {"id": f"p{number}", "messages": [question]}


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assignments(target, folder, **generation):
    values = {"batch_size": 2, "max_new_tokens": MAX_NEW_TOKENS} | generation
    return [
        f"target.model={target}", "target.dtype=float32",
        f"regeneration.prompts={folder / 'prompts.jsonl'}",
        f"regeneration.output={folder / 'output.jsonl'}",
        *(f"generation.{key}={value}" for key, value in values.items()),
    ]  # fmt: skip


def regenerate(target, folder, stop=None, **generation):
    config = load(RegenerateConfig, [], assignments(target, folder, **generation), {})
    run(config, stop or threading.Event())
    return read(folder / "output.jsonl")


def test_every_turn_is_what_plain_decoding_writes_behind_the_answers_before_it(target, tmp_path):
    two = [
        prompt(1)["messages"][0],
        {"role": "assistant", "content": "OLD"},
        prompt(5)["messages"][0],
    ]
    write(tmp_path / "prompts.jsonl", [{"id": "two", "messages": two}, *map(prompt, range(5))])
    rows = {row["id"]: row for row in regenerate(target, tmp_path, batch_size=4)}
    assert set(rows) == {"two", *(f"p{number}" for number in range(5))}
    model = load_target(TargetTable(model=str(target), dtype="float32"), "cpu")
    tokenizer = load_tokenizer(TargetTable(model=str(target)))
    for row in rows.values():
        for place, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                ids = greedy(
                    model, render_prompt(tokenizer, row["messages"][:place], {}), MAX_NEW_TOKENS
                )
                assert message["content"] == tokenizer.decode(ids, skip_special_tokens=True)
        is_cut = row["finish_reason"] == "length"
        assert len(row["messages"]) == (4 if row["id"] == "two" and not is_cut else 2)


def test_a_last_line_that_a_kill_tore_is_cut_off(target, tmp_path):
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(3)])
    before = regenerate(target, tmp_path)
    with (tmp_path / "output.jsonl").open("a") as output:
        output.write('{"id": "p3", "messages": [{"role": "us' + "x" * 200_000)
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(7)])
    rows = regenerate(target, tmp_path)
    assert rows[:3] == before
    assert sorted(row["id"] for row in rows) == [f"p{number}" for number in range(7)]


def test_a_file_that_no_run_wrote_is_refused_as_it_is(target, tmp_path):
    write(tmp_path / "prompts.jsonl", [prompt(0)])
    (tmp_path / "output.jsonl").write_text("notes\n")
    with pytest.raises(ConfigError, match="line 1"):
        regenerate(target, tmp_path)
    assert (tmp_path / "output.jsonl").read_text() == "notes\n"


def test_the_target_sees_the_tools_that_it_may_call(tmp_path):
    target = make_tiny_target(tmp_path / "target")
    make_tiny_tokenizer("{{ tools | tojson if tools }}" + CHATML).save_pretrained(target)
    tools = [{"type": "function", "function": {"name": "fox"}}]
    write(tmp_path / "prompts.jsonl", [{**prompt(1), "tools": tools}])
    (row,) = regenerate(target, tmp_path)
    table = TargetTable(model=str(target), dtype="float32")
    tokenizer = load_tokenizer(table)
    ids = render_prompt(tokenizer, prompt(1)["messages"], {}, tools=tools)
    assert '"fox"' in tokenizer.decode(ids)
    answer = greedy(load_target(table, "cpu"), ids, MAX_NEW_TOKENS)
    assert row["messages"][-1]["content"] == tokenizer.decode(answer, skip_special_tokens=True)
    assert row["tools"] == tools


def test_stopped_run_writes_nothing_more_and_a_finished_one_nothing_twice(target, tmp_path):
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(5)])
    stop = threading.Event()
    stop.set()
    assert regenerate(target, tmp_path, stop) == []
    rows = regenerate(target, tmp_path)
    assert regenerate(target, tmp_path) == rows


def test_unusable_lines_are_counted_and_left_out(target, tmp_path):
    no_user = {"id": "s", "messages": [{"role": "system", "content": "a"}]}
    long = {"id": "l", "messages": [{"role": "user", "content": "x" * 600}]}
    nameless = {"messages": prompt(2)["messages"]}
    half = '{"id": "h", "prompt": "half \\ud83d"}'
    lines = [prompt(1), "{", half, "[]", no_user, nameless, prompt(1), "", long]
    write(tmp_path / "prompts.jsonl", lines)
    config = load(RegenerateConfig, [], assignments(target, tmp_path), {})
    summary = run(config, threading.Event())
    ids = [row["id"] for row in read(tmp_path / "output.jsonl")]
    assert "p1" in ids
    assert sorted(map(len, ids)) == [2, 16]
    assert summary["skipped"] == {
        "not_json": 2, "bad_utf8": 1, "no_user_turn": 1, "same_id": 1, "too_long": 1
    }  # fmt: skip


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", {"content": "yes", "reasoning_content": "hm"}),
        ("hm\n</think>\n\nyes", {"content": "yes", "reasoning_content": "hm"}),
        ("<think>\n\n</think>\n\nyes", {"content": "<think>\n\n</think>\n\nyes"}),
        ("yes", {"content": "yes"}),
    ],
)
def test_reasoning_is_split_off_where_the_template_knows_it(text, expected):
    assert _message(text, splits_reasoning=True) == {"role": "assistant"} | expected
    assert _message(text, splits_reasoning=False)["content"] == text


def kill_at_random(command, folder, chooser, kills):
    """Start the real process and SIGKILL it after random times, then let it end; count deaths."""
    died = 0
    for number in range(kills + 1):
        process = start(*command, log=folder / f"{number}.log")
        if number < kills:
            size = (folder / "output.jsonl").stat().st_size if died else 0
            wanted = size + chooser.randrange(1, 400)
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                path = folder / "output.jsonl"
                if path.exists() and path.stat().st_size >= wanted:
                    time.sleep(chooser.random() * 0.02)
                    break
            process.kill()
        died += process.wait(60) == -signal.SIGKILL
    assert process.returncode == 0, (folder / f"{kills}.log").read_text()
    return died


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.hammer) for n in (1, 2))])
def test_a_run_against_a_bad_server_killed_at_random_yields_the_same_set(
    tmp_path, seed, monkeypatch
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write(tmp_path / "prompts.jsonl", [prompt(number) for number in range(80)])
    chooser = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with serving(tmp_path, "slow", "slow") as address:
        for folder in (whole, killed):
            folder.mkdir()
            command = ["services.target_server.regenerate"]
            for setting in (f"regeneration.prompts={tmp_path / 'prompts.jsonl'}",
                            f"regeneration.output={folder / 'output.jsonl'}",
                            f"regeneration.server={address}", "regeneration.concurrency=8"):  # fmt: skip
                command += ["--set", setting]
            kills = 0 if folder == whole else 4
            died = kill_at_random(command, folder, chooser, kills)
    assert died >= 2, "the kills came too late to mean anything"
    check_same(whole, killed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.hammer)])
def test_a_run_of_the_target_killed_at_random_yields_the_same_set(target, tmp_path, seed):
    """Sampled answers too: each is drawn from a seed of its own."""
    chooser = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write(folder / "prompts.jsonl", [prompt(number) for number in range(50)])
        command = ["services.target_server.regenerate"]
        for setting in assignments(target, folder, temperature=1.0, max_new_tokens=24):
            command += ["--set", setting]
        died = kill_at_random(command, folder, chooser, 0 if folder == whole else 2)
    assert died >= 1, "the kills came too late to mean anything"
    check_same(whole, killed)


def check_same(whole, killed):
    expected, found = read(whole / "output.jsonl"), read(killed / "output.jsonl")
    assert len(expected) == len(found) == len({row["id"] for row in found})
    assert sorted(found, key=lambda row: row["id"]) == sorted(expected, key=lambda row: row["id"])
