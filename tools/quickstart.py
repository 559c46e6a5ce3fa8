"""Train a small GPT on real text twice, once undisturbed and once with a worker killed, and compare.

    python -m tools.quickstart --output-dir out/quickstart
    python -m tools.quickstart --input corpus.jsonl --inject "kill:rank=2,step=9;kill:rank=6,step=21"

Corpus, tokenizer, dataset and the undisturbed run are kept in the output folder
and made again only when what they were made from has changed. Progress goes to
stderr; the last line on stdout is one JSON object (:class:`Result`). What its
fields mean stands in ``tools/training_log.py``: they are read from Megatron's
log lines and the event log, nothing is taken from the scripts that ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tools import loss_plot, make_corpus, train_tokenizer, training_log

__all__ = ["Failed", "Result", "main"]

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 2048
MODEL = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--max-position-embeddings", "128"),
)
TRAINING = (
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--calculate-per-token-loss"),
    *("--lr", "2e-3", "--min-lr", "2e-4", "--lr-decay-style", "cosine", "--lr-warmup-iters", "4"),
    *("--weight-decay", "0.1", "--clip-grad", "1.0", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
    *("--seed", "1234", "--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000000"),
)


class Failed(RuntimeError):
    """A step failed; the text is the message for the user."""


@dataclass(frozen=True)
class Result:
    """The last line. Times in seconds; ``mttr_s`` is the median over losses, beyond a normal step."""

    steps: int
    kills: int
    lost_steps: int
    loss_first: float
    loss_last: float
    mttr_s: float
    max_rel_deviation: float
    step_s: float
    recoveries_s: list[float]
    undisturbed_cached: bool
    picture: str
    events: str


def say(text: str) -> None:
    """One line to a person."""
    tqdm.write(f"[quickstart] {text}", file=sys.stderr)


def digest(*parts: object) -> str:
    """A hash of strings, paths (their contents) and sequences of them."""
    result = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            result.update(hashlib.sha256(part.read_bytes()).digest())
        elif isinstance(part, list | tuple):
            result.update(digest(*part).encode())
        else:
            result.update(repr(part).encode() + b"\0")
    return result.hexdigest()


def cached(target: Path, key: str, make: Callable[[], None]) -> bool:
    """Call ``make`` unless ``target`` was made with the same ``key``; whether it was there already."""
    stamp = target.with_name(target.name + ".stamp")
    if target.exists() and stamp.exists() and stamp.read_text() == key:
        return True
    stamp.unlink(missing_ok=True)
    make()
    stamp.write_text(key)
    return False


def tool(function: Callable[[list[str]], int], arguments: Sequence[str]) -> None:
    """Call a tool's ``main``; its own line on stderr names the fault."""
    if function(list(arguments)):
        raise Failed("see the line above")


def prepare_data(output: Path, corpus: Path | None) -> list[str]:
    """Corpus → tokenizer → ``.bin``/``.idx``; the Megatron flags that use them."""
    if corpus is None:
        corpus = output / "corpus.jsonl"
        script = ROOT / "tools" / "make_corpus.py"
        if not cached(corpus, digest(sys.version, script), lambda: tool(make_corpus.main, ["--output", str(corpus)])):
            say("corpus: sources and docstrings of the standard library")
    elif not corpus.is_file():
        raise Failed(f"--input {corpus}: no such file")
    tokenizer, prefix = output / "tokenizer", output / "corpus"
    source = digest(corpus, ROOT / "tools" / "train_tokenizer.py", VOCABULARY)
    train = ["--input", str(corpus), "--output-dir", str(tokenizer), "--vocab-size", str(VOCABULARY)]
    if not cached(tokenizer, source, lambda: tool(train_tokenizer.main, train)):
        say("tokenizer: byte-level BPE trained on the corpus")
    flags = train_tokenizer.megatron_arguments(tokenizer)
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "preprocess_data.py"), "--append-eod", *flags]
    command += ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]

    def preprocess() -> None:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(done.stderr.strip().splitlines()[-1])

    dataset = output / "corpus_text_document.idx"
    if not cached(dataset, digest(source, ROOT / "tools" / "preprocess_data.py"), preprocess):
        say("dataset: .bin/.idx by tools/preprocess_data.py")
    data = ["--data-path", str(dataset.with_suffix("")), "--data-cache-path", str(output / "data-cache")]
    return [*data, "--split", "98,2,0", *flags]


def training_command(args: argparse.Namespace, data: Sequence[str], events: Path, inject: str | None) -> list[str]:
    """The command a user would type."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron.elastic.launch"]
    command += ["--nproc-per-node", str(args.nproc_per_node), "--master-port", "0", str(ROOT / "pretrain_gpt.py")]
    command += ["--elastic", "--elastic-event-log", str(events)]
    if inject is not None:
        command += ["--elastic-inject", inject, "--elastic-allow-inject"]
    command += ["--tensor-model-parallel-size", "1"]
    command += ["--pipeline-model-parallel-size", str(args.pipeline_model_parallel_size)]
    command += ["--transformer-impl", "local", "--distributed-backend", "gloo"]
    return [*command, *MODEL, *TRAINING, "--train-iters", str(args.steps), *data, *args.megatron]


def stop(process: subprocess.Popen[str]) -> None:
    """Ask the launcher to end with all its workers, then insist."""
    for signum, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def follow(process: subprocess.Popen[str], log: Path, steps: int, name: str) -> None:
    """Copy the run's output to ``log`` while a progress bar follows Megatron's iteration lines."""
    assert process.stdout is not None
    interval = 0.2 if sys.stderr.isatty() else 10.0  # a file or a pipe wants a line now and then
    with (
        open(log, "w", encoding="utf-8") as out,
        tqdm(total=steps, desc=name, unit=" steps", file=sys.stderr, mininterval=interval) as bar,
    ):
        for line in process.stdout:
            out.write(line)
            iteration = training_log.parse_iteration(line)
            if iteration is not None:
                bar.set_postfix(loss=f"{iteration.loss:.4f}", refresh=False)
                bar.update(iteration.step - bar.n)
            elif line.lstrip().startswith(("[launch] lost ", "recovered ")):
                tqdm.write("    " + line.rstrip(), file=sys.stderr)


def train(command: Sequence[str], folder: Path, steps: int, limit: float) -> None:
    """Run one training into ``folder`` (``log.txt``, ``events/``). Raises Failed with the end of the log."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["timeout", "--signal=TERM", "--kill-after=30", str(limit), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        follow(process, log, steps, folder.name)
        status = process.wait()
    finally:
        stop(process)
    if status:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        cause = f"did not end within {limit:.0f} s" if status == 124 else f"ended with exit status {status}"
        raise Failed(f"{end}\nthe {folder.name} run {cause}; all of its log: {log}")


def code_version() -> str:
    """A hash of everything a run is made of besides its flags."""
    package = ROOT / "megatron" / "elastic"
    files = sorted([*package.rglob("*.py"), *package.glob("*.so")])
    versions = [importlib.metadata.version(name) for name in ("torch", "megatron-core", "numpy")]
    return digest(versions, ROOT / "pretrain_gpt.py", files)


def judge(output: Path, steps: int, undisturbed_cached: bool) -> Result:
    """Compare the two runs in ``output`` and draw them. Raises Failed if there is nothing to show."""
    try:
        reference, _ = training_log.read_run(output / "undisturbed")
        iterations, records = training_log.read_run(output / "killed")
        lost = training_log.losses_of_ranks(records)
        hit = training_log.steps_hit(iterations, lost)
        recovery = training_log.time_to_recover(iterations, lost)
        difference = training_log.deviation(iterations, reference)
    except (OSError, ValueError) as error:
        raise Failed(str(error)) from error
    if not lost:
        raise Failed("no worker was lost: does --inject name a rank and a step that exist?")
    picture = output / "quickstart.png"
    workers = "1 worker" if len(lost) == 1 else f"{len(lost)} workers"
    title = f"{len(iterations)} steps, {workers} lost: largest relative difference of loss {difference:.1e}"
    with open(output / "killed" / "log.txt", encoding="utf-8", errors="replace") as lines:
        (output / "excerpt.txt").write_text("\n".join(training_log.excerpt(lines)) + "\n")
    loss_plot.draw(picture, reference, iterations, hit, title)
    return Result(
        steps=len(iterations),
        kills=len(lost),
        lost_steps=training_log.lost_steps(records) + steps - len(iterations),
        loss_first=iterations[min(iterations)].loss,
        loss_last=iterations[max(iterations)].loss,
        mttr_s=round(statistics.median(recovery), 4),
        max_rel_deviation=difference,
        step_s=round(statistics.median(one.seconds for step, one in iterations.items() if step not in hit), 4),
        recoveries_s=[round(value, 4) for value in recovery],
        undisturbed_cached=undisturbed_cached,
        picture=str(picture),
        events=str(output / "killed" / "events"),
    )


def run(args: argparse.Namespace) -> Result:
    """Data, both runs, and their comparison."""
    output = args.output_dir.resolve()
    output.mkdir(parents=True, exist_ok=True)
    data = prepare_data(output, args.input)
    undisturbed, killed = output / "undisturbed", output / "killed"
    reference = training_command(args, data, undisturbed / "events", None)
    key = digest(reference, code_version(), output / "corpus_text_document.bin")
    was_cached = cached(undisturbed, key, lambda: train(reference, undisturbed, args.steps, args.run_timeout))
    say(f"undisturbed run: {'kept from last time' if was_cached else 'done'}")
    say(f"the same run, with --elastic-inject {args.inject!r}")
    train(training_command(args, data, killed / "events", args.inject), killed, args.steps, args.run_timeout)
    return judge(output, args.steps, was_cached)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Flags; whatever follows ``--`` goes to pretrain_gpt.py."""
    parser = argparse.ArgumentParser(prog="quickstart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--input", type=Path, help='JSONL corpus of your own ({"text": …} a line)')
    parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / "quickstart", help="where everything goes")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument("--inject", default="kill:rank=5,step=20,point=after_reduce", help="fault script")
    parser.add_argument("--nproc-per-node", type=int, default=8, help="workers")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=2, help="pipeline stages")
    parser.add_argument("--run-timeout", type=float, default=600.0, help="seconds either run may take")
    parser.add_argument("megatron", nargs="*", help="after --: further Megatron flags")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 1 with a reason on stderr if anything does not work out."""
    args = parse(argv)
    try:
        result = run(args)
    except (Failed, OSError) as error:
        print(f"[quickstart] error: {error}", file=sys.stderr)
        return 1
    say(f"picture: {result.picture}")
    say(f"events:  {result.events}")
    print(json.dumps(dataclasses.asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
