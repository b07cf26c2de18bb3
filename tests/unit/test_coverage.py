"""Prompts are never trained on unless that is asked for."""

import json
import logging

import numpy as np
import pytest

from common.errors import ConfigError
from services.target_server.conversations import Conversations
from services.target_server.coverage import SAMPLES_BEFORE_CHECK, MaskCoverage
from services.target_server.data_config import DataTable
from tests.targets import make_tiny_tokenizer

# A template without headers or prompts: all that is rendered was written by the assistant.
BARE = (
    "{% for message in messages if message.role == 'assistant' %}{{ message.content }}{% endfor %}"
)


def test_coverage_is_supervised_tokens_of_all_tokens():
    coverage = MaskCoverage()
    assert coverage.fraction == 0
    coverage.add(np.array([0, 1, 1], np.uint8))
    coverage.add(np.array([0], np.uint8))
    assert (coverage.num_samples, coverage.num_tokens, coverage.num_supervised) == (2, 4, 2)
    assert str(coverage) == "2 of 4 tokens are supervised (50.0%)"
    coverage.check(allow_full_mask=False, is_over=True)


def test_a_full_mask_is_refused_early_and_at_the_end_unless_allowed():
    coverage = MaskCoverage()
    for _ in range(SAMPLES_BEFORE_CHECK - 1):
        coverage.add(np.ones(2, np.uint8))
        coverage.check(allow_full_mask=False, is_over=False)
    coverage.check(allow_full_mask=True, is_over=True)
    with pytest.raises(ConfigError, match=r"data\.allow_full_mask"):
        coverage.check(allow_full_mask=False, is_over=True)
    coverage.add(np.ones(2, np.uint8))
    with pytest.raises(ConfigError, match="all 128 tokens of 64 samples"):
        coverage.check(allow_full_mask=False, is_over=False)
    coverage.add(np.zeros(1, np.uint8))
    coverage.check(allow_full_mask=False, is_over=True)


def test_a_pass_reports_its_coverage_and_refuses_a_full_one(tmp_path, caplog):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the fox"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")

    def run(template=None, **settings):
        table = DataTable(path=path, row_tokens=128, **settings)
        tokenizer = make_tiny_tokenizer(template) if template else make_tiny_tokenizer()
        source = Conversations(table, tokenizer, {}, seed=0)
        [sample] = source.samples(0)
        return sample, source.counts.coverage

    with caplog.at_level(logging.INFO):
        sample, coverage = run()
    assert coverage.fraction == sample.loss_mask.mean()
    assert f"data epoch 0: {coverage}" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.allow_full_mask"):
        run(BARE)
    assert run(BARE, allow_full_mask=True)[1].fraction == 1
