"""This runtime beside what a user would pick instead: the same model, data, processes and faults, in the same run.

    python -m tools.bench.peers [--contenders ours,torchft,...] [--faults kill,...] [--trials 2] [--losses 2] [--quick]
        [--layouts dp4,tp2dp2,pp2dp2] [--environments FOLDER] [--kept FOLDER] [--minutes M] [--into FILE]

Contenders: this runtime (default, exact), torchft, nvidia-resiliency-ext (restart within the process, ``ft_launcher``)
and torchrun with a checkpoint at every step; each peer in an environment of its own (:mod:`_peer_environments`), by
default and tuned, with the program that its documentation recommends (:mod:`peers_programs`). Trials go round: the
first of each contender, then the second, so that noise of the machine meets all alike.

calm         nothing happens: normal step, losses; its baselines are plain DDP over gloo and plain Megatron-LM
kill         SIGKILL to the last rank, which may come back; then again, ``--losses`` times in all
stay         the same, and it may not: throughput while a rank is missing
rank0        SIGKILL to rank 0
coordinator  SIGKILL to the process that coordinates the job
two          SIGKILL to ranks 1 and 2 at once
stop         SIGSTOP to the last rank

Layouts other than four data-parallel ranks have the faults kill and stay alone, and no overhead: each peer does of
tensor and pipeline parallelism what its documentation says (``of_layouts``). Their losses are compared with those of an
undisturbed run of the baseline under the same layout.

Signals come from outside, half a step after a commit. :mod:`_peer_figures` defines the figures. Where a contender does
not recover within ``--patience``, its row has the last line of its output that tells of a failure.

The whole takes about an hour. With ``--kept`` each trial's result is kept in a folder and not measured again, so that
``--minutes`` can cut the run into parts. With ``--into`` the figures measured take the place of those in a recorded
file, each with its time and the machine's load, and all others stay. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench._common import machine, print_result
from tools.bench._jobs import ROOT, TORCHRUN, command, finished
from tools.bench._peer_contenders import CONTENDERS, MEGATRON
from tools.bench._peer_environments import ENVIRONMENTS, PINS, ensure
from tools.bench._peer_processes import words_of
from tools.bench._peer_summary import merged, summary
from tools.bench._peer_trials import BASELINES, FAULTS, STEPS, Setting, Trial, run_trial
from tools.bench.peers_programs import common
from tools.bench.peers_programs.layouts import LAYOUTS, PLAIN

LAYOUT_FAULTS = ("kill", "stay")
"""Those that are injected also into layouts other than four data-parallel ranks."""
QUICK = {
    "layouts": PLAIN.name,
    "contenders": "ours,torchrun",
    "faults": "calm,kill",
    "trials": 1,
    "losses": 1,
    "calm_steps": 12,
}


def trials_of(options: argparse.Namespace) -> Iterator[Trial]:
    """Every trial asked for, layout by layout, the contenders in turn."""
    faults = options.faults.split(",")
    for layout in options.layouts.split(","):
        names = [name for name in options.contenders.split(",") if layout in CONTENDERS[name].layouts]
        for number in range(options.trials):
            for fault in faults:
                for name in _contenders_of(fault, number, names, layout):
                    yield Trial(name, fault, number, layout)


def _contenders_of(fault: str, number: int, names: list[str], layout: str) -> list[str]:
    """The contenders, of ``names``, that meet ``fault`` in round ``number``."""
    baselines = sorted({CONTENDERS[name].baseline for name in names})
    if layout != PLAIN.name and fault == "calm":
        return baselines if number == 0 else []  # its losses alone are used
    if fault == "calm":
        return baselines + names
    if (layout != PLAIN.name and fault not in LAYOUT_FAULTS) or (number > 0 and fault not in ("kill", "stay")):
        return []
    return [name for name in names if fault in CONTENDERS[name].faults]


@dataclass(frozen=True)
class Kept:
    """Results of trials in a folder, or nowhere."""

    folder: Path | None
    settings: dict[str, Any]
    """What must be equal for a result to count."""

    def read(self, trial: Trial) -> dict[str, Any] | None:
        """Return the result of ``trial`` if it is there and was measured with the same settings."""
        path = self.folder and self.folder / f"{trial.name}.json"
        if not path or not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found["result"] if found["settings"] == self.settings else None

    def write(self, trial: Trial, result: dict[str, Any]) -> None:
        """Keep a result."""
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"settings": self.settings, "result": result})
            (self.folder / f"{trial.name}.json").write_text(text)


def measure(
    trials: list[Trial], kept: Kept, setting: Setting, minutes: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run the trials that are not kept yet, until the time is up.

    Return the results of all that there are, and the words of jobs that did not come to train, by trial.
    """
    results: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    end = time.monotonic() + 60 * minutes
    for trial in trials:
        result = kept.read(trial)
        if result is None and time.monotonic() < end:
            try:
                result = json.loads(json.dumps(run_trial(trial, setting)))
            except RuntimeError as error:
                print(f"{trial.name}: {error}", file=sys.stderr, flush=True)
                failed[trial.name] = words_of(str(error))
                continue
            kept.write(trial, result)
            print(f"{trial.name}: {_told(result)}", file=sys.stderr, flush=True)
        if result is not None:
            results.append(result)
    return results, failed


def _told(result: dict[str, Any]) -> str:
    told = {name: value for name, value in result.items() if name not in ("losses", "contender", "fault", "number")}
    return json.dumps(told)


def write_data(path: Path) -> None:
    """Write the samples of the job, once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = [*MEGATRON, "--train-iters", str(STEPS)]
        script = str(ROOT / "tools" / "bench" / "_peer_data.py")
        finished(command(1, *flags, module=TORCHRUN, script=script), PEER_DATA=str(path))


def parsed() -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="names, separated by commas")
    parser.add_argument(
        "--faults", default="calm," + ",".join(FAULTS), help="names, separated by commas, in this order"
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, separated by commas")
    parser.add_argument("--trials", type=int, default=2, help="rounds of calm, kill and stay; other faults have one")
    parser.add_argument("--losses", type=int, default=2, help="of one job under 'kill', one after the other")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calm-steps", type=int, default=25)
    parser.add_argument("--patience", type=float, default=100.0, help="seconds that a contender has to recover")
    parser.add_argument("--quick", action="store_true", help="two contenders, one fault, one trial")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / "out" / "peers", help="folder of the peers' environments and data"
    )
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="keep results there and go on from those there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further trial after so long")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a recorded result that gets the figures measured")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    known_names: dict[str, Iterable[str]] = {
        "contenders": CONTENDERS,
        "faults": {"calm": None, **FAULTS},
        "layouts": LAYOUTS,
    }
    for flag, known in known_names.items():
        for name in getattr(options, flag).split(","):
            if name not in known:
                parser.error(f"--{flag}: no {name!r}; choose from {','.join(known)}")
    if min(options.trials, options.losses, options.calm_steps - 5) < 1:
        parser.error("--trials and --losses take at least 1, --calm-steps at least 6")
    if options.ranks < 4:
        parser.error(f"--ranks {options.ranks}: the fault 'two' kills ranks 1 and 2 of at least 4")
    if options.ranks != 4 and options.layouts != PLAIN.name:
        parser.error(f"--ranks {options.ranks}: layouts but {PLAIN.name} are of 4 ranks; add --layouts {PLAIN.name}")
    if options.into and not options.into.exists():
        parser.error(f"--into {options.into}: there is no such file")
    return options


def main() -> None:
    """Install, measure, print."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a job under way is ended with it
    trials = list(trials_of(options))
    needed = {
        CONTENDERS[t.contender].environment if t.contender in CONTENDERS else BASELINES[t.contender][1] for t in trials
    }
    pythons = {name: ensure(name, options.environments) for name in sorted(needed - {""})}
    data = options.environments / f"samples_{STEPS * common.ROWS}.u16"
    write_data(data)
    setting = Setting(pythons, data, options.ranks, options.calm_steps, options.patience, options.losses)
    settings = {
        "ranks": options.ranks,
        "calm_steps": options.calm_steps,
        "patience_s": options.patience,
        "losses_a_job": options.losses,
        "model": " ".join(MEGATRON),
        "versions": versions(),
    }
    results, failed = measure(trials, Kept(options.kept, settings), setting, options.minutes)
    done = {
        "trials_asked": len(trials),
        "trials_done": len(results),
        "trials_failed": failed,
        "trial_s": sum(r["took_s"] for r in results),
    }
    figures = {**settings, **done, **summary(results)}
    if options.into:
        write_into(options.into, figures)
    print_result("peers", figures)


def write_into(path: Path, figures: dict[str, Any]) -> None:
    """Put ``figures`` into the recorded file at ``path``, and how they were measured. Raises ``ValueError``."""
    recorded = json.loads(path.read_text())
    how = {
        "command": shlex.join(["python", "-m", "tools.bench.peers", *without_folders(sys.argv[1:])]),
        "machine": asdict(machine()),
        **{name: figures[name] for name in ("losses_a_job", "patience_s", "trials_asked", "trials_done", "trial_s")},
        "trials_failed": figures["trials_failed"],
    }
    measured = json.loads(json.dumps(figures, default=asdict))
    whole = {**merged(recorded, measured), "later": [*recorded.get("later", []), how]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    partial.replace(path)


def without_folders(arguments: list[str]) -> list[str]:
    """Return the arguments without the folders of this machine, on which no figure depends."""
    folders = [at for at, word in enumerate(arguments) if word in ("--environments", "--kept")]
    return [word for at, word in enumerate(arguments) if at not in folders and at - 1 not in folders]


def versions() -> dict[str, str]:
    """Return the peers' pinned versions."""
    lines = [line for path in sorted(PINS.glob("peers-*.txt")) for line in path.read_text().splitlines()]
    lines += [environment.foreign for environment in ENVIRONMENTS.values()]
    named = dict(line.split("==") for line in lines if "==" in line)
    return {name: named[name] for name in ("torchft-nightly", "nvidia-resiliency-ext") if name in named}


if __name__ == "__main__":
    main()
