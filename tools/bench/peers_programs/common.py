"""Model, data, optimizer and log of every peer's program: plain torch.

The model has the shape of the Megatron job it is compared with: learned positions, tied output layer, layer norm
before attention and MLP, GELU. The data are the very samples of that job, in its order (``tools.bench._peer_data``).

Invariant: a line of the log is written when the optimizer has stepped, so it tells of a committed step. A line is one
``write`` to a file of this process alone; a process that is killed leaves at most a torn last line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

from tools.bench.peers_programs.layouts import LAYOUTS, PLAIN

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 4, 128, 4, 128, 1024
ROWS = 32
"""Samples of a global batch."""
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
SEED = 11


class Layer(nn.Module):
    """A transformer layer: causal attention and an MLP, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.queries_keys_values, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return states of the same shape [rows, sequence, hidden]."""
        rows, length, _ = states.shape
        mixed = self.queries_keys_values(self.before_attention(states))
        split = mixed.view(rows, length, 3, -1, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        states = states + self.projection(attended.transpose(1, 2).reshape(rows, length, -1))
        grown: torch.Tensor = self.narrow(functional.gelu(self.wide(self.before_mlp(states))))
        return states + grown


class Gpt(nn.Module):
    """GPT whose forward returns the mean loss over the tokens of some samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last_norm = nn.LayerNorm(HIDDEN)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = "projection" in name or "narrow" in name
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if residual else 1))
            elif "norm" not in name and "before" not in name:
                nn.init.zeros_(parameter)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``samples`` [rows, sequence + 1]."""
        given, wanted = samples[:, :-1], samples[:, 1:]
        states = self.tokens(given) + self.positions.weight
        for layer in self.layers:
            states = layer(states)
        return mean_loss(self.last_norm(states) @ self.tokens.weight.t(), wanted)


def mean_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of ``logits`` [rows, sequence, vocabulary] for the tokens ``wanted`` [rows, sequence]."""
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of the job: AdamW with a constant learning rate."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True)


@dataclass(frozen=True)
class Data:
    """The samples of the job: a file of 16-bit tokens, ``SEQUENCE + 1`` a sample."""

    samples: numpy.ndarray[Any, Any]

    @staticmethod
    def read(path: Path) -> Data:
        """Map the file at ``path``."""
        return Data(numpy.memmap(path, dtype=numpy.uint16, mode="r").reshape(-1, SEQUENCE + 1))

    def rows(self, step: int, rank: int, size: int) -> torch.Tensor:
        """Return the samples of global batch ``step`` (from 0) that replica ``rank`` of ``size`` computes."""
        batch = self.samples[step * ROWS : (step + 1) * ROWS]
        return torch.from_numpy(batch[rank::size].astype(numpy.int64))


class Log:
    """The log of one process: one JSON line an event."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"rank{rank:05d}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rank = rank
        self.write("start")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        line = {"kind": kind, "rank": self._rank, "pid": os.getpid(), "wall": time.time(), **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def step(self, step: int, began: float, rows: int, own_rows: int, loss: float) -> None:
        """Tell of a committed step: ``rows`` of the global batch took part, ``own_rows`` of them on this rank."""
        self.write("step", step=step, began=began, rows=rows, own_rows=own_rows, loss=loss)


def options(description: str) -> argparse.Namespace:
    """Parse the flags that every program takes; set one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True, help="folder of the log")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--group-timeout", type=float, default=0.0, help="of the process group, seconds; 0: default")
    parser.add_argument("--checkpoints", type=Path, help="folder: written to at every step, read from at the start")
    parser.add_argument("--layout", type=LAYOUTS.__getitem__, default=PLAIN, help="name of a layout")
    parser.add_argument("--tuned", action="store_true", help="lower the time-outs of the peer")
    parser.add_argument("--heartbeats", action="store_true", help="report to ft_launcher's rank monitor")
    torch.set_num_threads(1)
    return parser.parse_args()
