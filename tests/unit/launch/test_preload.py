"""Which modules the workers' parent imports for a script."""

from __future__ import annotations

from pathlib import Path

from megatron.elastic.launch.workers.preload import modules_for

BASE = ("numpy", "torch", "torch.distributed", "megatron.elastic.control.client")


def test_only_top_level_imports_of_torch_numpy_and_megatron_in_the_scripts_order(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(
        "import os, torch.nn\nimport wandb\nfrom megatron.training import pretrain\nfrom . import x\n"
        "def f():\n    import megatron.core\n"
    )
    assert modules_for("script", str(script), False, True) == (*BASE, "torch.nn", "megatron.training")


def test_the_adaptor_comes_first_and_only_when_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("from megatron.training import pretrain\n")
    adaptor, host = "megatron.elastic.adaptor", "megatron.elastic.mcore.loop.training_loop"
    assert adaptor not in modules_for("script", str(script), False, True)
    assert modules_for("script", str(script), True, True) == (*BASE, adaptor, "megatron.training", host)
    script.write_text("import megatron.elastic.adaptor\nfrom megatron.training import pretrain\n")
    assert modules_for("script", str(script), False, False) == (*BASE, adaptor, "megatron.training")


def test_a_module_a_program_a_broken_script_and_none(tmp_path: Path) -> None:
    program = "megatron.elastic.launch.workers.rehearsal"
    assert "megatron.elastic.comm.errors" in modules_for("module", program, False, True)
    assert modules_for("program", "/bin/sh", False, False) == ()
    script = tmp_path / "s.py"
    script.write_text("def broken(:\n")
    assert modules_for("script", str(script), False, False) == BASE
    assert modules_for("module", "no.such.module", False, False) == BASE
