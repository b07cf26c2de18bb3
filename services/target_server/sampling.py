"""Chooses the next token of each row of a batch by the [generation] table."""

from torch import Tensor

from common.target.sampling import pick
from services.target_server.generation_config import GenerationTable


def choose(logits: Tensor, uniforms: Tensor, table: GenerationTable) -> Tensor:
    """Return a token id for each row: the likeliest at temperature 0, or else a sampled one.

    Args:
        logits: [rows, V].
        uniforms: [rows] float64 in [0, 1).
    """
    if table.temperature == 0:
        return logits.argmax(-1)
    token_ids, shares = _candidates(logits.float() / table.temperature, table)
    places = pick(shares, uniforms)
    return places if token_ids is None else token_ids.gather(-1, places[:, None])[:, 0]


def _candidates(logits: Tensor, table: GenerationTable) -> tuple[Tensor | None, Tensor]:
    """Return the tokens to choose from (None: every id in order) and their probabilities."""
    if table.top_k == 0 and table.top_p == 1:
        return None, logits.softmax(-1)
    count = min(table.top_k or logits.shape[-1], logits.shape[-1])
    best, token_ids = logits.topk(count, dim=-1)
    shares = best.softmax(-1)
    # A token stays where the likelier ones before it have less than top_p; the first always does.
    before = shares.cumsum(-1) - shares
    return token_ids, shares.masked_fill(before >= table.top_p, 0.0)
