"""The dry pass reports what a run would do; inspect shows one conversation as the run sees it."""

import io
import json
import threading

import numpy as np
import pytest
from rich.console import Console

from common.config.loading import load
from common.errors import ConfigError
from common.target.loading import load_tokenizer
from services.target_server import estimate, inspect, prepare
from services.target_server.conversations import Conversations
from services.target_server.prepare_view import readable, show
from services.target_server.row_stream import RowStream
from tests.runs import run_to_end
from tests.targets import make_tiny_target

CLI = "services.launcher.cli"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_tiny_target(folder / "target")
    # Neither verb may load the weights: these are none.
    (folder / "target" / "model.safetensors").write_bytes(b"no weights" * 100)
    rows = [
        {"id": f"c{n}", "messages": talk("the dog", "the lazy dog " * (n % 5 + 1))}
        for n in range(40)
    ]
    rows[7]["finish_reason"] = "length"
    rows.append({"id": "long", "messages": talk("a", "fox jumps " * 100)})
    rows.append({"id": "mute", "messages": [{"role": "user", "content": "a"}]})
    rows.append({"id": "17", "messages": talk("own id", "before its line")})
    rows.append({"id": "escape", "messages": talk("a", "red \x1b[31m caf\u00e9")})
    lines = [*map(json.dumps, rows), "{"]
    (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "run.toml").write_text(
        f'[target]\nmodel = "{folder}/target"\nnum_aux_layers = 2\n'
        f'[data]\npath = "{folder}/train.jsonl"\nrow_tokens = 128\n'
    )
    return folder


def talk(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def inspected(folder, name, *, terminal=False, settings=()):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, highlight=False, markup=False,
                      soft_wrap=True, width=10_000)  # fmt: skip
    chosen = [f"inspection.id={json.dumps(name)}", *settings]
    inspect.run(load(inspect.InspectConfig, [folder / "run.toml"], chosen, {}), console)
    return out.getvalue()


def test_the_report_is_what_a_run_would_pack(folder):
    config = load(prepare.PrepareConfig, [folder / "run.toml"], [], {})
    report = prepare.run(config, threading.Event())
    tokenizer = load_tokenizer(config.target)
    rows = list(RowStream(Conversations(config.data, tokenizer, {}, 0), config.data).rows())
    used = sum(row.used_tokens for row in rows)
    lengths = sorted(d.length for row in rows for d in row.documents)
    assert report["rows"] == len(rows)
    assert report["samples"] == len(lengths) == 42
    assert report["tokens"] == used == sum(lengths)
    assert report["packing_efficiency"] == round(used / (128 * len(rows)), 4)
    supervised = sum(int(np.count_nonzero(row.loss_mask)) for row in rows)
    assert report["mask_coverage"] == round(supervised / used, 4)
    assert report["lengths"]["min"] == lengths[0]
    assert report["lengths"]["p50"] == lengths[20]
    assert report["lengths"]["max"] == lengths[-1]
    assert sum(part["samples"] for part in report["length_histogram"]) == 42
    assert report["cut_answers"] == 1
    assert report["is_whole"]
    assert report["skipped"] == {
        "no_assistant_turn": {"count": 1, "first_ids": ["mute"]},
        "not_json": {"count": 1, "first_ids": ["train.jsonl line 45"]},
        "too_long": {"count": 1, "first_ids": ["long"]},
    }


def test_the_histogram_counts_every_length_once():
    for lengths in ([1], [128], [1, 2, 3, 4, 127, 128], [100] * 3, []):
        parts = prepare._histogram(lengths, 128)
        assert sum(part["samples"] for part in parts) == len(lengths)
        for part in parts:
            inside = [n for n in lengths if part["from"] <= n <= part["to"]]
            assert part["samples"] == len(inside)


def test_bytes_are_those_of_the_slots(folder):
    config = load(prepare.PrepareConfig, [folder / "run.toml"], ["ring.num_slots=3"], {})
    found = prepare.estimate(config, 10)
    # Two layers of 32 values of two bytes, and in front of them pages of small fields.
    assert found["per_row"] > 128 * 2 * 32 * 2
    assert found["per_row"] % 4096 == 0
    assert found["ring"] == 3 * found["per_row"]
    assert found["per_epoch"] == 10 * found["per_row"]
    assert found["per_token"] == found["per_row"] / 128
    rings = load(estimate.EstimateConfig, [folder / "run.toml"], ["target.replicas=2"], {})
    shared = estimate.estimate(rings)
    assert shared["shared_memory"] == 2 * shared["ring"] == 16 * found["per_row"]
    assert int(shared["shm_size"].removesuffix("m")) << 20 > shared["shared_memory"]
    on_host = load(estimate.EstimateConfig, [folder / "run.toml"], ["ring.transport=host"], {})
    on_gpu, off_gpu = shared["gpu"], estimate.estimate(on_host)["gpu"]
    # Without the pages of small fields, which are no part of this estimate.
    ring = 8 * 128 * 2 * 32 * 2
    assert on_gpu["target_server"] - off_gpu["target_server"] == ring
    assert on_gpu["drafter_worker"] == off_gpu["drafter_worker"] > 0
    halved = load(prepare.PrepareConfig, [folder / "run.toml"], ["ring.aux_dtype=fp8"], {})
    assert prepare.estimate(halved, 10)["per_row"] < found["per_row"]


def test_prompts_are_reported_without_answers(folder):
    config = load(prepare.PrepareConfig, [folder / "run.toml"], ["data.source=prompts"], {})
    report = prepare.run(config, threading.Event())
    assert report["source"] == "prompts"
    assert report["mask_coverage"] == 0
    assert report["samples"] == 44


def test_a_stop_reports_what_came_before_it(folder):
    stop = threading.Event()
    stop.set()
    config = load(prepare.PrepareConfig, [folder / "run.toml"], [], {})
    report = prepare.run(config, stop)
    assert (report["rows"], report["is_whole"]) == (1, False)


def test_the_verb_shows_tables_on_stderr_and_one_json_line_on_stdout(folder):
    done = run_to_end(CLI, "prepare", "--config", folder / "run.toml")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for words in ("too_long", "mute", "a row (a slot)", readable(report["bytes"]["per_row"])):
        assert words in done.stderr
    config = load(prepare.PrepareConfig, [folder / "run.toml"], [], {})
    assert report == prepare.run(config, threading.Event())


def test_an_empty_report_can_be_shown(folder, capsys):
    config = load(prepare.PrepareConfig, [folder / "run.toml"], [], {})
    report = prepare.report(config, prepare.Tally(), prepare.SampleCounts(), is_whole=False)
    show(report)
    assert "stopped early" in capsys.readouterr().err


def test_supervised_text_stands_in_brackets(folder):
    text = inspected(folder, "c1")
    assert "id 'c1', tag 'train', finish_reason None\nused\n" in text
    assert "<|im_start|>user\nthe dog<|im_end|>\n" in text
    assert "assistant\n[[the lazy dog the lazy dog <|im_end|>]]" in text


def test_a_cut_answer_has_no_end_of_turn(folder):
    assert "[[the lazy dog the lazy dog the lazy dog ]]<|im_end|>" in inspected(folder, "c7")


def test_colours_tell_the_same_on_a_terminal(folder):
    text = inspected(folder, "c1", terminal=True)
    assert "[[" not in text
    assert "\x1b[4;32m" in text
    plain = Console(file=io.StringIO()).render_str(text)
    assert "the" in plain.plain


def test_what_is_skipped_is_shown_with_the_reason_and_the_rows_end(folder):
    text = inspected(folder, "long")
    assert "skipped: too_long" in text
    assert "<<a row ends here, at 128 tokens>>" in text
    assert "skipped: no_assistant_turn" in inspected(folder, "mute")
    cut = inspected(folder, "c7", settings=["data.keep_cut_answers=false"])
    assert "skipped: cut_answer" in cut
    assert "[[the lazy" in cut


def test_a_row_is_found_by_its_line_and_its_own_id_goes_first(folder):
    assert "id 'c4'" in inspected(folder, "5")
    assert "id 'c4'" in inspected(folder, "train.jsonl line 5")
    assert "own id" in inspected(folder, "17")
    with pytest.raises(ConfigError, match="no conversation has that id"):
        inspected(folder, "c99")
    with pytest.raises(ConfigError, match="not_json"):
        inspected(folder, "train.jsonl line 45")


def test_a_text_cannot_steer_the_terminal(folder):
    text = inspected(folder, "escape")
    assert "\x1b" not in text
    assert "red \\x1b[31m caf\u00e9" in text


def test_the_verb_prints_one_conversation(folder):
    done = run_to_end(CLI, "inspect", "c1", "--config", folder / "run.toml")
    assert done.returncode == 0, done.stderr
    assert "[[the lazy dog" in done.stdout
    missing = run_to_end(
        "services.target_server.inspect", "--config", folder / "run.toml",
        "--set", 'inspection.id="c99"',
    )  # fmt: skip
    assert missing.returncode == 2
    assert "c99" in missing.stderr
