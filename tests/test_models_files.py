"""Model files: what they need, what they may start from, and what a wrong one says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from op_graphs.model import ModelDescription, ModelError
from op_graphs.presets import PRESET_FOLDER, load_model, model_from_mapping

SMALL = "layers: 2\nhidden_size: 64\nffn_size: 256\nheads: 4\nvocab_size: 1000\n"


def test_a_model_file_needs_five_sizes_and_is_named_after_itself(tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    path.write_text(SMALL)
    assert load_model(path) == ModelDescription("tiny", 2, 64, 256, 4, 4, 16, 1000)
    assert load_model("tiny.yaml", folder=tmp_path).source == str(path)


def test_an_inline_model_can_start_from_a_preset():
    cut = model_from_mapping({"base": "llama3-70b", "layers": 12, "name": "llama3-70b-12"})
    assert cut == replace(load_model("llama3-70b"), layers=12, name="llama3-70b-12")
    unnamed = model_from_mapping({"base": "llama3-70b", "layers": 12})
    assert unnamed.name == "llama3-70b-changed"
    assert unnamed.source.endswith("; changed: layers")


def test_a_base_can_be_a_file_beside_the_scenario_but_not_one_with_a_base(tmp_path: Path):
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "loop.yaml").write_text("base: loop.yaml\n")
    changed = model_from_mapping({"base": "small.yaml", "layers": 3}, folder=tmp_path)
    assert changed == replace(load_model(tmp_path / "small.yaml"), layers=3, name="small-changed")
    with pytest.raises(ModelError, match=r"base: .*loop\.yaml: has a base itself"):
        load_model(tmp_path / "loop.yaml")


def test_a_preset_name_is_taken_in_any_case():
    assert load_model("Llama3-8B") == load_model("llama3-8b")


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("lama3-8b", ["'lama3-8b': no preset and no file of this name", "did you mean llama3-8b"]),
        ("zzz", ["the presets are", "qwen3-32b"]),
        ("", ["no preset and no file"]),
        ("missing.yaml", ["model file missing.yaml: there is no such file"]),
        ("a\0b", ["no preset and no file"]),
        ("x" * 5000, ["no preset and no file"]),
        (str(PRESET_FOLDER), ["is a folder without a config.json"]),
    ],
    ids=["typo", "nothing near", "empty", "no file", "zero byte", "too long", "folder"],
)
def test_a_model_that_is_not_there_names_what_is_near(name: str, messages: list[str]):
    with pytest.raises(ModelError) as error:
        load_model(name)
    assert all(message in str(error.value) for message in messages)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"layer": 3}, "layer: is not a key of a model; did you mean layers?"),
        ({3: 3}, "3: is not a key of a model; the keys are name, layers"),
        ({"layers": "many"}, "layers: must be a whole number from 1 to 10000, not 'many'"),
        ({"layers": 0}, "layers: must be a whole number from 1 to 10000, not 0"),
        ({"layers": True}, "layers: must be a whole number from 1 to 10000, not True"),
        ({"layers": 10**5000}, "not a number of more than 60 digits"),
        (
            {"activation": "swigl"},
            "activation: must be one of swiglu, clamped_swiglu, geglu, gelu, squared_relu, not 'swigl'; did you mean "
            "swiglu?",
        ),
        ({"norm": None}, "norm: must be one of rmsnorm, layernorm, not None"),
        ({"qkv_bias": "yes"}, "qkv_bias: must be true or false, not 'yes'"),
        ({"hidden_dropout": 1.0}, "hidden_dropout: must be a number from 0 to below 1, not 1.0"),
        ({"hidden_dropout": float("nan")}, "hidden_dropout: must be a number from 0 to below 1, not nan"),
        ({"name": ""}, "name: must be a text, not ''"),
        ({"kv_heads": 3}, "kv_heads: 3 does not divide heads 4; the nearest that does is 2"),
        ({"heads": 5}, "heads: 5 does not divide hidden_size 64; give head_size as well"),
        ({"head_size": 15}, "head_size: rotary positions turn pairs of elements, 15 is odd"),
        (
            {"base": "llama3-9b"},
            "base: model 'llama3-9b': no preset and no file of this name; did you mean llama3-8b",
        ),
        ({"base": 8}, "base: must be the name of a preset or a file, not 8"),
    ],
)
def test_a_wrong_value_names_key_value_and_limit(mapping: dict, message: str):
    small = {"layers": 2, "hidden_size": 64, "ffn_size": 256, "heads": 4, "vocab_size": 1000}
    with pytest.raises(ModelError) as error:
        model_from_mapping({**small, **mapping}, where="scenario.yaml: model")
    assert str(error.value).startswith("scenario.yaml: model: ")
    assert message in str(error.value)


def test_all_problems_of_a_file_come_at_once():
    with pytest.raises(ModelError) as error:
        model_from_mapping({"layers": -1, "hiden_size": 64, "heads": 4, "norm": "rms"}, where="m.yaml")
    assert str(error.value).splitlines() == [
        "m.yaml: 6 problems",
        "  layers: must be a whole number from 1 to 10000, not -1",
        "  hiden_size: is not a key of a model; did you mean hidden_size?",
        "  norm: must be one of rmsnorm, layernorm, not 'rms'; did you mean rmsnorm?",
        "  hidden_size: is missing",
        "  ffn_size: is missing",
        "  vocab_size: is missing",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected keys and values such as 'layers: 32', not None"),
        (b"just words", "expected keys and values"),
        (b"- 1\n- 2\n", "expected keys and values"),
        (b"layers: [1\n", "is not valid YAML"),
        (b"a: &x [1, 1]\nb: *x\n", "aliases are not allowed, *x is one"),
        (b"layers: 1\nlayers: 2\n", "the key layers is there twice"),
        (b"[" * 5000, "cannot be read as YAML: RecursionError"),
        (b"layers: " + b"9" * 5000, "m.yaml: "),
        (b"layers: 2024-99-99\n", "cannot be read as YAML: ValueError"),
        (b"!!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        (b"? [1]\n: 2\n", "a key must be one word"),
        (b"\x89PNG\r\n\x1a\n\x00", "is not a text file (byte 0 is not UTF-8)"),
        (b"layers: 1\0\n", "is not a text file (it holds zero bytes)"),
        (b"#" * (2**20 + 1), "is larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_model_gets_one_message(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "m.yaml"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        load_model(path)
    assert message in str(error.value)
    assert len(str(error.value)) < 2000


def test_a_device_is_not_read():
    with pytest.raises(ModelError, match="/dev/zero: is not a regular file"):
        load_model("/dev/zero")
