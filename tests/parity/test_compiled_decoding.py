"""A pass of fixed shape compiles into one graph that emits what the eager pass emits."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.shared import TargetTable
from common.drafters.dflash.drafting import DraftRows
from common.target.features import FeatureTap
from common.target.loading import load_target
from services.evaluator.compile import forget_compiled
from services.evaluator.decode import BatchDecoder, Request, TextLimit
from services.evaluator.passes import Passes
from tests.drafters import make_drafter, make_spec
from tests.targets import VOCAB_SIZE, make_tiny_target

NUM_LAYERS = 2
NUM_ROWS = 3
NUM_COLUMNS = 128
PROMPTS = [[40, 41, 42, 43], list(range(50, 70)), [260, 7], list(range(100, 150)), [5, 6, 9]]
SLIDING = {
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}


class OneGraph(Passes):
    """As on a GPU, but traced for any device; a graph break is an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_fixed = True
        self._run = torch.compile(self._pass, backend="aot_eager", dynamic=False, fullgraph=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("family", "overrides", "is_sampled"),
    [("llama", {}, True), ("qwen3", SLIDING, False)],
    ids=["llama-sampled", "sliding-greedy"],
)
def test_one_graph_emits_what_the_eager_pass_does(
    tmp_path: Path, family: str, overrides: dict[str, Any], is_sampled: bool
) -> None:
    make_tiny_target(tmp_path, family, num_hidden_layers=NUM_LAYERS, **overrides)
    model = load_target(TargetTable(model=str(tmp_path), dtype="float32"), "cpu")
    spec = make_spec(
        hidden_size=32, vocab_size=VOCAB_SIZE, num_target_layers=NUM_LAYERS,
        target_layer_ids=(0, 1), mask_token_id=VOCAB_SIZE - 1, block_size=3,
    )  # fmt: skip
    drafter = make_drafter(spec).eval().requires_grad_(False)
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    forget_compiled()
    torch._dynamo.utils.counters.clear()

    def decode(kind: type[Passes]) -> list[list[int]]:
        with FeatureTap(model, spec.target_layer_ids) as tap:
            rows = DraftRows(drafter, *tables, num_rows=NUM_ROWS, num_columns=NUM_COLUMNS)
            passes = kind(model, num_rows=NUM_ROWS, num_columns=NUM_COLUMNS, tap=tap, proposer=rows)
            decoder = BatchDecoder(passes, TextLimit(frozenset(), 9), is_sampled=is_sampled)
            decoder.warm_up(requests, 2)
            texts = decoder.decode(requests, threading.Event())
        assert texts is not None
        return [text.token_ids for text in texts]

    assert decode(OneGraph) == decode(Passes)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
