"""An export loads whole in the published readers and drafts there as it does here, to 1e-4.

Each reader has target, tokens and features in its own way; logits of the same blocks are compared.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config.shared import TargetTable
from common.drafters.dflash.checkpoint import write_drafter
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterSpec
from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.export import export
from common.drafters.dflash.speculators import TargetReference
from common.target.weights import FrozenTables, load_embedding_and_head
from tests.drafters import make_drafter, make_spec
from tests.targets import make_tiny_target

# Warnings of the oracles' own, such as that no flash attention is installed.
pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN, VOCABULARY, WINDOW, NUM_TOKENS = 64, 300, 6, 40
ANCHORS = (1, 5, 6, 23)
SHAPES: dict[str, dict[str, Any]] = {
    "heads as wide as hidden / heads": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16},
    "grouped heads, wider": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32},
    "one key head, block of 16": {
        "num_heads": 6, "num_kv_heads": 1, "head_dim": 8, "block_size": 16
    },
    "scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip
MIXES = {
    "sliding": {"layer_types": (SLIDING_ATTENTION,) * 2, "sliding_window": WINDOW},
    "mixed": {"layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "sliding_window": WINDOW},
}


def oracle(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            name, reason=f"oracle {name.partition('.')[0]} is not installed", exc_type=ImportError
        )


class Case:
    """A drafter beside a tiny target, exported in float32, and the logits that it drafts here."""

    def __init__(self, folder: Path, layout: str, tied: bool = False, **shape: Any) -> None:
        self.target = make_tiny_target(
            folder / "target", hidden_size=HIDDEN, head_dim=16, tie_word_embeddings=tied
        )
        self.spec: DrafterSpec = make_spec(
            hidden_size=HIDDEN, vocab_size=VOCABULARY, num_target_layers=6,
            target_layer_ids=(0, 2, 4), mask_token_id=VOCABULARY - 5, **shape,
        )  # fmt: skip
        drafter = make_drafter(self.spec)
        (folder / "checkpoint").mkdir()
        write_drafter(folder / "checkpoint", drafter.state_dict(), self.spec, "float32")
        self.out = folder / "export"
        reference = TargetReference(str(self.target), ("LlamaForCausalLM",))
        export(folder / "checkpoint", self.out, layout, "float32", reference)
        table = TargetTable(model=str(self.target))
        self.tables: FrozenTables = load_embedding_and_head(table, "cpu", torch.float32)
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY - 30, (NUM_TOKENS,), generator=generator)
        self.features = torch.randn(NUM_TOKENS, 3 * HIDDEN, generator=generator)
        context = DraftContext(drafter.eval(), self.tables.embedding, self.tables.head)
        context.append(self.features)
        anchors = torch.tensor(ANCHORS)
        self.logits = context.propose(self.tokens[anchors], anchors)

    def check(self, logits_of: Callable[[int], Tensor]) -> None:
        """Compare with the logits [S-1, V] that a reader drafts behind each anchor."""
        spread = self.logits.std()
        assert spread > 0.1, "logits that are all alike show nothing"
        for index, anchor in enumerate(ANCHORS):
            with torch.no_grad():
                got = logits_of(anchor)
            torch.testing.assert_close(
                got, self.logits[index], rtol=1e-4, atol=1e-4 * float(spread)
            )

    def block(self, anchor: int) -> Tensor:
        """Return a block's token ids [S]."""
        masks = torch.full((self.spec.block_size - 1,), self.spec.mask_token_id)
        return torch.cat([self.tokens[anchor : anchor + 1], masks])


def load_whole(model_class: Any, folder: Path, **options: Any) -> Any:
    model, report = model_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), f"missing, unexpected or misshaped: {report}"
    return model.eval()


def published_logits(
    case: Case, model: Any, masks: Callable[[int], Any]
) -> Callable[[int], Tensor]:
    """Return what a model of the z-lab interface drafts behind an anchor."""

    def logits_of(anchor: int) -> Tensor:
        final = model(
            position_ids=torch.arange(anchor + case.spec.block_size)[None],
            attention_mask=masks(anchor),
            noise_embedding=case.tables.embedding[case.block(anchor)][None],
            target_hidden=case.features[None, :anchor],
        )
        return final[0, 1:] @ case.tables.head.T

    return logits_of


def masks_of_layers(block_size: int, anchor: int) -> dict[str, Tensor]:
    """Return what each kind of layer sees [1, 1, S, anchor + S], written out."""
    query = torch.arange(anchor, anchor + block_size)[:, None]
    key = torch.arange(anchor + block_size)[None]
    near = (key <= query) & (query - key < WINDOW)
    return {FULL_ATTENTION: torch.ones_like(near)[None, None], SLIDING_ATTENTION: near[None, None]}


@pytest.mark.parametrize("kind", [*SHAPES, *MIXES])
def test_zlab_code_drafts_the_same(tmp_path: Path, kind: str) -> None:
    dflash = oracle("dflash.model")
    case = Case(tmp_path, "zlab", **{**SHAPES, **MIXES}[kind])
    model = load_whole(dflash.DFlashDraftModel, case.out, dtype=torch.float32)
    assert (model.block_size, model.mask_token_id) == (case.spec.block_size, 295)
    assert tuple(model.target_layer_ids) == case.spec.target_layer_ids
    case.check(published_logits(case, model, lambda _: None))


@pytest.mark.parametrize("kind", [*SHAPES, *MIXES])
def test_specforge_code_drafts_the_same(tmp_path: Path, kind: str) -> None:
    specforge = oracle("specforge.modeling.draft.dflash")
    case = Case(tmp_path, "zlab", **{**SHAPES, **MIXES}[kind])
    model = load_whole(specforge.DFlashDraftModel, case.out, dtype=torch.float32)
    assert (model.block_size, model.mask_token_id) == (case.spec.block_size, 295)
    assert tuple(model.target_layer_ids) == case.spec.target_layer_ids
    # It takes its masks from outside.
    size = case.spec.block_size
    case.check(published_logits(case, model, lambda anchor: masks_of_layers(size, anchor)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_speculators_code_drafts_the_same(tmp_path: Path, kind: str, tied: bool) -> None:
    oracle("speculators.utils.loading")
    speculators = oracle("speculators.models.dflash")
    case = Case(tmp_path, "speculators", tied, **SHAPES[kind])
    config = speculators.DFlashSpeculatorConfig.from_pretrained(case.out)
    config.transformer_layer_config._attn_implementation = "eager"  # flex would be compiled
    model = load_whole(speculators.DFlashDraftModel, case.out, config=config, dtype=torch.float32)
    model.load_verifier_weights()  # embedding and head, from the target's own files
    assert model.target_layer_ids == [layer + 1 for layer in case.spec.target_layer_ids]
    loss_mask = torch.zeros(1, NUM_TOKENS)
    loss_mask[:, ANCHORS] = 1
    with torch.no_grad():  # its own blocks, masks and positions, for all anchors at once
        _, logits, *_ = model._backbone_forward(
            hidden_states=case.features[None],
            input_ids=case.tokens[None],
            loss_mask=loss_mask,
            verifier_last_hidden_states=torch.zeros(1, NUM_TOKENS, HIDDEN),
            document_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.int64),
            max_anchors=len(ANCHORS),
        )
    blocks = logits[0].view(len(ANCHORS), case.spec.block_size, -1)
    case.check(lambda anchor: blocks[ANCHORS.index(anchor), 1:])
