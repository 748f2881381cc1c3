"""The page as a file: its arrays, its text, its policy. No browser; the file is read as any parser would."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from page_data import HOSTILE, page_data

from regardant.page import export, render

WORDS = ["The", " trophy", " did", " not", " fit", " because", " it", " was", " big", "."]


class Reader(HTMLParser):
    """Elements with their attributes, and the text inside scripts, styles and the title."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.texts = []
        self.inside = None

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in {"script", "style", "title"}:
            self.inside = (tag, dict(attrs))
            self.texts.append((*self.inside, ""))

    def handle_endtag(self, tag):
        if self.inside is not None and tag == self.inside[0]:
            self.inside = None

    def handle_data(self, data):
        if self.inside is not None:
            tag, attrs, text = self.texts[-1]
            self.texts[-1] = (tag, attrs, text + data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def facts_of(reader):
    [text] = [text for _, attrs, text in reader.texts if attrs.get("id") == "data"]
    return json.loads(text)


def decoded(reader, count):
    """Every field of every record, (T, ...), read by what the page says of its own layout."""
    record = facts_of(reader)["record"]
    blocks = [text for _, attrs, text in reader.texts if attrs.get("id", "").startswith("records-")]
    coded = "".join(blocks)
    assert len(coded) == count * record["chars"]
    rows = [coded[i * record["chars"] : (i + 1) * record["chars"]] for i in range(count)]
    raw = [base64.b64decode(row, validate=True) for row in rows]
    fields = {}
    for field in record["fields"]:
        kind = np.dtype("<" + field["type"].replace("u16", "u2").replace("u32", "u4"))
        size = math.prod(field["shape"])
        assert field["at"] % kind.itemsize == 0, "a browser's typed array must be aligned"
        parts = [np.frombuffer(row, kind, size, field["at"]).reshape(field["shape"]) for row in raw]
        fields[field["name"]] = np.stack(parts)
    return fields


def by_token(array, axis):
    return np.moveaxis(np.asarray(array), axis, 0)


def assert_keys(found, given, missing):
    np.testing.assert_array_equal(found, np.where(given < 0, missing, given))


def assert_shares(found, given, units=65535):
    # Rounding to the nearest unit, and the rounding of the product itself.
    np.testing.assert_allclose(found / units, given, rtol=0, atol=0.5 / units + 1e-12)


@pytest.mark.parametrize("block", [1, 700, 1 << 20])
def test_arrays_come_back(monkeypatch, block):
    monkeypatch.setattr(export, "_BLOCK_CHARACTERS", block)
    data, _ = page_data(WORDS, layers=(4, 7), heads=3)
    fields = decoded(read(render(data)), len(WORDS))
    for measure in ("weight", "written"):
        given = data["all"][measure]
        assert_keys(fields[f"all.{measure}.keys"], given["keys"], 0xFFFF)
        assert_shares(fields[f"all.{measure}.weights"], given["weights"])
        assert_shares(fields[f"all.{measure}.rest"], given["rest"])
        assert_shares(fields[f"all.{measure}.first"], given["sink"])
    assert_keys(fields["layer.keys"], by_token(data["per_layer"]["keys"], 1), 0xFFFF)
    assert_shares(fields["layer.weights"], by_token(data["per_layer"]["weights"], 1))
    assert_shares(fields["layer.rest"], by_token(data["per_layer"]["rest"], 1))
    assert_keys(fields["head.keys"], by_token(data["heads_top"]["keys"], 2), 0xFFFF)
    assert_shares(fields["head.weights"], by_token(data["heads_top"]["weights"], 2))
    assert_shares(fields["head.entropy"], by_token(data["heads_top"]["entropy"], 2), units=4096)


def test_number_of_blocks_follows_their_size(monkeypatch):
    data, _ = page_data(WORDS)
    one = facts_of(read(render(data)))["record"]["chars"]
    monkeypatch.setattr(export, "_BLOCK_CHARACTERS", 3 * one)
    reader = read(render(data))
    blocks = [text for _, attrs, text in reader.texts if attrs.get("id", "").startswith("records-")]
    assert [len(block) for block in blocks] == [3 * one, 3 * one, 3 * one, one]
    assert facts_of(reader)["record"]["perBlock"] == 3


@pytest.mark.parametrize(("layers", "heads", "listed", "top"), [(1, 1, 1, 1), (2, 3, 6, 4), (5, 2, 3, 7)])
def test_size_is_what_the_docstring_says(layers, heads, listed, top):
    data, _ = page_data(WORDS, layers=range(layers), heads=heads, listed=listed, top=top)
    data["layers"] = list(range(layers))
    key = 2
    size = (
        2 * (listed * (key + 2) + 4)
        + layers * (listed * (key + 2) + 2)
        + layers * heads * (top * (key + 2) + 2)
    )
    assert facts_of(read(render(data)))["record"]["chars"] == 4 * math.ceil(size / 3)


@pytest.mark.parametrize(("count", "kind", "missing"), [(65534, "u16", 0xFFFF), (65535, "u32", 0xFFFFFFFF)])
def test_keys_widen_where_sixteen_bits_end(count, kind, missing):
    ends = np.full((count, 1), -1)
    ends[-1] = count - 1
    shares = (ends >= 0).astype(np.float32)
    every = {"keys": ends, "weights": shares, "rest": 1 - shares[:, 0], "sink": np.zeros(count)}
    data = {
        "title": "",
        "model": "",
        "focus": 0,
        "tokens": [{"text": "x", "id": 0}] * count,
        "layers": [0],
        "heads": 1,
        "all": {"weight": every, "written": every},
        "per_layer": None,
        "heads_top": {
            "keys": ends[None, None],
            "weights": shares[None, None],
            "entropy": np.zeros((1, 1, count)),
        },
    }
    reader = read(render(data))
    types = {
        field["type"] for field in facts_of(reader)["record"]["fields"] if field["name"].endswith("keys")
    }
    assert types == {kind}
    keys = decoded(reader, count)["head.keys"].ravel()
    assert (keys[0], keys[-1]) == (missing, count - 1)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_any_float_any_strides_read_only(kind):
    data, _ = page_data(WORDS)
    same, _ = page_data(WORDS)
    for entry in (data["heads_top"], data["per_layer"], *data["all"].values()):
        for name, array in entry.items():
            turned = np.asfortranarray(array if name == "keys" else array.astype(kind))
            turned.flags.writeable = False
            entry[name] = turned
    found = decoded(read(render(data)), len(WORDS))
    expected = decoded(read(render(same)), len(WORDS))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        # One rounding to the narrower type (relative to at most 1, or 4 nats), and one unit.
        units = 4 * 4096 if name == "head.entropy" else 65535
        slack = 0 if name.endswith("keys") else units * float(np.finfo(kind).eps) + 1
        np.testing.assert_allclose(array.astype(float), expected[name].astype(float), rtol=0, atol=slack)


def test_per_layer_may_be_absent():
    data, _ = page_data(WORDS)
    data["per_layer"] = None
    names = {field["name"] for field in facts_of(read(render(data)))["record"]["fields"]}
    assert not {name for name in names if name.startswith("layer.")}


def test_hostile_text_is_data():
    data, _ = page_data(HOSTILE)
    data["title"] = "</title></script><script>window.hit = 1</script>\u202e\ud800\x00"
    data["model"] = "<!-- {{records}} \u2028"
    page = render(data)
    assert page.isascii()
    reader = read(page)
    scripts = [attrs for tag, attrs in reader.elements if tag == "script"]
    assert scripts == [
        {"type": "application/json", "id": "data"},
        {},
        {"type": "application/octet-stream", "id": "records-0"},
    ]
    assert [
        tag for tag, _ in reader.elements if tag in {"img", "b", "iframe", "link", "object", "embed", "base"}
    ] == []
    facts = facts_of(reader)
    expected = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in HOSTILE]
    assert facts["texts"] == expected
    assert facts["texts"][HOSTILE.index("\ud800")] == "\ufffd"
    assert facts["texts"][HOSTILE.index("\ud83d\udc69")] == "\U0001f469"
    assert facts["model"] == data["model"]
    [title] = [text for tag, _, text in reader.texts if tag == "title"]
    assert title == "</title></script><script>window.hit = 1</script>\ufffd\ufffd\ufffd \u2013 regardant"


def test_json_cannot_leave_its_script():
    data, _ = page_data(HOSTILE)
    page = render(data)
    raw = page.split('id="data">', 1)[1].split("</script>", 1)[0]
    assert not set("<>&") & set(raw)
    assert raw.isascii()
    assert raw.isprintable()


def test_policy_allows_the_page_and_nothing_else():
    data, _ = page_data(WORDS)
    reader = read(render(data))
    [policy] = [
        attrs["content"]
        for tag, attrs in reader.elements
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def source(tag, attrs):
        [text] = [text for name, given, text in reader.texts if (name, given) == (tag, attrs)]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "script-src": source("script", {}),
        "style-src": source("style", {}),
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    tags = [tag for tag, _ in reader.elements]
    policy_at = next(i for i, (_, attrs) in enumerate(reader.elements) if "http-equiv" in attrs)
    assert policy_at < min(tags.index("style"), tags.index("script")), "a policy binds only what follows it"


def test_no_reference_to_anything_outside():
    data, _ = page_data(WORDS)
    page = render(data)
    for block in re.findall(r'octet-stream" id="[^>]*>([^<]*)<', page):
        page = page.replace(block, "")  # base64 may spell anything
    assert re.findall(r"(?i)\bhttps?:|\bwss?:|\bftp:|@import|url\(|//[a-z]", page) == []
    referring = {
        "src",
        "href",
        "srcset",
        "action",
        "poster",
        "style",
        "onclick",
        "onload",
        "background",
        "ping",
    }
    assert [(tag, attrs) for tag, attrs in read(page).elements if referring & attrs.keys()] == []


def put(data, path, value):
    *parents, last = path.split(".")
    for parent in parents:
        data = data[parent]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("title", 3, "title must be a str; got int"),
        ("focus", 10, "focus must be a token from 0 to 9; got 10"),
        ("focus", True, "focus must be an int; got bool"),
        ("tokens", [], "tokens must be a list with at least one entry"),
        ("tokens", ["a"], "tokens[0] must be a mapping; got str"),
        ("tokens", [{"text": "a"}], "tokens[0].id is missing"),
        ("layers", ["a"], "layers[0] must be an int; got str"),
        ("all.weight", None, "all.weight must be a mapping; got NoneType"),
        ("all.weight.keys", [[0]], "all.weight.keys must be a NumPy array; got list"),
        (
            "all.weight.keys",
            np.zeros((10, 6)),
            "all.weight.keys must be integers (10, any); got float64 (10, 6)",
        ),
        ("all.weight.rest", np.zeros(9), "all.weight.rest must be floats (10,); got float64 (9,)"),
        ("all.weight.rest", np.ones(10), "all.weight with its rest must sum to 1"),
        ("all.weight.sink", np.full(10, np.nan), "all.weight.first must be shares in [0, 1]; got nan to nan"),
        ("per_layer.weights", np.ones((3, 10, 6)), "layer must sum to at most 1; got sums from 6.0 to 6.0"),
        (
            "heads_top.weights",
            np.full((3, 3, 10, 4), 2.0),
            "head.weights must be shares in [0, 1]; got 2.0 to 2.0",
        ),
        (
            "heads_top.keys",
            np.full((3, 3, 10, 4), 1),
            "head.keys must be -1 or positions up to the token's own",
        ),
        ("heads_top.entropy", np.full((3, 3, 10), np.inf), "head.entropy must be finite and at least 0 nats"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(path, value, sentence):
    data, _ = page_data(WORDS)
    put(data, path, value)
    with pytest.raises((TypeError, ValueError), match="^page: .*" + re.escape(sentence)):
        render(data)


def test_a_missing_entry_is_named():
    data, _ = page_data(WORDS)
    del data["heads_top"]
    with pytest.raises(TypeError, match=r"^page: heads_top is missing$"):
        render(data)
