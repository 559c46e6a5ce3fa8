"""Configurations of Megatron-LM keep features and parallel sizes when they get small, and their page is current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.configuration_tables import PAGE, RECORD, counts, losses_of, page
from tools.example_arguments import EXAMPLES, Example
from tools.functional_configs import Job, fault_for
from tools.shrunk_configs import Configuration, Reference, configurations, ranks, shrunk

GIVEN: dict[str, Any] = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--num-layers": 12,
    "--num-layers-per-virtual-pipeline-stage": 2,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--train-iters": 100,
    "--recompute-modules": "[layernorm mlp]",
    "--bf16": True,
    "--save": "${CHECKPOINT_SAVE_PATH}",
    "--data-path": "${DATA_PATH}/text",
    "--attention-dropout": 0.1,
}


def values(words: list[str]) -> dict[str, list[str]]:
    """Flag → its words."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found, "given twice"
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_a_small_configuration_has_the_sizes_and_features_of_the_large_one() -> None:
    case = Configuration("gpt/x", "regular", GIVEN)
    small = values(shrunk(case, "/folder", "/data"))
    assert ranks(case) == 8
    assert small["--tensor-model-parallel-size"] == small["--pipeline-model-parallel-size"] == ["2"]
    assert small["--num-layers"] == ["6"] and small["--num-layers-per-virtual-pipeline-stage"] == ["1"], "3 chunks"
    assert small["--recompute-modules"] == ["layernorm", "mlp"] and small["--bf16"] == []
    assert small["--save"] == ["/folder/save"] and small["--data-path"] == ["/data"]
    assert small["--attention-dropout"] == small["--num-workers"] == ["0"]
    batch, micro = int(small["--global-batch-size"][0]), int(small["--micro-batch-size"][0])
    assert batch // micro // 2 % 2 == 0, "an interleaved pipeline takes micro-batches in groups of its stages"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"--context-parallel-size": 4}, 8),
        ({"--pipeline-model-parallel-size": 1, "--tensor-model-parallel-size": 1}, 2),
        ({"--pipeline-model-parallel-size": 1, "--expert-model-parallel-size": 2}, 4),
        (
            {
                "--pipeline-model-parallel-size": 1,
                "--expert-model-parallel-size": 2,
                "--num-distributed-optimizer-instances": 2,
            },
            8,
        ),
    ],
)
def test_ranks_are_two_replicas_and_at_most_eight(more: dict[str, Any], expected: int) -> None:
    assert ranks(Configuration("gpt/x", "regular", {**GIVEN, **more})) == expected


def test_plain_megatron_trains_the_same_samples_on_ranks_that_each_have_the_whole_sequence() -> None:
    shared = {"--context-parallel-size": 2, "--cp-comm-type": "a2a", "--expert-model-parallel-size": 2}
    case = Configuration("gpt/x", "regular", {**GIVEN, **shared, "--async-save": True})
    reference = Reference.of(case)
    small = values(shrunk(case, "/folder", "/data"))
    plain = values(shrunk(case, "/folder", "/data", reference.without))
    assert (ranks(case), reference.ranks, reference.begins) == (8, 4, True)
    assert small.keys() - plain.keys() == {*shared, "--async-save", "--save"}
    assert all(plain[flag] == small[flag] for flag in plain)


def test_plain_megatron_gathers_all_tokens_where_ranks_cut_experts() -> None:
    """gloo gathers equal tensors only, and Megatron's default is the dispatcher with equal ones."""
    given = {**GIVEN, "--moe-token-dispatcher-type": "alltoall"}
    assert "--moe-token-dispatcher-type" in Reference.of(Configuration("moe/x", "regular", given)).without
    whole = Reference.of(Configuration("moe/x", "regular", {**given, "--expert-tensor-parallel-size": 1}))
    assert "--moe-token-dispatcher-type" not in whole.without and not whole.begins


def test_a_short_run_in_fp16_skips_no_step() -> None:
    assert "--initial-loss-scale" not in shrunk(Configuration("gpt/x", "regular", GIVEN), "/folder", "/data")
    small = values(shrunk(Configuration("gpt/x", "regular", {**GIVEN, "--fp16": True}), "/folder", "/data"))
    assert float(small["--initial-loss-scale"][0]) <= 2.0**15, "half of the largest number of the type"


def test_a_checkout_is_read_and_other_scripts_are_told_apart(tmp_path: Path) -> None:
    for name in ("gpt/trains", "moe/gpt_grpo_basic"):
        folder = tmp_path / "tests/functional_tests/test_cases" / name
        folder.mkdir(parents=True)
        (folder / "model_config.yaml").write_text(yaml.safe_dump({"TEST_TYPE": "regular", "MODEL_ARGS": GIVEN}))
    trains, other = configurations(tmp_path)
    assert (trains.name, trains.given, trains.other_script) == ("gpt/trains", GIVEN, "")
    assert other.other_script


def test_the_fault_of_a_configuration_is_always_the_same() -> None:
    assert fault_for("gpt/x", 4) == fault_for("gpt/x", 4)
    assert len({fault_for(f"gpt/{number}", 4) for number in range(20)}) > 10


def test_a_failed_job_is_told_by_its_last_reason() -> None:
    said = ["could not find arguments in the checkpoint", "[launch] job 1 ends with exit status 5", "    | goodput 51%"]
    why = "[launch] step 5: no rank makes progress"
    assert Job(5, [*said, why], Path()).failure == f"exit status 5: {why}"
    assert Job(1, ["error: a", "b"], Path()).failure == "exit status 1: error: a"
    assert Job(-11, [], Path()).failure == "exit status -11: "


def test_what_an_example_loses_is_what_its_start_refuses() -> None:
    base = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --bf16 --async-save "
    assert losses_of(Example("m", "s", 8, base)) == ((), ("--async-save",))
    (line,), _ = losses_of(Example("m", "s", 8, base + "--optimizer lion"))
    assert line.startswith("--optimizer ")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(json.loads(RECORD.read_text())), "python -m tools.configuration_tables"
    assert len({example.model for example in EXAMPLES}) == len(EXAMPLES)


def test_a_refused_configuration_counts_where_plain_megatron_runs_it() -> None:
    about = {"deviation": 0.0, "refused": ["--x is not supported"]}
    rows = [{"status": "ran", "deviation": 1e-7}, {"status": "not run"}]
    rows += [about | {"status": "refused", "plain": plain} for plain in ("", "ran", "exit status 1: no GPU")]
    said = counts({"configurations": rows, "other_scripts": {}})
    assert "Of those tried that a CPU can run at all, 1 of 3 (33%) ran." in said
    assert "| refused; plain Megatron does not run it here either, at this size and with these tokens | 1 |" in said
