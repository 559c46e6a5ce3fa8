"""Write ``docs/benchmarks.md`` from the recorded figures, so that no figure is typed by hand.

    python -m tools.benchmark_docs --write docs/benchmarks.md [--measured DIR] [--readme README.md] [--images DIR]

``DIR`` is ``docs/measured``, where ``tools.bench.record`` keeps the last line of each benchmark. The page has one
section for each recorded benchmark: its question, its command, the machine, its main figures, and the ratio to the
peer that ran in the same run. A benchmark that has not been recorded has no section. ``--readme`` also rewrites the
comparison with peers on the first page, between its marks, ``--images`` draws the page's pictures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import benchmark_tables as tables
from tools import configuration_tables, installations, peer_tables, steady_tables, suite_tables, version_table
from tools.bench.record import STANDARD
from tools.benchmark_tables import Figures
from tools.simulation_docs import rewritten


@dataclass(frozen=True)
class Section:
    """One benchmark of the page: ``name`` is its file in ``docs/measured``, ``body`` writes tables from its figures."""

    name: str
    question: str
    explanation: str
    body: Callable[[Figures], str]


SECTIONS = (
    Section(
        "peers",
        "How does it compare with other runtimes?",
        "This runtime beside what a user would pick instead, in one run: the same model, samples, processes and "
        "faults. Peers are started as their documentation says, *tuned* ones with the lowest time-outs that hold "
        "here.\n\n"
        "![times to recover of all contenders](images/peers.svg)",
        peer_tables.peers,
    ),
    Section(
        "recovery",
        "How long does a recovery take?",
        "Overhead is the time from the signal to the next committed step, less a normal step. The work that is "
        "computed again is part of it. `gloo` is the baseline that rebuilds every group.",
        tables.recovery,
    ),
    Section(
        "experts",
        "What does a loss cost a mixture of experts?",
        "Beside the dense model of as many active parameters, in one run. Rates and the share of the time that trains "
        "are computed: the rates by the planner, with the same cost for every layer and exchanges for nothing, the "
        "share from them and from the times of the jobs, at one loss every ten minutes. MoEvement reports 0.94 at that "
        "frequency for its own testbed (arXiv 2412.15411).",
        tables.experts,
    ),
    Section(
        "protection",
        "How long are state blocks short of a mirror after a loss?",
        "Over several layouts and numbers of mirrors.",
        tables.protection,
    ),
    Section(
        "rejoin",
        "How long does a rejoin take, and what do the members wait?",
        "One rank of a data-parallel job is killed and comes back. Shares are shares of a normal step.",
        tables.rejoin,
    ),
    Section(
        "rejoin_of_long_steps",
        "What do members wait for a rejoin in steps of four times as many tokens?",
        "As before, with 64 sequences a step in place of 16.",
        tables.rejoin,
    ),
    Section(
        "rejoin_waiting",
        "What do members wait for a rejoin where forwards and backwards leave the cores free?",
        "The same; every forward and backward waits 50 ms, as a host waits for its accelerator.",
        tables.rejoin,
    ),
    Section(
        "migrate",
        "What do steps pay for layers that move?",
        "PP 2 × DP 2, one rank lost, its layers taken over. All ranks share one link of 1 Gbit/s. `exposed` is the "
        "time by which steps got longer, over the time that the bytes take on an idle link. Single jobs "
        "vary (log.md); a negative share is noise.",
        tables.migrate,
    ),
    Section(
        "migrate_waiting",
        "What do they pay where forwards and backwards leave the cores free?",
        "The same; every forward and backward waits 50 ms, as a host waits for its accelerator.",
        tables.migrate,
    ),
    Section(
        "migrate_loopback",
        "What do they pay on the loopback?",
        "The same over TCP without a rate limit.",
        tables.migrate,
    ),
    Section(
        "reshape",
        "What do steps pay for other parallel sizes?",
        "`ctl reshape` on four ranks that share one link of 1 Gbit/s. `exposed` is the time by which steps got longer. "
        "A restart is what plain Megatron-LM needs for the same change: save, end, start, load.",
        tables.reshape,
    ),
    Section(
        "reshape_waiting",
        "What do they pay for them where forwards and backwards leave the cores free?",
        "The same; every forward and backward waits 50 ms, as a host waits for its accelerator.",
        tables.reshape,
    ),
    Section(
        "reshape_loopback",
        "What do they pay for them on a faster link?",
        "The same over TCP without a rate limit: what is left beside the bytes.",
        tables.reshape,
    ),
    Section(
        "reshape_memory",
        "What do they pay for them on one machine?",
        "The same over shared memory, which ranks of one machine use unless a flag asks for TCP.",
        tables.reshape,
    ),
    Section(
        "reshape_behind",
        "What do they pay for them where gradients go behind computation?",
        "One link of 1 Gbit/s again, and a smaller model. Every forward and backward waits 100 ms, and "
        "`--elastic-overlap both` reduces, ships and gathers behind them.",
        tables.reshape,
    ),
    Section(
        "checkpoint",
        "What does a save cost the steps around it?",
        "Each run is compared with a run of its kind without a save. A negative figure is noise.",
        tables.checkpoint,
    ),
    Section(
        "overhead",
        "What does elasticity cost while nothing fails?",
        "CPU time of mirrors, votes, checksums and activity. The vote is counted in full; what it replaces in plain "
        "Megatron, in the same job, is told apart.",
        steady_tables.overhead,
    ),
    Section(
        "overhead_of_long_steps",
        "What does it cost in steps of four times as many tokens?",
        "The same with a batch of 64. Most of the cost is by parameter and step, so it falls with a step's length.",
        steady_tables.overhead,
    ),
    Section(
        "overhead_of_wide_layers",
        "What does it cost with 13 times as many parameters?",
        "The same with a hidden size of 512. What each step costs counts for less, what each parameter costs for more.",
        steady_tables.overhead,
    ),
    Section("overhead_of_two", "What does it cost on two ranks?", "The same on two ranks.", steady_tables.overhead),
    Section(
        "watching",
        "What does watching a job cost?",
        "Live page with a client that follows it, metrics scraped every second, event log, and scalars of every step "
        "in TensorBoard: all on beside all off. CPU time is that of all ranks and the launcher.",
        steady_tables.watching,
    ),
    Section(
        "overlap",
        "What does communication cost behind computation?",
        "`--elastic-overlap both` beside `none`, with kernels as timed waits, which leave the processor free as an "
        "accelerator does. Last row: a model whose kernels need the same processors.",
        steady_tables.overlap,
    ),
    Section(
        "overlap_link",
        "What does it cost where the link is slow?",
        "The same; all ranks share one TCP link of 5 Gbit/s, so that communication takes a fifth of a step. "
        "Smaller messages (`--elastic-bucket-elements 65536`).",
        steady_tables.overlap,
    ),
    Section(
        "step_time",
        "How long is a step beside plain Megatron-LM?",
        "The same model and data, all runs in turn. A ratio below 1: `--elastic` is faster.",
        steady_tables.step_time,
    ),
    Section(
        "step_time_tensor",
        "And with tensor parallelism?",
        "TP 2 x DP 2. Parameters that are replicated over a tensor-parallel group are stored once a unit.",
        steady_tables.step_time,
    ),
    Section(
        "consistency",
        "What does a loss do to the numbers?",
        "Relative deviation of the loss from the undisturbed run of the same kind, over the steps from the loss on.",
        tables.consistency,
    ),
    Section(
        "exact",
        "What does exact mode cost?",
        "A step with `--elastic-exact` beside one of the default mode, pair by pair. `quickstart` is the quick start's "
        "model and layout, PP 2 × DP 4; the others run at PP 2 × DP 2. A ratio below 1 is noise: other processes took "
        "time from some of the runs. Processor time is less affected.",
        tables.exact,
    ),
    Section(
        "dropout",
        "How fast is the dropout that does not depend on the rank?",
        "`kept mask` is a backward that reads a byte mask kept from the forward.",
        tables.dropout,
    ),
    Section(
        "comm",
        "How fast are collectives beside gloo?",
        "Stock gloo and the native links in alternating rounds. A trial's time is that of the slowest rank.",
        tables.comm,
    ),
    Section(
        "edit",
        "How long until Megatron's groups work again after a death?",
        "One death in the groups of TP 2 × PP 2 × DP N/4. No rank begins a phase before all ranks have ended the phase "
        "before. The dead process has been reaped. Ranks outnumber cores.",
        tables.edit,
    ),
    Section("edit_of_64", "How long with 64 processes?", "The same, recorded apart with more trials.", tables.edit),
    Section(
        "movement",
        "How much state moves?",
        "Counted, not timed. The lower bound is that of any layout with owners and copies balanced.",
        tables.movement,
    ),
    Section("planner", "How long does planning take?", "CPU time of the best of five repetitions.", tables.planner),
    Section(
        "agreement",
        "What does a rank of a large job compute at a loss?",
        "State of real models is laid out, one rank is lost, and a survivor computes what follows. CPU time of the "
        "best of three repetitions, without messages and waits: so many ranks were not run. The plan is that of all "
        "cells, with their tables; the one of fewer ranks computes in it. The balanced placement comes at a later "
        "boundary, after the recovery.",
        tables.agreement,
    ),
    Section(
        "journal",
        "How much does the first agent work at a loss?",
        "Each agent says what its 8 ranks report, and each reads what all said, through a real server over loopback. "
        "*Alone*: each appends an entry of its own. *Joint*: they tell the first agent, which appends what it was told "
        "in few entries, as the launcher does. All agents share two cores here, which takes most of the time until "
        "all have read.",
        tables.journal,
    ),
    Section(
        "simulator_error",
        "How close is the simulator to tables with timed waits?",
        "Ten plans.",
        tables.simulator_error,
    ),
    Section(
        "simulator_real",
        "How close is the simulator to real training?",
        "Each job is predicted from the costs of the other jobs.",
        tables.simulator_real,
    ),
    Section(
        "simulate_table",
        "What throughput is left after losses, policy by policy?",
        "Simulated, not run.",
        tables.simulate_table,
    ),
    Section(
        "nonuniform",
        "What is lost with devices missing in groups of 32?",
        "Simulated: 32,768 devices, the setting of nonuniform tensor parallelism (arXiv 2504.06095). Figures are the "
        "loss of throughput, its mean over draws of the failed devices. `limit` is what that paper reports for up to "
        "0.4% of failed devices. Ways that drop replicas and `ntp` let the batch shrink; the others keep it. In the "
        "simulator a whole group costs what its rank with most heads and columns costs.",
        tables.nonuniform,
    ),
    Section(
        "throughput",
        "What throughput is left in an emulated job?",
        "The runtime with timed waits in place of kernels. Figures are shares of the throughput before the loss.",
        tables.throughput,
    ),
    Section("throughput_96", "What is left with 96 processes?", "The same with 96 processes.", tables.throughput),
    Section(
        "throughput_tensor",
        "What is left after one rank of TP 4 at PP 2 is lost?",
        "The same runtime with timed waits. The rank's group lives on with three ranks, or it is parked, or its "
        "replica is left out. `instant`: no unit moves; `elaswave`: layers are cut anew.",
        tables.throughput,
    ),
    Section(
        "versions",
        "Which versions were run?",
        "4 ranks, PP 2 × DP 2, no dropout. Figures are the largest relative deviation of a loss from the same training "
        "by plain Megatron, undisturbed, or never interrupted.",
        version_table.table,
    ),
    Section(
        "torch_suite",
        "Which of PyTorch's distributed tests pass?",
        "PyTorch's own tests (`torch.testing._internal.distributed.distributed_test`), unchanged, on backend `elastic` "
        "and, where the table has it, on gloo. On `elastic` the tests reserved to MPI run too: all-to-all on the CPU.",
        suite_tables.counts_and_reasons,
    ),
    Section(
        "fault_tolerance_suite",
        "Which of PyTorch's tests of process groups that change pass?",
        "`test/distributed/test_c10d_fault_tolerance.py` of PyTorch's repository, unchanged. A test of what NCCL does "
        "after a time-out skips other backends.",
        suite_tables.counts_and_reasons,
    ),
    Section(
        "torchft_suite",
        "Which of torchft's tests pass?",
        "Its manager, LocalSGD, DiLoCo, process groups and lighthouse, unchanged, with `ProcessGroupElastic` in place "
        "of its group over gloo, and with that one beside it. On busy cores `test_streaming_diloco_upscale` fails on "
        "either: a replica that asks for a quorum late is left out, and the others end without it ([log](log.md), "
        "2026-11-26).",
        suite_tables.counts_and_reasons,
    ),
    Section(
        "install",
        "What does an installation take?",
        "The built wheel in an empty environment: torch first and alone, then the wheel. From Python 3.12 on, the "
        "wheel requires megatron-core. `+cpu` is the CPU build of torch, which was on the disk; `+cu` is the one with "
        "CUDA, which was downloaded.",
        installations.table,
    ),
    Section(
        "functional_configs",
        "Which configurations of Megatron-LM run?",
        "Megatron-LM's functional tests of release 0.17.1 at CPU size, with its own script. Each configuration: "
        "[configurations.md](configurations.md).",
        configuration_tables.counts,
    ),
    Section(
        "readability",
        "How does the code compare with that of other projects?",
        "Counted in checkouts, not timed. Lengths of functions and files are in lines. A sentence of a docstring or "
        "comment is against the style if it has more than 35 words or one of a list of words. The rule is this "
        "project's; the others do not follow it.",
        tables.readability,
    ),
)

HEAD = """# Benchmarks

Every figure on this page comes from `docs/measured/*.json`, one file a benchmark.
`python -m tools.bench.record [NAME ...]` records them;
`python -m tools.benchmark_docs --write docs/benchmarks.md --readme README.md --images docs/images` writes this page.
None was recorded on a GPU or an NPU.
A figure is a median, with the lowest and the highest trial in parentheses where there are several. `load` is the
load average of the machine at the end of the run, the benchmark's own processes included.
"""


def page(measured: Path) -> str:
    """The page, from the files in the folder ``measured``. Raises ``KeyError`` for a file without a section."""
    known = {path.stem: json.loads(path.read_text()) for path in sorted(measured.glob("*.json"))}
    if missing := known.keys() - {section.name for section in SECTIONS}:
        raise KeyError(f"no section for {', '.join(sorted(missing))}")
    recorded = [section for section in SECTIONS if section.name in known]
    parts = [HEAD]
    parts += [written(section, known[section.name]) for section in recorded]
    if absent := sorted(STANDARD.keys() - known.keys()):
        parts.append(f"Not recorded yet: {', '.join(f'`{name}`' for name in absent)}.\n")
    return "\n".join(parts)


def written(section: Section, figures: Figures) -> str:
    """One section of the page, its heading first."""
    trials = sorted(set(_values(figures, "trials")))
    repeated = f"; trials: {', '.join(map(str, trials))}" if trials else ""
    took = f"; took {figures['took_s']:.0f} s" if "took_s" in figures else ""
    where = _machine(figures["machine"]) if "machine" in figures else ""
    return (
        f"## {section.question}\n\n{section.explanation}\n\n"
        f"`{figures['command']}` (`docs/measured/{section.name}.json`){took}{repeated}.{where}\n\n"
        f"{section.body(figures)}\n"
    )


def _machine(machine: Figures) -> str:
    """One sentence about the machine, after a space."""
    return (
        f" {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.1f} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine['torch']}, load {machine['load']:.1f}."
    )


def _values(figures: Any, key: str) -> Iterable[int]:
    """All values of ``key``, at any depth."""
    if isinstance(figures, Mapping):
        for name, value in figures.items():
            if name == key:
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(figures, list):
        for value in figures:
            yield from _values(value, key)


def main() -> None:
    """Read the recorded figures and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=Path("docs/measured"))
    parser.add_argument("--write", type=Path, required=True, metavar="PAGE")
    parser.add_argument("--readme", type=Path, metavar="PAGE", help="the page whose comparison with peers is rewritten")
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of the pictures")
    options = parser.parse_args()
    options.write.write_text(page(options.measured), encoding="utf-8")
    recorded = options.measured / "peers.json"
    if options.readme and recorded.exists():
        section = {"peers": peer_tables.readme(json.loads(recorded.read_text()))}
        options.readme.write_text(rewritten(options.readme.read_text(), section), encoding="utf-8")
    if options.images and recorded.exists():
        peer_tables.picture(json.loads(recorded.read_text()), options.images / "peers.svg")


if __name__ == "__main__":
    main()
