"""A target: an attention function under test, with what it claims to offer.

An adapter is a function of NumPy arrays that says by its keywords what it offers:

    def mine(q, k, v, *, causal=True, scale=None):
        return my_attention(q, k, v, is_causal=causal, softmax_scale=scale)

Options are those of `regardant.attention`, with its meaning; one that is not among the keywords is not offered. So
it is with `return_lse` (then the result is out and lse), `dout` (then it is dq, dk, dv and, for sinks and bias,
dsinks and dbias), `dlse`, `bias_gradient` and `threads`. `causal` is always given to a function that takes it; one
that does not is taken to be causal. What depends on values is declined by raising `NotOffered`. It refuses a target
that cannot be found, in one sentence.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.conformance.case import DEFAULTS, Call, NotOffered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regardant.problem import Array

EXTRAS = ("return_lse", "dout", "dlse", "bias_gradient", "threads")

# Built-in targets: where their adapters are.
BUILT_IN = {
    "regardant": "ours:auto",
    "regardant:native": "ours:native",
    "regardant:blocked": "ours:blocked",
    "regardant:reference": "ours:reference",
    "regardant.torch": "ours_torch:target",
    "torch": "pytorch:target",
    "flex": "flex:target",
    "onnxruntime": "onnx_runtime:target",
    "jax": "jax_nn:target",
    "transformers:eager": "hugging_face:eager",
    "transformers:sdpa": "hugging_face:sdpa",
}


class UnknownTarget(ValueError):  # noqa: N818 - what is wrong, not that something is
    """A target that cannot be found; the text is one sentence."""


@dataclasses.dataclass(frozen=True)
class Convention:
    """Where a target documents another convention than regardant's: a difference, not a fault.

    Attributes:
        cause: the diagnosis that such a result gets, word for word.
        says: what the target documents. `source`: where.
        cases: names of cases that it is limited to, as a pattern.
    """

    cause: str
    says: str
    source: str
    cases: str = "*"


@dataclasses.dataclass(frozen=True)
class Target:
    """An attention function and what it claims to offer. Make one with `adapter`, or from a plain function.

    Attributes:
        function: called with q, k, v and keywords.
        keywords: those that it takes. `types`: names of element types that it takes.
        views: reads strided views as they are, copying none. `packages`: whose versions to report.
        conventions: where it documents something else. `note`: what a reader of its results should know.
    """

    function: Callable[..., Any]
    keywords: frozenset[str]
    types: tuple[str, ...] = ("float64", "float32", "float16")
    views: bool = False
    packages: tuple[str, ...] = ()
    conventions: tuple[Convention, ...] = ()
    note: str = ""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function itself."""
        return self.function(*arguments, **options)

    def versions(self) -> dict[str, str]:
        """The packages' versions."""
        return {name: metadata.version(name) for name in self.packages}

    def decline(self, call: Call) -> None:
        """Refuse a call for what is not offered.

        Raises:
            NotOffered: names what.
        """
        missing = [name for name in call.asks if name not in self.keywords and name != "causal"]
        if not call.options.get("causal", True) and "causal" not in self.keywords:
            missing.append("causal=False")
        if call.q_BHTD.dtype.name not in self.types:
            missing.append(call.q_BHTD.dtype.name)
        if missing:
            raise NotOffered(", ".join(missing))

    def answer(self, call: Call) -> dict[str, Array]:
        """Put a call to the target and name what comes: out, lse, or gradients.

        Raises:
            NotOffered: the target declines. `Exception`: whatever it raises.
        """
        self.decline(call)
        given = dict(call.options)
        if "causal" in self.keywords:
            given.setdefault("causal", DEFAULTS["causal"])
        extras = {
            "return_lse": call.lse,
            "dout": call.dout_BHTE,
            "dlse": call.dlse_BHT,
            "bias_gradient": call.bias_gradient,
            "threads": call.threads,
        }
        given |= {name: extras[name] for name in call.asks if name in extras}
        return named(call, self.function(call.q_BHTD, call.k_BGSD, call.v_BGSE, **given))


def named(call: Call, result: Any) -> dict[str, Array]:
    """What a target gave, by name; what it left out of the gradients is not offered."""
    if call.dout_BHTE is None:
        parts = result if call.lse else (result,)
        return _arrays(("out", "lse")[: 1 + call.lse], parts)
    wanted = ["dq", "dk", "dv"]
    wanted += ["dsinks"] if "sinks" in call.options else []
    wanted += ["dbias"] if call.bias_gradient else []
    gradients = dict(zip(("dq", "dk", "dv", "dsinks", "dbias"), result, strict=False))
    lacking = [name for name in wanted if gradients.get(name) is None]
    if lacking:
        raise NotOffered(", ".join(lacking))
    return _arrays(wanted, [gradients[name] for name in wanted])


def _arrays(names: Sequence[str], parts: Sequence[Any]) -> dict[str, Array]:
    if not isinstance(parts, tuple | list) or len(parts) != len(names):
        raise TypeError(f"the adapter must give {' and '.join(names)}; it gave {type(parts).__name__}")
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, np.ndarray | np.generic):
            raise TypeError(f"{name} must be a NumPy array; the adapter gave {type(part).__name__}")
    return {name: np.asarray(part) for name, part in zip(names, parts, strict=True)}


def adapter(
    *,
    types: Sequence[str] = Target.types,
    keywords: Sequence[str] | None = None,
    views: bool = False,
    packages: Sequence[str] = (),
    conventions: Sequence[Convention] = (),
    note: str = "",
) -> Callable[[Callable[..., Any]], Target]:
    """Declare more about an adapter than its keywords say.

    Args:
        types: names of element types that it takes; float64, float32 and float16 if nothing is said.
        keywords: what it offers; by default what its signature names, or everything if it ends in `**options`.
        views: whether it reads strided views as they are, copying none, so that huge ones may be given.
        packages: distributions whose versions belong to a report.
        conventions: where it documents another convention.
        note: what a reader of its results should know.

    Returns:
        A decorator that makes a `Target` of a function.
    """

    def declare(function: Callable[..., Any]) -> Target:
        offered = _keywords(function) if keywords is None else frozenset(keywords)
        return Target(function, offered, tuple(types), views, tuple(packages), tuple(conventions), note)

    return declare


def as_target(given: Target | Callable[..., Any]) -> Target:
    """A target as it is, a function as a target that offers what its keywords say."""
    return given if isinstance(given, Target) else adapter()(given)


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    known = {*DEFAULTS, *EXTRAS}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(known)
    return frozenset(parameter.name for parameter in parameters) & known


def find(name: str) -> Target:
    """The target of a name: a built-in one, `module:function`, or `file.py:function`.

    Raises:
        UnknownTarget: there is none.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        try:
            target: Target = getattr(importlib.import_module(f"{__package__}.adapters.{module}"), attribute)
        except ModuleNotFoundError as error:
            raise UnknownTarget(f"{name} needs the package {error.name}, which is not installed") from error
        return target
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise UnknownTarget(
            f"a target must be module:function, file.py:function or one of {', '.join(BUILT_IN)}; got {name!r}"
        )
    module = _module(where)
    members = vars(module)
    if attribute not in members or not callable(members[attribute]):
        raise UnknownTarget(f"{where} has no function {attribute!r}")
    return as_target(members[attribute])


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise UnknownTarget(f"cannot import {where}: there is no module {error.name!r}") from error
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnknownTarget(f"cannot read {where}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
