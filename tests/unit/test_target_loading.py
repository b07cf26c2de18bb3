"""A target is described from its config, and what does not fit is refused with the way out."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.shared import TargetTable
from common.errors import ConfigError
from common.target.loading import (
    default_target_layer_ids,
    describe_target,
    load_target,
    load_tokenizer,
    resolve_mask_token_id,
    resolve_target_layer_ids,
)
from common.target.weights import load_decoder_layers, load_embedding_and_head
from tests.targets import NUM_LAYERS, VOCAB_SIZE, make_tiny_target


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("llama"))


def table_of(path, **settings):
    return TargetTable(model=str(path), dtype="float32", **settings)


def rewrite_weights(path, change):
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})


def test_description_comes_from_the_config(llama):
    target = describe_target(table_of(llama))
    assert (target.model_type, target.num_layers, target.hidden_size) == ("llama", NUM_LAYERS, 32)
    assert (target.num_heads, target.num_kv_heads, target.head_dim) == (4, 2, 8)
    assert (target.vocab_size, target.intermediate_size) == (VOCAB_SIZE, 64)
    assert target.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert target.eos_token_ids == (2,)


def test_target_is_loaded_frozen_in_its_dtype(llama):
    model = load_target(table_of(llama).model_copy(update={"dtype": "bfloat16"}), "cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_fingerprint_follows_weights_and_config(tmp_path):
    path = make_tiny_target(tmp_path / "a")
    before = describe_target(table_of(path)).fingerprint
    assert describe_target(table_of(make_tiny_target(tmp_path / "b"))).fingerprint == before
    other = make_tiny_target(tmp_path / "c", seed=1)
    assert describe_target(table_of(other)).fingerprint != before
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert describe_target(table_of(path)).fingerprint != before


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such-model", "no such folder"),
        ("/no/such/folder", "no such folder"),
        (__file__, r"expected a model folder or a \.gguf file"),
        (str(Path(__file__).parent), r"no config\.json"),
    ],
)
def test_missing_model_is_a_config_error(model, message):
    with pytest.raises(ConfigError, match=rf"target\.model.*{message}"):
        describe_target(table_of(model))


def test_missing_weights_are_a_config_error(tmp_path):
    path = make_tiny_target(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no 'model\.safetensors'"):
        describe_target(table_of(path))


def test_tokenizer_without_chat_template_is_a_config_error(tmp_path):
    path = make_tiny_target(tmp_path)
    (path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(table_of(path))


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(16, (1, 4, 7, 10, 13)), (24, (1, 6, 11, 16, 21)), (28, (1, 7, 13, 19, 25)),
     (36, (1, 9, 17, 25, 33)), (48, (1, 12, 23, 34, 45))],
)  # fmt: skip
def test_default_layer_ids_are_those_of_published_drafters(num_layers, expected):
    assert default_target_layer_ids(num_layers, 5) == expected
    assert resolve_target_layer_ids(table_of("unused"), num_layers) == expected
    assert default_target_layer_ids(num_layers, 1) == (num_layers // 2,)


def test_listed_layer_ids_are_taken_as_they_are():
    assert resolve_target_layer_ids(table_of("unused", target_layer_ids=(0, 4, 34)), 36) == (
        0,
        4,
        34,
    )


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ((1, 36), "out of range"),
        ((-1, 3), "out of range"),
        ((1, 35), "last layer"),
        ((3, 3), "twice"),
        ((5, 3), "do not rise"),
    ],
)
def test_impossible_layer_ids_are_refused(ids, problem):
    with pytest.raises(ConfigError, match=rf"target\.target_layer_ids.*{problem}.*0 to 34"):
        resolve_target_layer_ids(table_of("unused", target_layer_ids=ids), 36)


def test_shallow_target_is_refused_with_the_number_that_fits():
    with pytest.raises(ConfigError, match=r"num_aux_layers=5.*too\s+shallow.*num_aux_layers=2"):
        resolve_target_layer_ids(table_of("unused"), 5)
    with pytest.raises(ConfigError, match=r"num_aux_layers=5.*shallow"):
        resolve_target_layer_ids(table_of("unused"), 1)


def test_mask_token_is_a_row_that_no_token_uses():
    assert resolve_mask_token_id(table_of("unused"), 280, 300) == 280
    assert resolve_mask_token_id(table_of("unused", mask_token_id=7), 300, 300) == 7
    with pytest.raises(ConfigError, match=r"no spare row; set target\.mask_token_id"):
        resolve_mask_token_id(table_of("unused"), 300, 300)
    for chosen in (300, -2):
        with pytest.raises(ConfigError, match="expected 0 to 299"):
            resolve_mask_token_id(table_of("unused", mask_token_id=chosen), 280, 300)


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_equal_the_models(tmp_path, is_tied):
    path = make_tiny_target(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    model = load_target(table_of(path), "cpu")
    tables = load_embedding_and_head(table_of(path), "cpu", torch.float32)
    assert torch.equal(tables.embedding, model.get_input_embeddings().weight)
    assert torch.equal(tables.head, model.get_output_embeddings().weight)
    assert (tables.embedding is tables.head) == is_tied


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_tables_are_found_behind_the_prefixes_of_larger_models(tmp_path, prefix):
    path = make_tiny_target(tmp_path)
    expected = load_file(path / "model.safetensors")
    rewrite_weights(
        path, lambda found: {name.replace("model.", prefix): part for name, part in found.items()}
    )
    tables = load_embedding_and_head(table_of(path), "cpu", torch.float32)
    assert torch.equal(tables.embedding, expected["model.embed_tokens.weight"])
    assert torch.equal(tables.head, expected["lm_head.weight"])
    layers = load_decoder_layers(table_of(path), (2,), device="cpu", dtype=torch.float32)
    name = "layers.2.mlp.up_proj.weight"
    assert torch.equal(layers[name], expected[f"model.{name}"])


def test_missing_head_of_an_untied_model_is_a_config_error(tmp_path):
    path = make_tiny_target(tmp_path)
    rewrite_weights(
        path, lambda found: {n: part for n, part in found.items() if n != "lm_head.weight"}
    )
    with pytest.raises(ConfigError, match="no output head"):
        load_embedding_and_head(table_of(path), "cpu", torch.float32)


def test_decoder_layers_come_with_the_final_norm_and_nothing_else(llama):
    layers = load_decoder_layers(table_of(llama), (1, 4), device="cpu", dtype=torch.float32)
    expected = load_target(table_of(llama), "cpu").model.state_dict()
    wanted = ("layers.1.", "layers.4.", "norm.")
    assert set(layers) == {name for name in expected if name.startswith(wanted)}
    for name, part in layers.items():
        assert torch.equal(part, expected[name])


def test_decoder_layer_that_the_target_lacks_is_a_config_error(llama):
    with pytest.raises(ConfigError, match=r"layers\.17\."):
        load_decoder_layers(table_of(llama), (1, 17), device="cpu", dtype=torch.float32)


def test_gguf_target_equals_what_transformers_loads(tmp_path):
    table = table_of(write_gguf(tmp_path / "tiny.gguf"))
    target = describe_target(table)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (3, 32, 40)
    model = load_target(table, "cpu")
    tables = load_embedding_and_head(table, "cpu", torch.float32)
    assert torch.equal(tables.embedding, model.get_input_embeddings().weight)
    assert tables.head is tables.embedding
    layers = load_decoder_layers(table, (1,), device="cpu", dtype=torch.float32)
    q_proj = model.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(layers["layers.1.self_attn.q_proj.weight"], q_proj)


def write_gguf(path):
    """Write a random Llama of 3 layers with a Q8_0 embedding, tied, and a vocabulary of 40."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(40)])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (40, 32), "output_norm": (32,)}
    for layer in range(3):
        shapes |= {
            f"blk.{layer}.attn_q": (32, 32), f"blk.{layer}.attn_k": (16, 32),
            f"blk.{layer}.attn_v": (16, 32), f"blk.{layer}.attn_output": (32, 32),
            f"blk.{layer}.ffn_gate": (64, 32), f"blk.{layer}.ffn_up": (64, 32),
            f"blk.{layer}.ffn_down": (32, 64), f"blk.{layer}.attn_norm": (32,),
            f"blk.{layer}.ffn_norm": (32,),
        }  # fmt: skip
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if name == "token_embd":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
