"""The part of a user's program behind the training: it runs to its end, and its exit code is the job's."""

from __future__ import annotations

from pathlib import Path

from tests.integration.elastic_job import elastic_job

SCRIPT = """
import megatron.elastic.adaptor
import os
import sys
import time
from pathlib import Path

import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt.main()
    if os.environ["RANK"] == "0":
        time.sleep(4)  # as in the conversion of a checkpoint
        (Path(__file__).parent / "converted").touch()
    else:
        sys.exit(9)
"""


def test_work_behind_the_training_is_not_cut_short_and_its_failure_is_the_jobs(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_and_convert.py"
    script.write_text(SCRIPT)
    hang_after = "--elastic-detection-timeout", "0.05"  # 1.5 s
    result = elastic_job(
        tmp_path / "events", 2, 1, 1, 3, *hang_after, script=script, launch=("--shutdown-timeout", "1")
    )
    assert result.code == 9, result.output[-4000:]
    assert (tmp_path / "converted").exists(), result.output[-4000:]
    assert max(result.committed) == 3 and not result.of("loss")
