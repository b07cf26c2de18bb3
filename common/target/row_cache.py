"""A target over many sequences, each of which goes on at its own pace over fixed buffers.

Column j of a row of the cache holds position j. A token at position p sees columns up to p, whose
own is written in the same pass, so what lies behind it is noise that nothing sees: to forget tokens
is to go on from an earlier position. Sliding layers keep all columns and are masked to their window.
The last column is where the padding of prompts goes.

b rows of a pass, q tokens of each, C columns, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from common.errors import ConfigError
from common.target.turns import pad_left

PADDING = -1
"""Position of a token that nothing may see."""
_KINDS = ("full_attention", "sliding_attention")
_UNBOUNDED = 1 << 30


def check_can_forget(model: PreTrainedModel) -> None:
    """Refuse a target whose layers cannot forget rejected drafts."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - set(_KINDS))
    if others:
        raise ConfigError(
            f"target.model of type {model.config.model_type!r}: got layers of {', '.join(others)}, "
            f"expected {' or '.join(_KINDS)}; a state that cannot be rolled back cannot "
            f"verify drafts here: evaluate in the serving engine"
        )


class TargetRows:
    """A target and what it has seen of each row. Tokens of a pass stand at explicit positions."""

    def __init__(self, model: PreTrainedModel, num_rows: int, num_columns: int) -> None:
        self._model = model
        self._cache = _RowCache(model, num_rows, num_columns)

    def start(self, prompts: list[list[int]], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Begin rows [b] anew; return the logits [b, V] behind the prompts and positions [b, q].

        Prompts are padded on the left, to the q of the longest.
        """
        token_ids, is_prompt = (part.to(rows.device) for part in pad_left(prompts, pad=0))
        positions = (is_prompt.cumsum(-1) - 1).where(is_prompt.bool(), PADDING)
        self._cache.write_prompts(rows, positions)
        mask = self._cache.mask(positions, positions, self._model.dtype)
        return self._run(token_ids, positions, mask, logits_to_keep=1)[:, -1], positions

    def go_on(self, token_ids: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """Run the first b rows' tokens [b, q] at positions [b, q]; return their logits [b, q, V].

        Args:
            num_columns: as many as the positions need; any more change nothing.
        """
        self._cache.write_next(positions, num_columns)
        columns = torch.arange(num_columns, device=positions.device)[None]
        mask = self._cache.mask(positions, columns, self._model.dtype)
        return self._run(token_ids, positions, mask, logits_to_keep=0)

    def move(self, source: int, to: int) -> None:
        """Copy what was seen of one row over another's."""
        for layer in self._cache.layers:
            layer.keys[to] = layer.keys[source]
            layer.values[to] = layer.values[source]

    def _run(self, token_ids: Tensor, positions: Tensor, mask: Any, logits_to_keep: int) -> Tensor:
        return self._model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions.clamp_min(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits


class _Places:
    """Where the layers of a cache write in the pass under way, and what they give back."""

    rows: Tensor  # [b]
    columns: Tensor  # [b, q]
    num_columns: int
    """Columns that are read; 0 where the pass reads its own tokens alone."""


class _RowLayer(StaticLayer):
    def __init__(self, num_rows: int, num_columns: int, places: _Places) -> None:
        super().__init__(max_cache_len=num_columns)
        self._num_rows = num_rows
        self._places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = (self._num_rows, -1, -1, -1)
        super().lazy_initialization(key_states[:1].expand(rows), value_states[:1].expand(rows))

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [b, heads, q, d] where the pass says; return what its tokens may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self._places
        rows = places.rows[:, None]
        self.keys[rows, :, places.columns] = key_states.transpose(1, 2)
        self.values[rows, :, places.columns] = value_states.transpose(1, 2)
        if not places.num_columns:
            return key_states, value_states
        num_rows = len(key_states)
        return tuple(x[:num_rows, :, : places.num_columns] for x in (self.keys, self.values))

    def get_seq_length(self) -> int:
        """Nothing may derive positions from a length that differs by row."""
        return 0


class _RowCache(Cache):
    def __init__(self, model: PreTrainedModel, num_rows: int, num_columns: int) -> None:
        self._places = _Places()
        self._last_column = num_columns - 1
        # It knows which layers slide, and how far.
        layers = StaticCache(config=model.config, max_cache_len=_UNBOUNDED).layers
        self._windows = {
            _KINDS[layer.is_sliding]: layer.max_cache_len if layer.is_sliding else _UNBOUNDED
            for layer in layers
        }
        super().__init__([_RowLayer(num_rows, num_columns, self._places) for _ in layers])

    def write_prompts(self, rows: Tensor, positions: Tensor) -> None:
        """Have the next pass begin rows [b] with tokens at positions [b, q]."""
        self._places.rows = rows
        self._places.columns = positions.where(positions != PADDING, self._last_column)
        self._places.num_columns = 0

    def write_next(self, positions: Tensor, num_columns: int) -> None:
        """Have the next pass add positions [b, q] to the first b rows and read `num_columns`."""
        self._places.rows = torch.arange(len(positions), device=positions.device)
        self._places.columns = positions
        self._places.num_columns = num_columns

    def mask(self, positions: Tensor, keys: Tensor, dtype: torch.dtype) -> Any:
        """Return what is added to scores [b, 1, q, k] of positions [b, q] and key positions
        [b or 1, k]: one tensor, or one a kind where the target has both kinds of layers."""
        masks = {
            kind: _mask(positions[:, None, :, None], keys[:, None, None], window, dtype)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _mask(query: Tensor, key: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    is_visible = (key <= query) & (key != PADDING) & (key > query - window)
    # Not minus infinity: padding sees nothing, and must not become NaN.
    return torch.where(is_visible, 0.0, torch.finfo(dtype).min).to(dtype)
