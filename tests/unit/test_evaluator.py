"""The evaluator as a service: what it writes, what it refuses, how it stops."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.loading import load
from common.config.shared import TargetTable
from common.contracts.control_messages import EvaluationResult, EvaluatorReport
from common.drafters.dflash.checkpoint import write_drafter
from common.drafters.dflash.config import DrafterTable, resolve_spec
from common.errors import CaptureMismatchError, ConfigError
from common.target.loading import describe_target
from common.telemetry.late import LateService
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
    evaluate(config_of(home), threading.Event(), LateService())
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
    evaluate(config_of(home, evaluation__checkpoints=json.dumps([str(first)])), stop, LateService())
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
        evaluate(config_of(home, **changes), threading.Event(), LateService())


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
        evaluate(changed, threading.Event(), LateService())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 300}, "mask_token_id"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"causal": True}, "causal"),
    ],
)
def test_drafter_that_would_not_be_scored_as_what_it_is_is_refused(
    home: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = home / "run" / "checkpoints" / "main" / "0" / "step-000000"
    shutil.copytree(source, tmp_path / "draft")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["dflash_config"] |= change
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    changed = config_of(home, evaluation__checkpoints=json.dumps([str(tmp_path / "draft")]))
    with pytest.raises(ConfigError, match=message):
        evaluate(changed, threading.Event(), LateService())


def test_drafter_whose_tensors_do_not_fit_is_refused_with_each_name(
    home: Path, tmp_path: Path
) -> None:
    source = home / "run" / "checkpoints" / "main" / "0" / "step-000000"
    shutil.copytree(source, tmp_path / "draft")
    weights = load_file(source / "model.safetensors")
    weights["mask_embedding"] = weights.pop("norm.weight")
    weights["fc.weight"] = weights["fc.weight"][:, :-1].contiguous()
    save_file(weights, tmp_path / "draft" / "model.safetensors")
    changed = config_of(home, evaluation__checkpoints=json.dumps([str(tmp_path / "draft")]))
    with pytest.raises(
        ConfigError,
        match=r"norm.weight is missing; mask_embedding is not known; "
        r"fc.weight got \(32, 63\), expected \(32, 64\)",
    ):
        evaluate(changed, threading.Event(), LateService())


def test_drafter_of_another_place_is_scored_under_its_own_name(home: Path, tmp_path: Path) -> None:
    source = home / "run" / "checkpoints" / "main" / "0" / "step-000000"
    shutil.copytree(source, tmp_path / "theirs")
    settings = {"evaluation__checkpoints": json.dumps([str(tmp_path / "theirs")])}
    evaluate(
        config_of(home, run__directory=tmp_path / "run", **settings),
        threading.Event(),
        LateService(),
    )
    body = report_of(tmp_path / "run" / "evaluations" / "theirs.json")
    assert (body["step"], body["best_acceptance_length"]) == (0, 0.0)


def report_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_arms_temperatures_tags_and_context_lengths_are_told_apart(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "code.jsonl").write_text(
        json.dumps({"prompt": "the quick fox " * 12}) + "\n"
        + json.dumps({"prompt": "the dog", "tag": "odd"}) + "\n",
        encoding="utf-8",
    )  # fmt: skip
    template = (
        "{% if think %}think {% endif %}{{ messages[-1].content }}"
        "{% if add_generation_prompt %} ->{% endif %}"
    )
    shutil.copytree(home / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = f"""
        [run]
        directory = "{home}/run"
        [target]
        model = "{tmp_path}/target"
        chat_template_kwargs = {{ think = false }}
        [evaluation]
        sources = [{{ path = "{home}/prompts.jsonl", tag = "chat" }}, {{ path = "{tmp_path}/code.jsonl" }}]
        temperature = [0, 1]
        max_new_tokens = 12
        batch_size = 3
        context_buckets = [16, 32]
        [evaluation.arms.direct]
        [evaluation.arms.thinking]
        chat_template_kwargs = {{ think = true }}
    """
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    config = load(
        EvaluatorConfig, [tmp_path / "run.toml"],
        [f"run.directory={tmp_path}/run", f'evaluation.checkpoints=["{home}/run/checkpoints/main/0/step-000020"]'],
        environment={},
    )  # fmt: skip
    evaluate(config, threading.Event(), LateService())
    name = "main-0-step-000020"
    reports = {p.stem: report_of(p) for p in (tmp_path / "run" / "evaluations").iterdir()}
    assert set(reports) == {
        name, f"{name}-direct-t1", f"{name}-thinking-t0", f"{name}-thinking-t1"
    }  # fmt: skip
    for report in reports.values():
        assert list(report["by_tag"]) == ["chat", "code", "odd"]
        assert list(report["by_context"]) == ["0-15", "16-31", "32-"]
        passes = sum(len(prompt["emitted"]) for prompt in report["prompts"])
        for parts in (report["by_tag"], report["by_context"]):
            assert sum(part["num_passes"] for part in parts.values()) == passes
            assert all(part["speedup"] > 0 for part in parts.values())
            for part in parts.values():
                replayed = None if report["temperature"] else part["acceptance_length"]
                assert part["replay_acceptance_length"] == replayed
        assert report["is_headline"] == (report["arm"] == "direct" and report["temperature"] == 0)
    direct, thinking = (
        [prompt["num_prompt_tokens"] for prompt in reports[key]["prompts"]]
        for key in (name, f"{name}-thinking-t0")
    )
    assert all(b > a for a, b in zip(direct, thinking, strict=True)), "its template says more"


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
    status = Status(threading.Event())
    assert status.describe().phase == "loading"
    checkpoints = find_checkpoints((), config.run.directory)
    bench = build_bench(config, checkpoints)
    Evaluator(config, bench, status, threading.Event()).run(checkpoints)
    report = status.describe().report
    assert isinstance(report, EvaluatorReport)
    # Two prompts, decoded plainly and with the drafters of two series.
    assert (report.num_done, report.num_total) == (6, 6)
    assert [result.step for result in report.results] == [20, 5]
    assert status.describe().progress > 6, "each pass counts"
