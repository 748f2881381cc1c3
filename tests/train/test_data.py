"""Documents, token files and rows, against the plain text and by identities."""

import dataclasses
import hashlib
import tracemalloc

import numpy as np
import pytest

from regardant.errors import UserError
from regardant.train import data, texts, vocabulary
from train.corpus import text


@pytest.fixture
def build(tmp_path):
    def built(content, share=0.0, size=300, ends=(0, 0)):
        path = tmp_path / "a.txt"
        path.write_text(content, encoding="utf-8")
        made = vocabulary.learn([content], size)
        folder = tmp_path / "data"
        folder.mkdir()
        facts = data.build(folder, [path], made, "sha", data.Ends(*ends), share)
        return made, [data.Tokens(folder, name, facts) for name in data.PARTS], facts

    return built


def test_documents_joined_are_the_file(tmp_path):
    content = text(100_000) + "é" * 50_000 + "\r\nend"
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    digest = hashlib.sha256()
    found = list(texts.documents(path, digest))
    assert "".join(found) == content
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert max(map(len, found)) < 2 * texts.DOCUMENT
    assert len(found) > 4


def test_a_character_cut_by_the_block_survives(tmp_path):
    path = tmp_path / "a.txt"
    content = "a" + "€" * (1 << 18)
    path.write_text(content, encoding="utf-8")
    assert "".join(texts.documents(path)) == content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"abc\x00def", "NUL character, at offset 3"),
        (b"\x7fELF\x00\xff", "NUL character, at offset 4"),
        (b"abc\xffdef", "byte 0xFF at offset 3"),
        (b"x" * (1 << 18) + b"\xe2\x82", "byte 0xE2 at offset 262144"),
        (b"x" * ((1 << 18) - 1) + b"\xe2\x41", "byte 0xE2 at offset 262143"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, sentence):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        list(texts.documents(path))


def test_find_takes_files_folders_and_patterns_once(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.bin", "e.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = texts.find([str(tmp_path / "e.rst"), str(tmp_path), str(tmp_path / "*.txt")])
    assert [path.name for path in found] == ["e.rst", "a.txt", "b.txt", "c.txt"]
    for wrong in ([], [str(tmp_path / "none")], [str(tmp_path / "no*")]):
        with pytest.raises(UserError):
            texts.find(wrong)


def test_every_text_can_be_said_and_comes_back():
    made = vocabulary.learn([text(2000)], 300)
    for unseen in ("\x01 é 😀 \r\n\t ", "漢字かな", "<|end|> as text"):
        made.encode_special_tokens = True
        assert made.decode(made.encode(unseen, add_special_tokens=False).ids) == unseen
    assert made.encode("a").ids[0] == 0


def test_tokens_are_the_text(build):
    content = text(60_000)
    made, (train, valid), facts = build(content, share=0.4)
    assert (facts["train"]["documents"], facts["valid"]["documents"]) == (2, 1)
    assert train.bytes + valid.bytes == len(content.encode())
    documents = []
    for part in (train, valid):
        ends = [*part.starts_D[1:], len(part)]
        for first, last in zip(part.starts_D, ends, strict=True):
            assert part.ids_N[first] == 0
            documents.append(made.decode(part.ids_N[first + 1 : last].tolist()))
    assert documents[0] + documents[2] + documents[1] == content
    train.check()


def test_a_share_is_set_aside_evenly_from_the_second_document_on():
    for share in (0.02, 0.05, 0.1, 0.5):
        chosen = [d for d in range(1000) if data.is_set_aside(d, share)]
        assert chosen[0] == 1
        assert abs(len(chosen) - 1000 * share) <= 1
        assert set(np.diff(chosen)) <= {int(1 / share), int(1 / share) + 1}
    assert not any(data.is_set_aside(d, 0.0) for d in range(100))


@pytest.mark.parametrize("tokens", [33, 40, 64, 65, 100, 1000])
def test_every_pass_reads_each_row_once_and_differs_from_the_last(tokens):
    order = data.Order(tokens, 32, seed=5)
    passes = [np.sort(order.firsts(n * order.count, order.count)) for n in range(4)]
    for firsts in passes:
        assert (np.diff(firsts) == 32).all()
        assert firsts[0] >= 0
        assert firsts[-1] + 33 <= tokens
    if order.slack > 1:
        assert len({int(firsts[0]) for firsts in passes}) > 1
    together = order.firsts(0, 4 * order.count)
    one_by_one = np.concatenate([order.firsts(n, 1) for n in range(4 * order.count)])
    np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 1000])
def test_shuffled_is_a_permutation(count):
    for key in ((0, 0), (0, 1), (7, 0)):
        places = data.shuffled(np.arange(count), count, key)
        np.testing.assert_array_equal(np.sort(places), np.arange(count))
    if count > 60:
        assert (
            data.shuffled(np.arange(count), count, (0, 0)) != data.shuffled(np.arange(count), count, (0, 1))
        ).any()


def test_rows_have_the_next_id_as_label_and_documents_as_segments(build):
    _, (train, _), _ = build(text(60_000))
    firsts = np.array([0, train.starts_D[1] - 5, len(train) - 20])
    batch = train.rows(firsts, 32)
    stream = np.asarray(train.ids_N, np.int64)
    np.testing.assert_array_equal(batch.ids_BT[1], stream[firsts[1] : firsts[1] + 32])
    np.testing.assert_array_equal(batch.labels_BT[1], stream[firsts[1] + 1 : firsts[1] + 33])
    assert np.unique(batch.segments_BT[1]).tolist() == [1, 2]
    assert (batch.segments_BT[1] == 1).sum() == 5
    assert (batch.labels_BT[2][19:] == data.IGNORED).all()
    assert batch.counted == 32 + 32 + 19


def test_a_document_does_not_tell_what_the_next_begins_with_where_no_token_says_so(build):
    _, (train, _), _ = build(text(60_000), ends=(None, None))
    batch = train.rows(np.array([train.starts_D[1] - 5]), 32)
    assert np.flatnonzero(batch.labels_BT[0] == data.IGNORED).tolist() == [4]


@pytest.mark.parametrize("begin", [0, None])
def test_repeated_rows_count_only_what_was_said_before(begin):
    vocabulary_N = np.arange(1, 3000)  # so many that a token rarely comes twice by chance
    lengths = []
    for number in range(60):
        ids, segments, labels = data.repeated_row(np.random.default_rng(number), vocabulary_N, begin, 64)
        assert ids.shape == segments.shape == labels.shape == (64,)
        assert set(np.diff(segments)) <= {0, 1}
        for segment in np.unique(segments):
            (at,) = np.nonzero(segments == segment)
            said, next_ = ids[at].tolist(), labels[at].tolist()
            if begin is not None:
                assert said[0] == begin
                assert begin not in said[1:]
                said, next_ = said[1:], next_[1:]
            counted = [place for place, label in enumerate(next_) if label != data.IGNORED]
            if not counted:  # cut off by the row's end before anything came again
                assert at[-1] == 63
                continue
            # The first token that came before is the first whose successor is known.
            period = counted[0]
            lengths.append(period)
            assert said[period] == said[0]
            for place in counted:
                assert said[place] == said[place - period]
                assert next_[place] == said[place - period + 1]
            last = len(said) - 1  # what comes behind a document is unknown; behind the row, it may be known
            assert counted in ([*range(period, last)], [*range(period, last + (at[-1] == 63))])
    assert min(lengths) == 2
    assert max(lengths) > 16


def test_the_share_of_repeated_rows(build):
    made, (train, _), _ = build(text(60_000))
    order = data.Order(len(train), 32, seed=3)
    feed = data.Feed(train, order, 0.1, 0, np.arange(1, made.get_vocab_size()))
    batch, plain = feed.batch(0, 2000), train.rows(order.firsts(0, 2000), 32)
    repeated = (batch.ids_BT != plain.ids_BT).any(1)
    assert repeated.mean() == pytest.approx(0.1, abs=0.034)  # five deviations of a binomial
    same_in_parts(feed, batch)
    np.testing.assert_array_equal(batch.segments_BT[~repeated], plain.segments_BT[~repeated])
    np.testing.assert_array_equal(batch.labels_BT[~repeated], plain.labels_BT[~repeated])


def same_in_parts(feed, batch):
    """A row is a function of its number, however many are asked for at a time."""
    parts = [feed.batch(first, 500) for first in range(0, 2000, 500)]
    for name in ("ids_BT", "segments_BT", "labels_BT"):
        np.testing.assert_array_equal(getattr(batch, name), np.concatenate([getattr(p, name) for p in parts]))


def test_the_share_of_repeated_rows_at_first(build):
    made, (train, _), _ = build(text(60_000))
    order = data.Order(len(train), 32, seed=3)
    later = data.Feed(train, order, 0.1, 0, np.arange(1, made.get_vocab_size()))
    feed = dataclasses.replace(later, early=1000)
    batch, plain = feed.batch(0, 2000), train.rows(order.firsts(0, 2000), 32)
    repeated = (batch.ids_BT != plain.ids_BT).any(1)
    assert repeated[:1000].mean() == pytest.approx(0.5, abs=0.08)  # five deviations of a binomial
    same_in_parts(feed, batch)
    np.testing.assert_array_equal(batch.ids_BT[1000:], later.batch(1000, 1000).ids_BT)


def test_too_little_text_is_refused_with_the_way_out():
    with pytest.raises(
        UserError, match=r"come to 20 tokens to learn from, and a row takes 33: .* --context of 19"
    ):
        data.Order(20, 32, 0)


def test_a_changed_token_file_is_refused(build):
    _, (train, _), facts = build(text(60_000))
    raw = bytearray(train.path.read_bytes())
    raw[100] ^= 1
    train.path.write_bytes(raw)
    with pytest.raises(UserError, match="was changed"):
        data.Tokens(train.path.parent, "train", facts).check()
    train.path.write_bytes(raw[:-2])
    with pytest.raises(UserError, match="bytes, not"):
        data.Tokens(train.path.parent, "train", facts)


def test_memory_stays_flat_however_large_the_text(tmp_path):
    made = vocabulary.learn([text(5000)], 300)
    peaks = []
    for copies in (1, 8):
        path = tmp_path / f"{copies}.txt"
        path.write_text(text(400_000) * copies, encoding="utf-8")
        folder = tmp_path / f"data{copies}"
        folder.mkdir()
        tracemalloc.start()
        data.build(folder, [path], made, "sha", data.Ends(0, 0), 0.1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The second text is 2.8 MB longer: what grows with it would show as millions.
    assert peaks[1] - peaks[0] < 400_000
