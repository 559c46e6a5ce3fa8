"""Script: write what ``pretrain_gpt.py`` says to the flags of models that it does not build."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pretrain_gpt as script

# isort: split
from megatron.elastic.mcore.args.bad_input import BadInput

GPT: dict[str, Any] = {
    "hybrid_layer_pattern": None,
    "position_embedding_type": "rope",
    "vision_pretraining": False,
    "vision_pretraining_type": "classify",
}


def answer(**given: Any) -> str:
    """Return the line that refuses a model; empty if none does before the model is built."""
    vars(script)["get_args"] = lambda: Namespace(**{**GPT, **given})
    try:
        script.model_provider()
    except BadInput as error:
        return str(error)
    except AttributeError:  # these arguments are not enough for a model
        return ""
    raise AssertionError("a model of four arguments")


def main(out: Path) -> None:
    """Write all answers as JSON."""
    answers = {
        "gpt": answer(),
        "hybrid": answer(hybrid_layer_pattern="M-M*"),
        "mrope": answer(position_embedding_type="mrope"),
        "dino": answer(vision_pretraining=True, vision_pretraining_type="dino"),
        "classify": answer(vision_pretraining=True),
    }
    out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
