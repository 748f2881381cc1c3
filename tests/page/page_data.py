"""Data for the page made from whole matrices of weights, so that every figure can be told without the page."""

import numpy as np

HOSTILE = [
    "</script>",
    "<!--",
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "{{script}}",
    "&lt;b&amp;",
    "]]>",
    "\u202eevil",
    "\u2067iso",
    " \u05e9\u05dc\u05d5\u05dd",
    "\u200f",
    "\u2028",
    "\u2029",
    "\ud800",
    "a\udfffb",
    "\ud83d\udc69",
    "\x00",
    "\x1b[31m",
    "\t",
    "\n",
    "    ",
    "",
    "\u0301",
    "\u27e8E2\u27e9",
    " \u00e9\u00df",
    "\U0001f469\u200d\U0001f4bb",
    "end",
]


def top_of(whole, count):
    """The `count` largest of the last axis, heaviest first: positions (-1 where there is none), weights, rest."""
    count = min(count, whole.shape[-1])
    keys = np.argsort(-whole, axis=-1, kind="stable")[..., :count]
    weights = np.take_along_axis(whole, keys, -1)
    return np.where(weights > 0, keys, -1), weights, np.maximum(1 - weights.sum(-1), 0)


def causal_weights(rng, layers, heads, count):
    """Rows of weights over the visible tokens, peaked, with much on the first: (L, H, T, T), float64."""
    scores = rng.normal(size=(layers, heads, count, count)) * 2
    scores[..., 0] += 3
    visible = np.tril(np.ones((count, count), bool))
    raw = np.where(visible, np.exp(scores), 0)
    return raw / raw.sum(-1, keepdims=True)


def page_data(texts, *, layers=(0, 1, 2), heads=3, listed=6, top=4, seed=0, focus=None):
    """What `render` takes, and the matrices behind it: heads (L, H, T, T), weight (T, T), written (T, T)."""
    rng = np.random.default_rng(seed)
    count = len(texts)
    head_LHTT = causal_weights(rng, len(layers), heads, count)
    weight_TT = head_LHTT.mean((0, 1))
    written_TT = (head_LHTT * rng.uniform(0.1, 2, (len(layers), heads, 1, count))).sum((0, 1))
    written_TT /= written_TT.sum(-1, keepdims=True)
    every = {}
    for name, whole in (("weight", weight_TT), ("written", written_TT)):
        keys, weights, rest = top_of(whole, listed)
        every[name] = {"keys": keys, "weights": weights, "rest": rest, "sink": whole[:, 0]}
    layer_keys, layer_weights, layer_rest = top_of(head_LHTT.mean(1), listed)
    keys, weights, _ = top_of(head_LHTT, top)
    entropy = -(head_LHTT * np.log(np.where(head_LHTT > 0, head_LHTT, 1))).sum(-1)
    data = {
        "title": "A test",
        "model": "none",
        "focus": count - 1 if focus is None else focus,
        "tokens": [{"text": text, "id": 100 + i} for i, text in enumerate(texts)],
        "layers": list(layers),
        "heads": heads,
        "all": every,
        "per_layer": {"keys": layer_keys, "weights": layer_weights, "rest": layer_rest},
        "heads_top": {"keys": keys, "weights": weights, "entropy": entropy},
    }
    return data, {"heads": head_LHTT, "weight": weight_TT, "written": written_TT}
