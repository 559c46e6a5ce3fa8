"""A YAML file gives values to flags that the command line does not give; what no flag takes is named in one line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.yaml_settings import file_named, take_over

FILE = """
language_model:
  num_layers: 24
  activation_func: swiglu
  layernorm_epsilon: 1.e-6
  num_moe_experts: 8
  persist_layer_norm: True
  init_method: null
  moe_router_load_balancing_type: aux_loss
  params_dtype: null
model_parallel:
  bf16: True
lr: 1e-4
rampup_batch_size: [32, 32, 6400]
data_path: ${LIFTED_DATA}/text
train_iters: null
position_embedding_type: rope
"""


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Some of Megatron's flags."""
    made = argparse.ArgumentParser()
    made.add_argument("--num-layers", type=int)
    made.add_argument("--swiglu", action="store_true")
    made.add_argument("--norm-epsilon", type=float, default=1e-5, dest="layernorm_epsilon")
    made.add_argument("--num-experts", type=int)
    made.add_argument("--no-persist-layer-norm", action="store_true")
    made.add_argument("--moe-router-load-balancing-type", nargs="+", choices=["aux_loss", "none"])
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--lr", type=float)
    made.add_argument("--rampup-batch-size", nargs=3, type=int)
    made.add_argument("--data-path", nargs="*")
    made.add_argument("--train-iters", type=int, default=7)
    made.add_argument("--position-embedding-type", choices=["rope", "none"])
    made.add_argument("--yaml-cfg")
    return made


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIFTED_DATA", "/data")
    path = tmp_path / "settings.yaml"
    path.write_text(FILE)
    return path


def test_the_command_line_has_precedence(parser: argparse.ArgumentParser, written: Path) -> None:
    words = ["--elastic", "--yaml-cfg", str(written), "--num-layers", "2"]
    assert file_named(words) == file_named(["--elastic", f"--yaml-cfg={written}"]) == str(written)
    assert file_named(words[1:]) is None, "without --elastic Megatron reads the file"
    assert take_over(parser, str(written)) == ()
    found = vars(parser.parse_args(words[1:]))
    expected: dict[str, Any] = {
        "num_layers": 2,
        "swiglu": True,
        "layernorm_epsilon": 1e-6,
        "num_experts": 8,
        "no_persist_layer_norm": False,
        "moe_router_load_balancing_type": ["aux_loss"],
        "bf16": True,
        "lr": 1e-4,
        "rampup_batch_size": [32, 32, 6400],
        "data_path": ["/data/text"],
        "train_iters": 7,
        "position_embedding_type": "rope",
        "yaml_file": str(written),
        "yaml_cfg": None,
    }
    assert found == expected


def test_what_no_flag_is_named_is_told_in_one_line(parser: argparse.ArgumentParser, written: Path) -> None:
    written.write_text("num_layer: 24\nonnx_safe: null\nfp8_wgrad: True\n")
    (warning,) = take_over(parser, str(written))
    assert "num_layer, fp8_wgrad" in warning and "is num_layer meant to be num_layers?" in warning
    assert "onnx_safe" not in warning


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_layers: many", "--num-layers takes a number, not many"),
        ("bf16: yes please", "bf16: yes please is neither true nor false"),
        ("position_embedding_type: rotary", "--position-embedding-type takes one of rope, none, not rotary"),
        ("activation_func: relu", "activation_func relu is not one of swiglu, squaredrelu, gelu"),
        ("init_method: ones", "init_method ones is not xavier_uniform"),
        ("data_path: ${NOBODY_SET_THIS}", "no variable NOBODY_SET_THIS: export it"),
        ("elastic_mirrors: 2", "give --elastic-mirrors on the command line"),
        ("a: b: c", "mapping values are not allowed here"),
        ("- 1", "expected names with values"),
    ],
)
def test_a_bad_file_is_one_line(parser: argparse.ArgumentParser, written: Path, text: str, words: str) -> None:
    written.write_text(text)
    with pytest.raises(BadInput) as caught:
        take_over(parser, str(written))
    assert words in str(caught.value) and "\n" not in str(caught.value) and "--yaml-cfg" in str(caught.value)


def test_a_missing_file_is_one_line(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--yaml-cfg .*none\.yaml: .*No such file"):
        take_over(parser, str(tmp_path / "none.yaml"))
