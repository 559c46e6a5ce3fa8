"""One import adapts a Megatron-LM script; without --elastic nothing but the platform's rows is in force."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``code`` as a script of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ELASTIC_PLATFORM": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_importing_it_imports_no_megatron_and_no_engine() -> None:
    succeeded(
        run("""
        import sys
        import megatron.elastic.adaptor
        loaded = [name for name in sys.modules if name.startswith(("megatron.core", "megatron.training"))]
        assert loaded == [], loaded
        assert "megatron.elastic.engine" not in sys.modules
    """)
    )


def test_names_bound_by_value_before_and_after_are_the_replaced_ones() -> None:
    succeeded(
        run("""
        import megatron.elastic.adaptor
        from megatron.training import initialize_megatron, pretrain
        from megatron.training.arguments import parse_args
        import megatron.training.arguments as arguments, megatron.training.initialize as initialize
        import megatron.training.training as training
        assert initialize.parse_args is arguments.parse_args is parse_args
        assert training.initialize_megatron is initialize.initialize_megatron is initialize_megatron
        assert parse_args.__wrapped__.__module__ == "megatron.training.arguments"
    """)
    )


def test_without_elastic_the_step_and_its_loop_are_megatrons_own() -> None:
    printed = succeeded(
        run("""
        import sys
        sys.argv = ["script", "--micro-batch-size", "1"]
        import megatron.elastic.adaptor
        from megatron.core import timers
        from megatron.training import training
        from megatron.training.arguments import parse_args
        names = ("pretrain", "train", "train_step", "evaluate", "training_log", "save_checkpoint",
                 "setup_model_and_optimizer", "build_train_valid_test_data_iterators", "print_datetime")
        before = [getattr(training, name) for name in names]
        args = parse_args()
        assert args.elastic is False
        assert [getattr(training, name) for name in names] == before
        assert not [name for name in names if hasattr(getattr(training, name), "__wrapped__")]
        assert not hasattr(timers.Timer.start, "__wrapped__")
        assert "megatron.elastic.engine.engine" not in sys.modules
        print("untouched")
    """)
    )
    assert "untouched" in printed


def test_a_synchronous_save_starts_no_process_and_an_asynchronous_one_still_does() -> None:
    succeeded(
        run("""
        import argparse, multiprocessing, queue
        if __name__ == "__main__":
            import megatron.elastic.adaptor
            from megatron.training import global_vars
            from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
            global_vars.set_args(argparse.Namespace(async_save=False, elastic=False))
            assert type(get_write_results_queue()) is queue.Queue
            assert get_write_results_queue() is not get_write_results_queue()
            assert multiprocessing.active_children() == []
            global_vars.get_args().async_save = True
            assert type(get_write_results_queue()) is not queue.Queue
            assert len(multiprocessing.active_children()) == 1
    """)
    )


def test_with_elastic_the_table_is_printed_and_in_force_once_arguments_are_parsed() -> None:
    printed = succeeded(
        run("""
        import sys
        sys.argv = ["script", "--micro-batch-size", "1", "--elastic", "--elastic-print-patches"]
        import megatron.elastic.adaptor
        from megatron.training.training import train_step
        mine = train_step
        from megatron.training.arguments import parse_args
        args = parse_args()
        from megatron.training import training
        assert args.elastic and hasattr(training.train_step, "__wrapped__")
        assert train_step is mine is training.train_step, "names in __main__ are replaced as well"
    """)
    )
    assert "megatron.training.training.train_step  [elastic;" in printed
    assert "megatron.training.arguments.parse_args  [platform;" in printed


def test_megatron_imported_first_is_one_line_that_says_where_the_import_belongs() -> None:
    done = run("""
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        import megatron.elastic.adaptor
    """)
    assert done.returncode == 1
    assert "first line of the script" in done.stderr and "Traceback" not in done.stderr


def test_a_platform_that_is_not_there_is_one_line() -> None:
    done = run("import megatron.elastic.adaptor", ELASTIC_PLATFORM="npu")
    assert done.returncode == 1
    assert "ELASTIC_PLATFORM=npu" in done.stderr and "Traceback" not in done.stderr
