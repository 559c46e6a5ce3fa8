"""Serve TCP stores at given ports until killed: a host for the stores of nvidia-resiliency-ext apart from the ranks."""

from __future__ import annotations

import signal
import sys

import torch.distributed as dist


def main() -> None:
    """Serve at each port given."""
    stores = [dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False) for port in sys.argv[1:]]
    print(f"{len(stores)} stores", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
