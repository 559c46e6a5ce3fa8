"""Types of the native module built from ``csrc/state`` (addresses are ``Tensor.data_ptr()``)."""

class AdamScalars:
    def __init__(
        self,
        grad_multiplier: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction1: float,
        bias_correction2: float,
        decoupled: bool,
    ) -> None: ...

def adam(master: int, exp_avg: int, exp_avg_sq: int, grad: int, count: int, scalars: AdamScalars) -> None: ...
def adam_twice(
    master: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    next: int,
    count: int,
    scalars: AdamScalars,
    scalars_of_next: AdamScalars,
) -> None: ...
def lion(
    master: int,
    exp_avg: int,
    grad: int,
    count: int,
    grad_multiplier: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None: ...
def sgd(
    master: int,
    buffer: int,
    grad: int,
    count: int,
    grad_multiplier: float,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None: ...
def round_to_bf16(source: int, target: int, count: int) -> None: ...
def sum_of_squares(values: int, count: int) -> float: ...

FEWEST_TAKEN_IN: int

def take_in(source: int, target: int, count: int) -> tuple[bytes, float]: ...
def hash_of(values: int, count: int) -> bytes: ...
def fold(grad: int, sum: int, count: int, scale: float, limit: float, first: bool) -> int: ...
def unfold(sum: int, out: int, count: int, scale: float) -> None: ...
