"""A stand-in of Ascend's package: the names that the engine uses of it, over the stand-in accelerator."""

from tests.standin import device
from torch_npu import _C as _C

device.register()
