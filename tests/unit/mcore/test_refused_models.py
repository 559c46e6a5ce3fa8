"""``pretrain_gpt.py`` refuses the flags of models that it does not build by one line that names the flag."""

from __future__ import annotations

from pathlib import Path

from tests.unit.own_process import result_of


def test_models_that_are_no_gpt_are_refused(tmp_path: Path) -> None:
    answers = result_of(Path(__file__).with_name("refused_models.py"), tmp_path)
    assert answers["gpt"] == answers["classify"] == ""
    assert answers["hybrid"].startswith("--hybrid-layer-pattern: ")
    assert answers["mrope"].startswith("--position-embedding-type mrope: ") and answers["mrope"].endswith("use rope")
    assert answers["dino"].startswith("--vision-pretraining-type dino: ")
