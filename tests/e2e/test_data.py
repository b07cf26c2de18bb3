"""Whole runs on awkward data: several sources, rows that nobody can use, and kills in between."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_run, start, train
from tests.targets import CHATML, make_tiny_tokenizer

REFUSES_BOOM = "{% if 'boom' in messages[0]['content'] %}{{ raise_exception('boom') }}{% endif %}"


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.timeout(200)
def test_sources_of_several_forms_train_and_their_tags_reach_the_figures(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=40)
    code = [
        {
            "conversations": [
                {"from": "human", "value": "dog?"},
                {"from": "gpt", "value": f"fox {n}"},
            ]
        }
        for n in range(30)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in code)
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    text = config.read_text().replace(f'path = "{tmp_path}/train.jsonl"\n', "")
    text += f"""
[[data.sources]]
path = "{tmp_path}/train.jsonl"
tag = "chat"
[[data.sources]]
path = "{tmp_path}/code.jsonl.gz"
weight = 2.0
"""
    config.write_text(text)
    (summary,) = train(config)
    tagged = summary["captured_tokens_by_tag"]
    assert set(tagged) == {"chat", "code"}
    assert sum(tagged.values()) == summary["captured_tokens"]
    tokenizer = make_tiny_tokenizer()
    once = [tokenizer.apply_chat_template(talk("dog?", f"fox {n}")) for n in range(30)]
    assert tagged["code"] == 2 * sum(len(found["input_ids"]) for found in once)
    manifest = json.loads((tmp_path / "run" / "data.json").read_text())
    assert manifest["tags"] == ["chat", "code"]
    assert summary["groups"]["main"]["rows_lost"] == 0


@pytest.mark.timeout(200)
def test_a_file_of_bad_rows_trains_the_good_one_and_counts_the_others(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=1)
    tokenizer = make_tiny_tokenizer(REFUSES_BOOM + CHATML)
    tokenizer.save_pretrained(tmp_path / "target")
    rows: list[Any] = [
        [],
        [talk("a", "fox")[1], *talk("a", "fox")],
        talk("a", ""),
        talk("boom", "fox"),
        talk("z" * 200, "0123456789"),
        talk("the dog?", "the quick fox"),
    ]
    lines = [json.dumps({"messages": messages}) for messages in rows]
    (tmp_path / "train.jsonl").write_text("".join(line + "\n" for line in [*lines, "{"]))
    (summary,) = train(config)
    assert summary["skipped_samples"] == {
        "no_messages": 1, "assistant_first": 1, "empty_assistant_turn": 1, "template_rejected": 1,
        "no_loss_tokens": 1, "not_json": 1,
    }  # fmt: skip
    good = tokenizer.apply_chat_template(rows[-1])["input_ids"]
    assert summary["captured_tokens"] == len(good)
    account = summary["groups"]["main"]
    assert (account["rows_trained"], account["rows_lost"]) == (1, 0)


@pytest.mark.timeout(200)
def test_a_killed_run_goes_on_from_a_cursor_and_trains_each_row_once(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=400)
    settings = ("data.cursor_rows=3", "data.data_epochs=2")
    options = [part for setting in settings for part in ("--set", setting)]
    logs = tmp_path / "run" / "logs"
    checkpoints = tmp_path / "run" / "checkpoints" / "main" / "0"
    processes = [
        start(f"services.{name}", "--config", config, *options, log=logs / f"{name}-a.log")
        for name in ("target_server", "drafter_worker")
    ]
    try:
        deadline = time.monotonic() + 100
        while not (checkpoints / "step-000020").exists():
            assert time.monotonic() < deadline, (logs / "target_server-a.log").read_text()
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (summary,) = train(config, *settings)
    log = (logs / "target-0.log").read_text()
    assert "packing goes on from the cursor at row" in log, log
    newest = max(checkpoints.glob("step-*"), key=lambda path: path.name)
    state = json.loads((newest / "trainer" / "state.json").read_text())
    total = state["consumed"]["low"]
    assert state["consumed"]["above"] == []
    assert state["trained_rows"] == total > 100
    assert summary["groups"]["main"]["rows_lost"] == 0
    # A kill may leave a file half written, under another name.
    cursors = (tmp_path / "run" / "cursors" / "target-0").glob("[0-9]*")
    kept = sorted(int(path.stem) for path in cursors)
    assert kept[0] > 0, "what no resume can need is deleted"
