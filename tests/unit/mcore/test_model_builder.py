"""A rank's part of the model is built as the script describes it: by a function, or by a configuration's builder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.elastic.mcore.model import model_builder as home


def test_a_scripts_function_builds_unwrapped_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[Any, ...]]()
    monkeypatch.setattr(
        "megatron.training.training.get_model", lambda *args, **more: calls.append((*args, more)) or ["chunk"]
    )
    build = home.model_builder({"model_provider_func": "provider", "model_type": "kind"})
    assert not calls, "only when it is called"
    assert build() == ["chunk"] and calls == [("provider", "kind", {"wrap_with_ddp": False})]


@pytest.mark.parametrize("fails", [False, True])
def test_a_configurations_builder_initialises_as_the_arguments_say_now(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """They change while it is there, and it is as before when the builder has ended."""
    seen, transformer = list[bool](), SimpleNamespace(perform_initialization=True)

    def build_distributed_models(**more: Any) -> list[str]:
        assert more == {"pg_collection": "groups", "wrap_with_ddp": False}
        seen.append(transformer.perform_initialization)
        if fails:
            raise RuntimeError("no memory")
        return ["chunk"]

    builder = SimpleNamespace(build_distributed_models=build_distributed_models)
    described = SimpleNamespace(transformer=transformer, get_builder_cls=lambda: lambda _: builder)
    monkeypatch.setattr(home, "get_args", lambda: SimpleNamespace(perform_initialization=False))
    monkeypatch.setattr(ProcessGroupCollection, "use_mpu_process_groups", lambda: "groups")
    build = home.model_builder({"cfg_container": SimpleNamespace(model=described), "model_provider_func": None})
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            build()
    else:
        assert build() == ["chunk"]
    assert seen == [False] and transformer.perform_initialization is True
