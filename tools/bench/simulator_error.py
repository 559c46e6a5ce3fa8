"""The simulator against tables run with timed waits.

    python -m tools.bench.simulator_error [--unit-ms 100]

Ten plans of the damage table's smaller scenarios; ``--unit-ms`` is how long the
forward of one layer waits. Runs whose waits stretch by more than 2% are refused
and reported as such. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.planner import instant_plan, nominal_plan
from megatron.elastic.plan.search.steady import steady_plan
from megatron.elastic.simulate.emulate import MachineTooBusy, emulate
from megatron.elastic.simulate.scenarios import Scenario, layer_profile, scenario_topology
from tools.bench._common import print_result

LAYERS = 8


def cases() -> Iterator[tuple[str, Plan, Profile]]:
    """(name, plan, profile): nominal, rerouted and steady plans of small topologies."""
    profile = layer_profile(LAYERS)
    for dp, pp, losses in ((2, 4, 1), (4, 2, 1), (4, 4, 2)):
        before, after = scenario_topology(Scenario(dp, pp, LAYERS, losses, "spread", waves=4, headroom=2.0))
        name = f"DP {dp} x PP {pp}, {losses} lost"
        if losses == 1:
            yield f"DP {dp} x PP {pp}, nominal", nominal_plan(before, profile), profile
        yield f"{name}, reroute", instant_plan(after, profile), profile
        yield f"{name}, reroute split", instant_plan(after, profile, split_backward=True), profile
        if losses == 1:
            yield f"{name}, steady", steady_plan(after, profile), profile


def main() -> None:
    """Run all cases, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit-ms", type=float, default=100.0)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    errors = []
    for name, plan, profile in cases():
        try:
            run = emulate(plan, profile, scale=args.unit_ms * 1e6 / profile.units[0].forward_ns)
        except MachineTooBusy as refusal:
            rows.append({"case": name, "refused": str(refusal)})
            print(f"{name:40} refused: {refusal}")
            continue
        errors.append(abs(run.error))
        rows.append({"case": name, "error": run.error, "dilation": run.dilation})
        print(f"{name:40} error {run.error:+.3%}  dilation {run.dilation:.3%}")
    found = {"median_error": median(errors), "worst_error": max(errors)} if errors else {}
    print_result("simulator_error", {"rows": rows, **found})


if __name__ == "__main__":
    main()
