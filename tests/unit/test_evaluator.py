"""The evaluator as a service: what it writes, what it refuses, how it stops."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.loading import load
from common.config.shared import TargetTable
from common.contracts.control_messages import EvaluationResult, EvaluatorReport
from common.drafters.dflash.checkpoint import write_drafter
from common.drafters.dflash.config import DrafterTable, resolve_spec
from common.errors import CaptureMismatchError, ConfigError
from common.target.loading import describe_target
from services.evaluator.build import build_bench
from services.evaluator.checkpoints import find_checkpoints
from services.evaluator.config import EvaluatorConfig
from services.evaluator.decode import Pass, Text
from services.evaluator.evaluator import Evaluator, Status, check_same_text, evaluate
from services.evaluator.replay import Replay
from services.evaluator.report import PromptRecord, summarise
from services.evaluator.ties import Difference
from tests.drafters import make_drafter
from tests.targets import make_tiny_target

BLOCK_SIZE = 5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two targets, prompts and the checkpoints of a run."""
    home = tmp_path_factory.mktemp("ev")
    make_tiny_target(home / "target")
    make_tiny_target(home / "wider", hidden_size=64)
    target = describe_target(TargetTable(model=str(home / "target")))
    table = DrafterTable(num_layers=1, block_size=BLOCK_SIZE)
    spec = resolve_spec(table, target, target_layer_ids=(1, 3), mask_token_id=290)
    for place in ("main/0/step-000000", "main/0/step-000020", "other/0/step-000005"):
        checkpoint = home / "run" / "checkpoints" / place
        checkpoint.mkdir(parents=True)
        write_drafter(checkpoint, make_drafter(spec).state_dict(), spec)
    questions = [[{"role": "user", "content": f"the quick {word}"}] for word in ("fox", "dog")]
    answered = [*questions[1], {"role": "assistant", "content": "not for the evaluator"}]
    lines = [{"id": "a", "messages": questions[0]}, {"messages": answered}, {"id": "no messages"}]
    text = "\n".join(map(json.dumps, lines))
    (home / "prompts.jsonl").write_text(text, encoding="utf-8")
    return home


def config_of(home: Path, **changes: Any) -> EvaluatorConfig:
    settings = {
        "run.directory": home / "run",
        "target.model": home / "target",
        "evaluation.prompts": home / "prompts.jsonl",
        "evaluation.max_new_tokens": 12,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return load(EvaluatorConfig, [], [f"{k}={v}" for k, v in settings.items()], environment={})


def test_newest_checkpoint_of_each_series_is_evaluated_and_written(home: Path) -> None:
    evaluate(config_of(home), threading.Event())
    written = sorted(path.name for path in (home / "run" / "evaluations").iterdir())
    assert written == ["main-0-step-000020.json", "other-0-step-000005.json"]
    body = json.loads((home / "run" / "evaluations" / written[0]).read_text(encoding="utf-8"))
    fields = {name: body[name] for name in EvaluationResult.model_fields}
    result = EvaluationResult.model_validate_json(json.dumps(fields))
    assert (result.step, result.num_prompts, result.num_mismatches) == (20, 2, 0)
    assert result.acceptance_length == result.replay_acceptance_length
    assert len(result.acceptance_rate_at) == BLOCK_SIZE - 1
    assert result.acceptance_length == pytest.approx(1 + sum(result.acceptance_rate_at))
    assert (body["settings"]["max_new_tokens"], body["settings"]["dtype"]) == (12, "float32")
    assert [prompt["id"] for prompt in body["prompts"]] == ["a", "2"]
    assert all(sum(p["emitted"]) == p["num_tokens"] - 1 for p in body["prompts"])
    curves = (home / "run" / "metrics" / "evaluator.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["step"] for line in curves.splitlines()] == [20, 5]


def test_a_stop_leaves_no_half_result(home: Path) -> None:
    stop = threading.Event()
    stop.set()
    first = home / "run" / "checkpoints" / "main" / "0" / "step-000000"
    evaluate(config_of(home, evaluation__checkpoints=json.dumps([str(first)])), stop)
    assert not (home / "run" / "evaluations" / "main-0-step-000000.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation__prompts": "nowhere.jsonl"}, "no such file"),
        ({"run__directory": "nowhere"}, "no checkpoint under"),
        ({"evaluation__checkpoints": '["nowhere"]'}, "has no config.json"),
        ({"target__model": "HOME/wider"}, "hidden_size got 32, expected 64"),
        ({"evaluation__prompts": "HOME/target/config.json"}, "no usable prompt"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    home: Path, changes: dict[str, str], message: str
) -> None:
    changes = {key: value.replace("HOME", str(home)) for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        evaluate(config_of(home, **changes), threading.Event())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 301, "vocab_size got 301, expected 300"),
        ("num_target_layers", 8, "num_target_layers got 8, expected 6"),
        ("target_layer_ids", [1, 5], r"target_layer_ids got \[1, 5\], expected 0 to 4"),
    ],
)
def test_checkpoint_of_another_target_is_refused(
    home: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    source = home / "run" / "checkpoints" / "main" / "0" / "step-000000" / "config.json"
    config = json.loads(source.read_text(encoding="utf-8"))
    (config["dflash_config"] if field == "target_layer_ids" else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    changed = config_of(home, evaluation__checkpoints=json.dumps([str(tmp_path)]))
    with pytest.raises(ConfigError, match=message):
        evaluate(changed, threading.Event())


def record(
    emitted: list[int], difference: Difference | None = None, num_differences: int = 0
) -> PromptRecord:
    num_tokens = 1 + sum(emitted)
    plain = [Pass(at, [], 1, seconds=2.0) for at in range(num_tokens - 1)]
    passes = [Pass(0, [0] * (BLOCK_SIZE - 1), count, seconds=1.0 * count) for count in emitted]
    return PromptRecord(
        id="p",
        tag="t",
        num_prompt_tokens=3,
        plain=Text([0] * num_tokens, plain),
        speculative=Text([0] * num_tokens, passes),
        replay=Replay(emitted, num_ties=0, num_differences=num_differences),
        difference=difference,
    )


def difference(is_tie: bool) -> Difference:
    return Difference(position=7, expected=1, got=2, gap=0.3, is_tie=is_tie)


def test_figures_are_pooled_over_passes() -> None:
    result = summarise(Path("c"), 3, [record([1, 5, 2]), record([1]), record([])])
    assert result.acceptance_length == 9 / 4
    assert result.acceptance_rate_at == (2 / 4, 1 / 4, 1 / 4, 1 / 4)
    assert result.speedup == 2.0


def test_other_text_ends_the_run_with_prompt_and_position() -> None:
    records = [record([1]), record([1], difference(is_tie=False))]
    assert summarise(Path("c"), 0, records).num_mismatches == 1
    with pytest.raises(CaptureMismatchError, match=r"'p'.*token 2 at position 7"):
        check_same_text(Path("c"), records)


def test_float_tie_is_counted_and_no_error() -> None:
    records = [record([1], difference(is_tie=True))]
    result = summarise(Path("c"), 0, records)
    assert (result.num_float_ties, result.num_mismatches) == (1, 0)
    check_same_text(Path("c"), records)


def test_replay_that_drafts_otherwise_ends_the_run() -> None:
    with pytest.raises(CaptureMismatchError, match="4 drafts of the replay walk differ"):
        check_same_text(Path("c"), [record([1], num_differences=4)])


def test_target_is_frozen_and_its_embedding_is_the_raw_table(home: Path) -> None:
    config = config_of(home)
    bench = build_bench(config, find_checkpoints((), config.run.directory))
    assert not any(parameter.requires_grad for parameter in bench.model.parameters())
    assert torch.equal(bench.embedding, bench.model.model.embed_tokens.weight)


def test_heartbeats_tell_how_many_answers_are_written_and_what_came_of_them(home: Path) -> None:
    config = config_of(home)
    status = Status()
    assert status.describe().phase == "loading"
    checkpoints = find_checkpoints((), config.run.directory)
    bench = build_bench(config, checkpoints)
    Evaluator(config, bench, status, threading.Event()).run(checkpoints)
    report = status.describe().report
    assert isinstance(report, EvaluatorReport)
    # Two prompts, decoded plainly and with the drafters of two series.
    assert (report.num_done, report.num_total) == (6, 6)
    assert [result.step for result in report.results] == [20, 5]
    assert status.describe().progress == 6
