"""Write the Grafana dashboard of the launcher's metrics: ``python -m tools.grafana_dashboard --write``.

Without ``--write`` it prints the JSON. ``tests/unit/tools/test_grafana_dashboard.py`` compares the file with it, and
the names in it with the metrics that agents export.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["PATH", "dashboard", "main"]

PATH = Path(__file__).resolve().parent.parent / "scripts" / "grafana" / "megatron-elastic.json"
_M = "megatron_elastic_"
_OF_JOB = '{job="$job"}'

# Every agent exports the same history, so panels take the maximum over the agents.
_STATS = (
    ("Step", f"max({_M}step{_OF_JOB})", "none"),
    ("Left", f"max({_M}left_seconds{_OF_JOB})", "s"),
    ("Goodput", f"max({_M}goodput_ratio{_OF_JOB})", "percentunit"),
    ("Losses", f"max({_M}losses_total{_OF_JOB})", "none"),
    ("MTTR", f"max({_M}recovery_seconds_total{_OF_JOB}) / max({_M}recoveries_total{_OF_JOB})", "s"),
    ("Members", f'max({_M}ranks{{job="$job", standing="member"}})', "none"),
    ("Ranks that may be lost", f"min({_M}tolerated_rank_losses{_OF_JOB})", "none"),
    ("Blocks short of copies", f"max({_M}short_blocks{_OF_JOB})", "none"),
)
_GRAPHS = (
    ("Loss", ((f"max({_M}loss{_OF_JOB})", "loss"),), "none"),
    ("Step duration", ((f"max({_M}step_duration_seconds{_OF_JOB})", "newest step"),), "s"),
    (
        "Losses and recoveries in 5 minutes",
        (
            (f"max(increase({_M}losses_total{_OF_JOB}[5m]))", "losses"),
            (f"max(increase({_M}recoveries_total{_OF_JOB}[5m]))", "recoveries"),
            (f"max(increase({_M}member_changes_total{_OF_JOB}[5m]))", "other changes"),
        ),
        "none",
    ),
    ("Lost time by cause", ((f"max by (cause) ({_M}lost_seconds_total{_OF_JOB})", "{{cause}}"),), "s"),
    (
        "Ranks",
        ((f"max by (standing) ({_M}ranks{_OF_JOB})", "{{standing}}"), (f"max({_M}nodes_alive{_OF_JOB})", "nodes")),
        "none",
    ),
    (
        "Workers without progress",
        ((f"max by (instance, rank) ({_M}worker_idle_seconds{_OF_JOB})", "{{instance}} rank {{rank}}"),),
        "s",
    ),
    (
        "Tokens of the busiest rank and expert, to the mean (jobs with experts that ranks share)",
        (
            (f"max({_M}expert_rank_load_ratio{_OF_JOB})", "rank"),
            (f"max by (layer) ({_M}expert_load_ratio{_OF_JOB})", "expert of layer {{layer}}"),
        ),
        "none",
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels = [
        _panel(number, "stat", title, ((expression, ""),), unit, (3 * number, 0, 3, 4))
        for number, (title, expression, unit) in enumerate(_STATS)
    ]
    panels += [
        _panel(
            len(_STATS) + number, "timeseries", title, queries, unit, (12 * (number % 2), 4 + 8 * (number // 2), 12, 8)
        )
        for number, (title, queries, unit) in enumerate(_GRAPHS)
    ]
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    job = {
        "name": "job",
        "label": "Scrape job",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": f"label_values({_M}generation, job)",
        "refresh": 2,
    }
    return {
        "title": "megatron-elastic",
        "uid": "megatron-elastic",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, job]},
        "panels": panels,
    }


def _panel(
    number: int,
    kind: str,
    title: str,
    queries: tuple[tuple[str, str], ...],
    unit: str,
    place: tuple[int, int, int, int],
) -> dict[str, Any]:
    x, y, width, height = place
    source = {"type": "prometheus", "uid": "$source"}
    targets = [
        {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": source}
        for at, (expression, legend) in enumerate(queries)
    ]
    return {
        "id": number + 1,
        "type": kind,
        "title": title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def main(argv: list[str]) -> int:
    """Print the dashboard, or write its file."""
    parser = argparse.ArgumentParser(prog="python -m tools.grafana_dashboard", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"Write {PATH.name} instead of printing it.")
    text = json.dumps(dashboard(), indent=2) + "\n"
    if parser.parse_args(argv).write:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
