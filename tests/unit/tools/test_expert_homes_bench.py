"""The comparison of placements reads what a job has logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.elastic.observe.event_kinds import ExpertsEvent
from megatron.elastic.observe.events import EventLog
from tools.bench.expert_homes import heated, imbalances, main

LOAD = ((40, 40, 10, 10), (10, 10, 40, 40))


def test_the_newest_load_of_a_log_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path, rank=0)
    log.write(ExpertsEvent(16, {"1": (1, 1, 1, 1), "2": (1, 1, 1, 1)}, 1.0))
    log.write(ExpertsEvent(32, {"1": LOAD[0], "2": LOAD[1]}, 1.6))
    log.close()
    main([str(tmp_path), "--ranks", "2"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {name: {"imbalance": value, "replicas": more} for name, (value, more) in imbalances(LOAD, 2, 1).items()}
    assert (found["step"], found["placements"]) == (32, expected)
    assert expected["launch"] == {"imbalance": 1.6, "replicas": 0}
    assert expected["homes"] == {"imbalance": 1.0, "replicas": 0}


def test_one_hot_expert_needs_replicas() -> None:
    found = imbalances(((90, 10, 10, 10),), 2, 1)
    assert found["homes"] == found["by layer"] == found["launch"] == (pytest.approx(100 / 60), 0)
    assert found["replicas"] == found["by layer, r"] == (pytest.approx(65 / 60), 1)


def test_an_expert_is_made_hotter_than_a_rank() -> None:
    (layer,) = heated(((10, 30, 10, 10),), 2, 1.5)
    assert layer == [10, 90, 10, 10] and layer[1] == 1.5 * sum(layer) / 2


def test_a_log_without_a_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--ranks", "2"])
    assert "no measured load" in capsys.readouterr().err
