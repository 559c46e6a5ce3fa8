"""One member of a quorum of one, by the interface that torchft's manager calls. Run where torchft is installed.

    python tests/integration/torchft_member.py

Written for ``test_torch_suites.py``. Exits with 0 if all holds.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.torchft_group import ProcessGroupElastic


def summed(group: ProcessGroupElastic) -> float:
    total = torch.ones(1)
    group.allreduce([total], dist.ReduceOp.SUM).wait()
    return float(total)


def main() -> None:
    """Configure, abort, and configure again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupElastic(timedelta(seconds=20), host="127.0.0.1", slots=2)
    for quorum in range(2):
        group.configure(f"127.0.0.1:{store.port}/quorum{quorum}", "replica", 0, 1, quorum)
        assert (group.getBackendName(), group.errored()) == ("torchft-elastic", None)
        group.set_timeout(timedelta(seconds=5))
        assert summed(group) == 1.0
        group.abort()
        assert isinstance(group.errored(), CommError)
    group.shutdown()


if __name__ == "__main__":
    main()
