"""HCCL (Ascend) behind the same interface, by torch_npu.

HCCL cannot shrink or grow: an edit stops what is in flight and makes the
group's links anew. With the same members (a rank replaced by a new incarnation)
torch_npu's own ``reinit_process_group`` does it in place; with others the group
is made anew by ``make_group``. Either way it is local to the groups a change
touches.

Names used are checked against a torch-npu wheel by
``tests/unit/comm/test_hccl.py``. No Ascend device has run this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.elastic.comm.vendor import Edit, VendorCommunicator, bounded

__all__ = ["GROUP_NAMES", "MODULE_NAMES", "HcclCommunicator"]

MODULE_NAMES = ("reinit_process_group",)
"""Functions used of ``torch_npu.distributed``."""

GROUP_NAMES = ("abort_hccl_comm",)
"""Methods used of its process group backend."""


class HcclCommunicator(VendorCommunicator):
    """One HCCL group. ``distributed`` is the module ``torch_npu.distributed``.

    ``make_group(members)`` makes a process group over ``members`` (global ranks,
    in order) with names of ours; ``device`` is ``torch.device("npu")``.
    """

    def __init__(
        self,
        distributed: Any,
        device: Any,
        members: Sequence[int],
        make_group: Callable[[Sequence[int]], Any],
        limit: float,
    ) -> None:
        self.order = tuple(members)
        self._distributed = distributed
        self._device = device
        self._make_group = make_group
        self._limit = limit
        self.group: Any = make_group(self.order)

    def edit(self, members: Sequence[int], share: Callable[[bytes | None], bytes]) -> Edit:
        """``share`` is not needed: HCCL meets through the store."""
        if tuple(members) == self.order:
            bounded(
                lambda: self._distributed.reinit_process_group(self.group, rebuild_link=True),
                self._limit,
                "reinit_process_group",
            )
            return "rebuilt"
        self.close()
        self.order = tuple(members)
        self.group = self._make_group(self.order)
        return "rebuilt"

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            backend = group._get_backend(self._device)
            bounded(lambda: backend.abort_hccl_comm("edit"), self._limit, "abort_hccl_comm")
