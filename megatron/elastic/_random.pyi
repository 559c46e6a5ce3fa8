from collections.abc import Sequence

def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def widest_isa() -> int: ...
def dropout(
    dst: int,
    src: int,
    residual: int,
    bytes: int,
    dtype: int,
    sizes: Sequence[int],
    sample_dim: int,
    extent: Sequence[int],
    offset: Sequence[int],
    seed: int,
    step: int,
    unit: int,
    site: int,
    samples: Sequence[int],
    drop_below: int,
    scale: float,
    isa: int = -1,
) -> None: ...
