"""Answers from a server over real sockets, whatever the server does on the way."""

import datetime
import gzip
import json
import math
import threading

import pytest

from common.config.loading import load
from common.errors import AnswerError, ConfigError, RowRejectedError
from services.target_server import chat_client
from services.target_server.chat_client import _retry_after
from services.target_server.regenerate import run
from services.target_server.regeneration_config import RegenerateConfig
from services.target_server.replies import read_reply
from tests.bad_server import answer_to, requests_in, serving
from tests.runs import start

MENDED = ("429", "500", "503", "reset", "malformed", "no_choices", "truncated", "slow")


@pytest.fixture(autouse=True)
def no_key_and_no_proxy(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def user(text):
    return {"role": "user", "content": text}


def old(text="OLD", **keys):
    return {"role": "assistant", "content": text, **keys}


def prompts_file(folder, conversations):
    lines = [json.dumps({"id": key, "messages": m}) for key, m in conversations.items()]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def regenerate(folder, address, *settings):
    assignments = [
        f"regeneration.server={address}",
        f"regeneration.prompts={folder / 'prompts.jsonl'}",
        f"regeneration.output={folder / 'output.jsonl'}",
        "regeneration.backoff_seconds=0.01",
        "regeneration.concurrency=4",
        *settings,
    ]
    summary = run(load(RegenerateConfig, [], assignments, {}), threading.Event())
    return read(folder / "output.jsonl"), summary


def read(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def many(count=12):
    return {f"p{number}": [user(f"question {number}")] for number in range(count)}


def test_every_fault_that_passes_is_waited_out(tmp_path):
    prompts_file(tmp_path, many())
    with serving(tmp_path, *MENDED) as address:
        rows, summary = regenerate(tmp_path, address, "regeneration.max_attempts=9")
    for key, messages in many().items():
        assert rows[key]["messages"] == [*messages, answer_to(messages)[0]]
    assert summary["answered"] == len(rows) == 12
    assert summary["tokens"] == 5 * 12
    assert summary["finish_reasons"] == {"stop": 12}
    asked = requests_in(tmp_path)
    assert {entry["fault"] for entry in asked} == set(MENDED)
    assert len(asked) == 12 * len(MENDED), "the slow one is an answer"


def test_a_retry_after_holds_back_every_request(tmp_path):
    prompts_file(tmp_path, many(1))
    with serving(tmp_path, "wait_429") as address:
        regenerate(tmp_path, address)
    first, second = requests_in(tmp_path)
    assert second["at"] - first["at"] >= 1.0


def test_retry_after_has_seconds_or_a_date():
    assert _retry_after("2.5") == 2.5
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert _retry_after("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9
    assert [_retry_after(text) for text in ("", "soon", "-1", "nan", "inf")] == [0] * 5


def test_an_answer_that_takes_too_long_is_asked_for_again(tmp_path):
    prompts_file(tmp_path, many(2))
    with serving(tmp_path, "hang") as address:
        rows, _ = regenerate(tmp_path, address, "regeneration.timeout_seconds=0.5")
    assert len(rows) == 2
    assert [entry["fault"] for entry in requests_in(tmp_path)].count("hang") == 2


def test_turns_are_written_in_order_each_behind_the_answers_before_it(tmp_path):
    system = {"role": "system", "content": "be kind"}
    messages = [system, old("greeting"), user("one"), old(), old("again"), user("two"), old()]
    prompts_file(tmp_path, {"m": messages})
    with serving(tmp_path) as address:
        rows, _ = regenerate(tmp_path, address)
    first = [system, user("one")]
    second = [*first, answer_to(first)[0], user("two")]
    assert rows["m"]["messages"] == [*second, answer_to(second)[0]]
    assert [entry["body"]["messages"] for entry in requests_in(tmp_path)] == [first, second]


def test_a_turn_that_was_cut_or_that_calls_a_tool_ends_the_conversation(tmp_path):
    calls = old(None, tool_calls=[{"function": {"name": "old"}}])
    tool = {"role": "tool", "content": "42"}
    prompts_file(tmp_path, {
        "cut": [user("length"), old(), user("two"), old()],
        "tool": [user("tool_calls"), calls, tool, old()],
        "talk": [user("no call"), calls, tool, old()],
    })  # fmt: skip
    with serving(tmp_path) as address:
        rows, _ = regenerate(tmp_path, address)
    reasons = {key: row["finish_reason"] for key, row in rows.items()}
    assert reasons == {"cut": "length", "tool": "tool_calls", "talk": "stop"}
    assert {len(row["messages"]) for row in rows.values()} == {2}
    assert rows["tool"]["messages"][-1]["tool_calls"][0]["function"]["name"] == "look"
    assert rows["tool"]["messages"][-1]["content"] == ""


def test_reasoning_is_kept_under_one_name(tmp_path):
    prompts_file(tmp_path, {"a": [user("think")], "b": [user("reason")], "c": [user("plain")]})
    with serving(tmp_path) as address:
        rows, _ = regenerate(tmp_path, address)
    found = {key: row["messages"][-1].get("reasoning_content") for key, row in rows.items()}
    assert found == {"a": "thought of think", "b": "reasoned on reason", "c": None}


def test_finish_reasons_that_are_not_kept_go_to_a_file_beside_it_and_are_not_asked_again(tmp_path):
    asked = {"a": [user("length")], "b": [user("content_filter")], "c": [user("plain")]}
    prompts_file(tmp_path, asked)
    settings = ('regeneration.keep_finish_reasons=["stop"]',)
    with serving(tmp_path) as address:
        rows, summary = regenerate(tmp_path, address, *settings)
        _, again = regenerate(tmp_path, address, *settings)
    assert set(rows) == {"c"}
    assert set(read(tmp_path / "output.jsonl.left_out")) == {"a", "b"}
    assert summary["finish_reasons"] == {"length": 1, "content_filter": 1, "stop": 1}
    assert again["answered"] == 0
    assert again["answered_before"] == 3
    assert len(requests_in(tmp_path)) == 3


def test_tools_tags_and_settings_travel(tmp_path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"id": "a", "prompt": "plain", "tools": tools, "tag": 3}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    with serving(tmp_path) as address:
        rows, _ = regenerate(
            tmp_path, address, "generation.temperature=0.7", "generation.top_p=0.8",
            "generation.top_k=20", "generation.max_new_tokens=77", "target.model=unused",
            "target.chat_template_kwargs.enable_thinking=false", "regeneration.request.min_p=0.1",
        )  # fmt: skip
    body = requests_in(tmp_path)[0]["body"]
    assert 0 <= body.pop("seed") < 1 << 31
    assert body == {
        "model": "the-model", "messages": [user("plain")], "tools": tools, "temperature": 0.7,
        "top_p": 0.8, "top_k": 20, "max_tokens": 77, "min_p": 0.1,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert rows["a"]["tools"] == tools
    assert rows["a"]["tag"] == 3


def test_a_refused_conversation_is_counted_and_the_run_goes_on(tmp_path):
    prompts_file(tmp_path, many(3))
    with serving(tmp_path, "400") as address:
        rows, summary = regenerate(tmp_path, address)
    assert rows == {}
    assert summary["skipped"] == {"refused_400": 3}


def test_a_server_that_refuses_all_ends_the_run(tmp_path):
    prompts_file(tmp_path, many(40))
    with serving(tmp_path, "422") as address, pytest.raises(ConfigError, match=r"fault 422"):
        regenerate(tmp_path, address)
    assert len(requests_in(tmp_path)) < 40


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("401", ["401", "environment variable OPENAI_API_KEY"]),
        ("403", ["403", "api_key_variable"]),
        ("404", ["404", "/v1/chat/completions", "the-model", "regeneration.server_model"]),
        ("307", ["redirects", "that address itself"]),
    ],
)
def test_what_no_repetition_mends_ends_the_run_at_once(tmp_path, fault, words):
    prompts_file(tmp_path, many(1))
    with serving(tmp_path, fault) as address, pytest.raises(ConfigError) as caught:
        regenerate(tmp_path, address)
    for word in words:
        assert word in str(caught.value)
    assert len(requests_in(tmp_path)) == 1


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key\n")
    prompts_file(tmp_path, many(1))
    with serving(tmp_path, "500", "401") as address, pytest.raises(ConfigError) as caught:
        regenerate(tmp_path, address)
    assert {entry["key"] for entry in requests_in(tmp_path)} == {"Bearer secret-key"}
    assert "secret-key" not in str(caught.value) + caplog.text


def body(message, **keys):
    choice = {"message": message, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], **keys})


@pytest.mark.parametrize(
    "usage", [[1], "x", 7, {"completion_tokens": "5"}, {"completion_tokens": [5]},
              {"completion_tokens": -5}, {"completion_tokens": 5.5}]
)  # fmt: skip
def test_a_usage_of_a_wrong_type_is_ignored(usage):
    reply = read_reply(json.loads(body({"content": "yes"}, usage=usage)))
    assert reply.message == {"role": "assistant", "content": "yes"}
    assert reply.num_tokens == 0


GARBAGE = [
    {"content": 7},
    {"content": ["a"]},
    {"content": "", "reasoning": ""},
    {"content": None},
    {"content": " "},
    {"content": "", "tool_calls": "junk"},
    {"content": "", "tool_calls": [7]},
    {"content": "a", "reasoning": ["b"]},
    {"content": "half \ud83d"},
    {"content": "", "tool_calls": [{"function": {"name": "a", "arguments": {"b": math.nan}}}]},
]


@pytest.mark.parametrize("message", GARBAGE)
def test_an_answer_that_is_none_is_refused(message):
    with pytest.raises(RowRejectedError, match=r"bad_answer|empty_answer"):
        read_reply(json.loads(body(message)))


def test_an_answer_that_is_none_is_asked_for_again(tmp_path):
    prompts_file(tmp_path, many(2))
    with serving(tmp_path, *map(body, GARBAGE)) as address:
        rows, summary = regenerate(tmp_path, address, "regeneration.max_attempts=11")
    for key, messages in many(2).items():
        assert rows[key]["messages"] == [*messages, answer_to(messages)[0]]
    assert summary["skipped"] == {}
    assert len(requests_in(tmp_path)) == 2 * 11


def test_what_is_never_an_answer_is_refused_with_a_reason_and_not_written(tmp_path):
    prompts_file(tmp_path, many(2))
    with serving(tmp_path, body({"content": 7}), body({"content": 7})) as address:
        rows, summary = regenerate(tmp_path, address, "regeneration.max_attempts=2")
        assert rows == {}
        assert summary["skipped"] == {"bad_answer": 2}
        again, _ = regenerate(tmp_path, address, "regeneration.max_attempts=2")
    assert set(again) == {"p0", "p1"}


def test_an_empty_answer_that_was_withheld_is_the_servers_word():
    payload = {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}
    assert read_reply(payload).finish_reason == "content_filter"


HALF = "\\ud83d"


def test_prompts_that_cannot_be_sent_are_skipped_by_reason_every_time(tmp_path, caplog):
    lines = [
        json.dumps({"id": "n", "prompt": "a", "tools": [{"name": "b", "limit": math.nan}]}),
        f'{{"id": "h", "prompt": "half {HALF}"}}',
        f'{{"id": "t", "prompt": "a", "tools": [{{"name": "{HALF}"}}]}}',
        f'{{"id": "e", "prompt": "a", "note": "{HALF}", "score": NaN, "tag": 3}}',
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    with serving(tmp_path) as address:
        for _ in range(2):
            rows, summary = regenerate(tmp_path, address)
            assert set(rows) == {"e"}
            assert rows["e"].keys() == {"id", "messages", "tag", "finish_reason"}
            assert summary["skipped"] == {"bad_tools": 1, "bad_utf8": 2}
    assert summary["answered_before"] == 1
    assert "bad_utf8: 2 (first: h (line 2), t (line 3))" in caplog.text
    assert "column 'score' has values that JSON cannot hold" in caplog.text


def test_parquet_columns_that_json_cannot_hold_are_left_out(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    at = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
    rows = [{"id": str(i), "prompt": "a", "at": at, "raw": b"\xff", "tag": i} for i in range(2)]
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    with serving(tmp_path) as address:
        found, _ = regenerate(tmp_path, address, f"regeneration.prompts={path}")
    assert {key: row["tag"] for key, row in found.items()} == {"0": 0, "1": 1}
    assert found["0"].keys() == {"id", "messages", "tag", "finish_reason"}


@pytest.mark.parametrize("fault", ["echo_401", "echo_400", "echo_500"])
@pytest.mark.parametrize("key", ["secret-key", 'sec/ret"key'])
def test_a_key_that_the_server_echoes_is_hidden(tmp_path, monkeypatch, caplog, fault, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    prompts_file(tmp_path, many(4))
    error = ""
    with serving(tmp_path, fault) as address:
        try:
            regenerate(tmp_path, address, "regeneration.max_attempts=1")
        except (ConfigError, AnswerError) as caught:
            error = str(caught)
    assert requests_in(tmp_path)[0]["key"] == f"Bearer {key}"
    shown = error + caplog.text
    assert "no such key: Bearer ***" in shown
    assert "sec" not in shown.replace("second", "")


def test_an_answer_with_the_key_in_it_is_not_quoted(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    prompts_file(tmp_path, many(2))
    junk = body({"content": "", "tool_calls": "x" * 60 + " secret-key"})
    with serving(tmp_path, junk) as address:
        _, summary = regenerate(tmp_path, address, "regeneration.max_attempts=1")
    assert summary["skipped"] == {"bad_answer": 2}
    assert "secret" not in caplog.text


@pytest.mark.parametrize("key", ["secret\nkey", "secr\u00e9t"])
def test_a_key_that_no_header_can_hold_is_a_config_error(tmp_path, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    prompts_file(tmp_path, many(1))
    with pytest.raises(ConfigError, match="OPENAI_API_KEY has line breaks") as caught:
        regenerate(tmp_path, "http://127.0.0.1:1")
    assert "secr" not in str(caught.value)


@pytest.mark.timeout(60)
def test_a_long_wait_is_capped_and_told_of_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(chat_client, "_LONGEST_PAUSE_SECONDS", 0.4)
    monkeypatch.setattr(chat_client, "_SILENT_PAUSE_SECONDS", 0.3)
    prompts_file(tmp_path, many(6))
    with serving(tmp_path, "day_429") as address:
        rows, _ = regenerate(tmp_path, address)
    assert len(rows) == 6
    assert caplog.text.count("Retry-After 86400 s") == 1
    assert caplog.text.count("before the next try") == 1


def test_a_long_pause_of_a_server_that_fails_is_told_of_once_a_kind(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(chat_client, "_SILENT_PAUSE_SECONDS", 0.0)
    prompts_file(tmp_path, many(3))
    with serving(tmp_path, "500", "503", "malformed") as address:
        regenerate(tmp_path, address)
    assert caplog.text.count("before the next try") == 3


def exit_code(folder, address, log):
    """Regenerate as a process of its own."""
    settings = [
        f"regeneration.server={address}",
        f"regeneration.prompts={folder / 'prompts.jsonl'}",
        f"regeneration.output={folder / 'output.jsonl'}",
    ]
    arguments = [word for setting in settings for word in ("--set", setting)]
    return start("services.target_server.regenerate", *arguments, log=log).wait(60)


def test_a_run_without_any_answer_ends_with_an_error(tmp_path):
    prompts_file(tmp_path, many(6))
    log = tmp_path / "log"
    with serving(tmp_path, "400") as address:
        assert exit_code(tmp_path, address, log) == 1
        assert "none of the prompts has an answer; skipped {'refused_400': 6}" in log.read_text()
        assert exit_code(tmp_path, address, log) == 0, "the server answers the second time"
        prompts_file(tmp_path, many(7))
        assert exit_code(tmp_path, address, log) == 0, "one of seven is refused"


def test_a_server_that_is_gone_ends_the_run_and_what_was_answered_stays(tmp_path):
    prompts_file(tmp_path, many(3))
    with serving(tmp_path) as address:
        regenerate(tmp_path, address)
    prompts_file(tmp_path, many(50))
    with pytest.raises(AnswerError, match="no answer in 2 attempts"):
        regenerate(tmp_path, address, "regeneration.max_attempts=2",
                   "regeneration.server_model=the-model")  # fmt: skip
    assert len(read(tmp_path / "output.jsonl")) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["regeneration.server=http://a:b@host"], "a user or a password"),
        (["regeneration.server=host:80"], "http://127.0.0.1:8000"),
        (['regeneration.server=""'], "nobody to answer"),
        (["regeneration.api_key_variable=RINGDRAFT_KEY"], "records"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path, settings, words):
    prompts_file(tmp_path, many(1))
    with pytest.raises(ConfigError, match=words):
        regenerate(tmp_path, "http://127.0.0.1:1", *settings)


def test_prompts_come_in_every_form_that_data_has(tmp_path):
    rows = [
        {"id": "s", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}],
         "system": "be kind"},
        {"id": "p", "prompt": "two"},
        {"id": "r", "messages": [{"role": "pirate", "content": "three"}]},
        {"id": "i", "input_ids": [1, 2], "loss_mask": [0, 1]},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path) as address:
        found, summary = regenerate(tmp_path, address, f"regeneration.prompts={path}")
    assert set(found) == {"s", "p"}
    assert [m["role"] for m in found["s"]["messages"]] == ["system", "user", "assistant"]
    assert "conversations" not in found["s"]
    assert summary["skipped"] == {"bad_role": 1, "no_messages": 1}
