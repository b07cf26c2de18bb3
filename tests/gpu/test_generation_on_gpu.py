"""On a GPU the pass of one token is compiled once, and answers equal decoding each prompt alone."""

import threading

import pytest
import torch

from common.config.shared import TargetTable
from common.target.loading import load_target
from services.target_server.generation import AnswerWriter, Request
from services.target_server.generation_config import GenerationTable
from tests.targets import make_tiny_target
from tests.unit.test_generation import greedy, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_batches_equal_plain_decoding_and_compile_once(tmp_path, family):
    path = make_tiny_target(tmp_path / family, family)
    model = load_target(TargetTable(model=str(path), dtype="float32"), "cuda")
    plain = load_target(TargetTable(model=str(path), dtype="float32"), "cpu")
    writer = AnswerWriter(model, GenerationTable(batch_size=4))
    torch._dynamo.utils.counters.clear()
    for lengths in ((3, 40, 17, 1), (9, 9), (60, 2, 5)):
        asked = [Request(ids, 0, 20) for ids in prompts(lengths)]
        answers = writer.answer(asked, threading.Event())
        expected = [greedy(plain, request.token_ids, 20) for request in asked]
        assert [answer.token_ids for answer in answers] == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
