# The compiled kernels, as bindings/module.cpp gives them; regardant.native is the one caller.

from typing import Any

class Problem:
    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        element: int,
        causal: bool,
        offset: int,
        window: int,
        starts: Any,
        lengths: Any,
        q_segments: Any,
        k_segments: Any,
        mask: Any,
        bias: Any,
        bias_type: int,
        alibi: Any,
        sinks: Any,
        softcap: float,
        scale: float,
    ) -> None: ...

def attend(
    problem: Problem,
    threads: int,
    out: Any,
    lse: Any,
    max_logit: Any = ...,
    entropy: Any = ...,
    sink_weight: Any = ...,
    top_keys: Any = ...,
    top_weights: Any = ...,
    top: int = ...,
) -> None: ...
def sums(problem: Problem, threads: int, lse: Any, received: Any, pooled: Any, R: int, C: int) -> None: ...
def rows(problem: Problem, threads: int, lse: Any, heads: Any, queries: Any, weights: Any) -> None: ...
def backward(
    problem: Problem,
    threads: int,
    out: Any,
    dout: Any,
    lse: Any,
    dlse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dsinks: Any,
    dbias: Any,
) -> None: ...
def multiply_adds(rounds: int, threads: int) -> float: ...
def read_all(data: Any, threads: int) -> None: ...
def built() -> list[str]: ...
def present() -> list[str]: ...
def instruction_set() -> str: ...
def choose(name: str) -> None: ...
