"""The Grafana dashboard asks for metrics that agents export, and for no others."""

from __future__ import annotations

import json
import re

from megatron.elastic.launch.agent.metrics import families
from tests.unit.control.test_status_text import STATUS
from tools.grafana_dashboard import PATH, dashboard


def exported() -> set[str]:
    return {sample.name for family in families(STATUS) for sample in family.samples}


def test_the_file_is_the_generated_one() -> None:
    assert json.loads(PATH.read_text()) == dashboard(), "run python -m tools.grafana_dashboard --write"


def test_every_metric_of_the_dashboard_is_exported() -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard()["templating"]["list"]]
    named = {name for query in queries for name in re.findall(r"megatron_elastic_\w+", query)}
    assert named and named <= exported(), sorted(named - exported())


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard()["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
