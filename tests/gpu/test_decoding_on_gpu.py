"""On a GPU a pass over a batch is compiled once, replayed, and emits what plain decoding emits."""

import threading
from pathlib import Path

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
from tests.parity.test_compiled_decoding import NUM_COLUMNS, NUM_LAYERS, NUM_ROWS, PROMPTS, SLIDING
from tests.targets import VOCAB_SIZE, make_tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("qwen3", SLIDING)], ids=["llama", "sliding"]
)
def test_compiled_passes_equal_plain_decoding_and_compile_once(
    tmp_path: Path, family: str, overrides: dict
) -> None:
    make_tiny_target(tmp_path, family, num_hidden_layers=NUM_LAYERS, **overrides)
    texts = {}
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    spec = make_spec(
        hidden_size=32, vocab_size=VOCAB_SIZE, num_target_layers=NUM_LAYERS,
        target_layer_ids=(0, 1), mask_token_id=VOCAB_SIZE - 1, block_size=5,
    )  # fmt: skip
    forget_compiled()
    torch._dynamo.utils.counters.clear()
    for device in ("cpu", "cuda"):
        model = load_target(TargetTable(model=str(tmp_path), dtype="float32"), device)
        tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        plain = Passes(model, num_rows=NUM_ROWS, num_columns=NUM_COLUMNS)
        with FeatureTap(model, spec.target_layer_ids) as tap:
            drafter = make_drafter(spec).to(device).eval().requires_grad_(False)
            rows = DraftRows(drafter, *tables, num_rows=NUM_ROWS, num_columns=NUM_COLUMNS)
            drafting = Passes(
                model, num_rows=NUM_ROWS, num_columns=NUM_COLUMNS, tap=tap, proposer=rows
            )
            for name, passes in (("plain", plain), ("drafting", drafting)):
                decoder = BatchDecoder(passes, TextLimit(frozenset(), 24))
                decoder.warm_up(requests, 4)
                for _ in range(2):
                    found = decoder.decode(requests, threading.Event())
                    assert found is not None
                    texts.setdefault(name, []).append([text.token_ids for text in found])
    first = texts["plain"][0]
    assert all(found == first for each in texts.values() for found in each)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
