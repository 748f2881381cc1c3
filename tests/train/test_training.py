"""A run from text to a model that others read: transformers, our loader, GGUF; and what the command says."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from regardant.lm import export
from regardant.lm.errors import LoadError, UserError
from regardant.lm.load import load
from regardant.train import heads, loop, report
from train.corpus import SMALL, flags, regardant, text, train

TEXT = "The king and the queen went. <|end|> é 漢 12"
SHAPES = {
    "llama": {},
    "mistral": {"window": 7},
    "qwen3": {"qk_norm": True},
    "qwen3-window": {"qk_norm": True, "window": 7},
}


@pytest.fixture(scope="module", params=list(SHAPES))
def shaped_run(request, tmp_path_factory, small_text, small_run):
    if not SHAPES[request.param]:
        return small_run
    folder = tmp_path_factory.mktemp("runs") / request.param
    train(folder, [small_text], {**SMALL, **SHAPES[request.param], "steps": 2})
    return folder


def their_logits(ids, *place, **options):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(*place, **options).eval()
    with torch.no_grad():
        return theirs(torch.tensor([ids])).logits.numpy()


def close(ours, theirs):
    """Within what float32 leaves of two orders of summing, over a few hundred terms and layers."""
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=256 * np.finfo(np.float32).eps * np.abs(theirs).max()
    )


def test_a_run_is_a_hugging_face_folder(shaped_run):
    ours = load(shaped_run)
    ids = ours.encode(TEXT)
    theirs = transformers.AutoTokenizer.from_pretrained(shaped_run)
    assert theirs(TEXT)["input_ids"] == ids
    assert ids[0] == 0
    assert theirs.decode(ids[1:]) == TEXT
    close(ours.logits(ids), their_logits(ids, shaped_run))
    assert transformers.GenerationConfig.from_pretrained(shaped_run).eos_token_id == 0
    assert ours.tokenizer.eos == {0}


def test_gguf_reads_back_to_the_same_logits(shaped_run, tmp_path):
    ours = load(shaped_run)
    path = tmp_path / "m.gguf"
    if ours.config.windows[0] is not None:
        with pytest.raises(UserError, match="with a window cannot be exported"):
            export.write_gguf(ours, path)
        return
    export.write_gguf(ours, path)
    back = load(path)
    ids = ours.encode(TEXT)
    assert back.encode(TEXT) == ids
    np.testing.assert_array_equal(back.logits(ids), ours.logits(ids))
    assert (back.tokenizer.bos, back.tokenizer.eos) == (0, {0})
    if ours.config.family == "llama":  # transformers takes Qwen3's heads for 128 wide, whatever the file says
        close(ours.logits(ids), their_logits(ids, tmp_path, gguf_file="m.gguf"))


def test_a_folder_in_half_precision(small_run, tmp_path):
    ours = load(small_run)
    export.write_folder(ours, tmp_path / "half", "float16")
    half = load(tmp_path / "half")
    modes = {path.stat().st_mode for path in (tmp_path / "half").iterdir()}
    assert len(modes) == 1  # whoever may read one file may read all
    for name, tensor in ours.weights.items():
        np.testing.assert_array_equal(half.weights[name], np.float32(np.float16(tensor)))
    with pytest.raises(UserError, match="not an empty folder"):
        export.write_folder(ours, tmp_path / "half")


def test_a_way_of_cutting_text_without_a_name_is_refused(small_run, tmp_path):
    shutil.copytree(small_run, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(stored))
    with pytest.raises(LoadError, match="GGUF has no name for"):
        export.write_gguf(load(tmp_path / "run"), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_it_learns(small_run):
    losses = [record["valid_loss"] for record in report.records(small_run) if "valid_loss" in record]
    assert losses[0] > np.log(300)  # at first it knows nothing, or worse
    assert losses[-1] < np.log(300) - 0.5
    checkpoints = sorted(path.name for path in (small_run / "checkpoints").iterdir())
    assert checkpoints == ["step-00000009", "step-00000012"]
    stage = load(small_run / "checkpoints" / "step-00000009")  # each checkpoint is a model too
    assert stage.encode("a") == load(small_run).encode("a")


def test_accumulated_batches_give_the_gradient_of_one(tmp_path, small_text):
    found = []
    for name, given in (("one", {"batch": 8}), ("many", {"batch": 2, "accumulate": 4})):
        settings = {**SMALL, **given, "steps": 1, "repeats": 0.4}
        training = train(tmp_path / name, [small_text], settings, stop=lambda: True)
        loss, _ = loop.gradients(training, 0)
        found.append((loss, {n: leaf.grad for n, leaf in training.parameters.leaves.items()}))
    (loss, whole), (parts_loss, parts) = found
    assert parts_loss == pytest.approx(loss, rel=64 * 2**-23)
    exact = exact_gradient(training, 8)
    for name, gradient in whole.items():
        error, scale = (gradient.double() - exact[name]).abs().max(), exact[name].abs().max()
        budget = 2 * error + torch.finfo(torch.float32).eps * scale
        assert (parts[name].double() - exact[name]).abs().max() <= budget


def exact_gradient(training, rows):
    """The gradient of the first rows in float64, shortened as the loop does."""
    batch = training.feed.batch(0, rows)
    whole = {n: leaf.detach().double().requires_grad_() for n, leaf in training.parameters.leaves.items()}
    weights = {n: whole[p.leaf][p.first : p.last] for n, p in training.parameters.places.items()}
    (loop.batch_loss(weights, training.config, training.chosen, batch) / batch.counted).backward()
    length = torch.sqrt(sum((leaf.grad**2).sum() for leaf in whole.values()))
    return {n: leaf.grad / max(1.0, float(length)) for n, leaf in whole.items()}


def test_a_given_tokenizer_is_used_and_kept(tmp_path, small_text, small_run):
    given = small_run / "tokenizer.json"
    train(tmp_path / "run", [small_text], {**SMALL, "steps": 1}, tokenizer=given)
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert load(tmp_path / "run").encode(TEXT) == load(small_run).encode(TEXT)


def test_bfloat16_learns_nearly_the_same(tmp_path, small_text, small_run):
    train(tmp_path / "run", [small_text], {**SMALL, "dtype": "bfloat16", "steps": 12})
    ours, theirs = (report.summary(folder)["last_valid_loss"] for folder in (tmp_path / "run", small_run))
    assert ours == pytest.approx(theirs, abs=0.05)


# ------------------------------------------------------------------------------------------------------- heads


def weights_matrix(q, k):
    """All weights, by torch's softmax."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.mT).double() / q.shape[-1] ** 0.5
    T = q.shape[2]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1), scores.masked_fill(hidden, -torch.inf)


def test_head_measures_are_those_of_the_whole_matrix(small_run, monkeypatch):
    monkeypatch.setattr(heads, "BLOCK", 5)
    ours = load(small_run)
    weights = {name: torch.tensor(array) for name, array in ours.weights.items()}
    rng = np.random.default_rng(0)
    on = heads.probe(rng.integers(1, 300, (2, 20)), np.arange(1, 300), 0, 32, seed=1)
    assert on.repeated_BT.shape == (4, 31)
    assert (on.repeated_BT[:, 1:16] == on.repeated_BT[:, 16:]).all()
    got = heads.measure(weights, ours.config, on)
    expected = {name: [] for name in heads.MEASURES}

    def attend(_layer, q, k, v, **_options):
        W, s = weights_matrix(q, k)
        if q.shape[2] == 20:
            expected["entropy"].append(-(torch.xlogy(W, W)).sum(-1).mean((0, 2)))
            expected["max_logit"].append(s.amax((0, 2, 3)))
            expected["sink"].append(W[:, :, 2:, 0].mean((0, 2)))
            expected["previous"].append(W.diagonal(-1, 2, 3)[:, :, 1:].mean((0, 2)))
        else:
            at = torch.arange(16, 31)
            expected["induction"].append(W[:, :, at, at - 14].mean((0, 2)))
        return (W.float() @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)).to(q.dtype)

    from regardant.lm import model

    for ids in (on.text_BT, on.repeated_BT):
        model.forward(torch.tensor(ids), weights, ours.config, attend=attend)
    for name in heads.MEASURES:
        np.testing.assert_allclose(got[name], torch.stack(expected[name]).numpy(), rtol=2e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_from_text_to_generation(tmp_path):
    (tmp_path / "a.txt").write_text(text(40_000), encoding="utf-8")
    (tmp_path / "b.txt").write_text(text(20_000, seed=1), encoding="utf-8")
    out = tmp_path / "run"
    done = regardant("train", "--data", tmp_path / "a.txt", tmp_path / "b.txt", "--out", out, *flags(SMALL))
    assert done.returncode == 0, done.stderr
    assert "step 12 of 12" in done.stdout
    assert "nats a byte, over all that was set aside" in done.stdout
    assert "best heads by induction score" in done.stdout
    page = (out / "report.html").read_text(encoding="ascii")
    assert page.count("<svg viewBox") >= 6
    assert "http" not in page.replace("http-equiv", "")
    written = regardant("generate", "The king", "--model", out, "--max-tokens", "8")
    assert written.returncode == 0, written.stderr
    looked = regardant(
        "look", "The king and the queen", "--model", out, "--json", "--out", tmp_path / "look.html"
    )
    assert looked.returncode == 0, looked.stderr
    exported = regardant("export", out, "--gguf", tmp_path / "m.gguf", "--json")
    assert json.loads(exported.stdout)["bytes"] == (tmp_path / "m.gguf").stat().st_size


def test_estimate_tells_and_writes_nothing(tmp_path):
    done = regardant("train", "--estimate", "--json", *flags(SMALL), cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["parameters"] == 300 * 32 + 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 80 + 64) + 32
    assert told["parameter_bytes"] == 16 * told["parameters"]
    assert told["tokens"] == 12 * 4 * 32
    assert told["hours"] == pytest.approx(told["tokens"] / told["tokens_per_s"] / 3600)
    assert told["memory"] > told["parameter_bytes"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"abc\x00", "is not text: it holds a NUL character"),
        (b"abc\xff", "is not UTF-8 text: byte 0xFF at offset 3"),
        (b"a short text", "a row takes 33: give more text, or a --context of"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"a", "come to 2 tokens to learn from, and a row takes 33: give more text\n"),
    ],
)
def test_bad_texts_are_one_sentence(tmp_path, content, sentence):
    (tmp_path / "bad.txt").write_bytes(content)
    (tmp_path / "there").mkdir()
    for out in ("run", "there"):
        done = regardant("train", "--data", tmp_path / "bad.txt", "--out", tmp_path / out, *flags(SMALL))
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"bad.txt", "there", "there/.lock"}


def test_texts_that_are_all_set_aside(tmp_path):
    (tmp_path / "a.txt").write_text(text(60_000), encoding="utf-8")
    with pytest.raises(UserError, match=r"--valid-share 0.99 sets .* aside and leaves .* to learn from"):
        train(tmp_path / "run", [tmp_path / "a.txt"], {**SMALL, "context": 15_000, "valid_share": 0.99})
    training = train(tmp_path / "run", [tmp_path / "a.txt"], {**SMALL, "valid_share": 0.0, "steps": 1})
    assert training.notes == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "run"], "give --data"),
        (["--data", "x.txt"], "give --out a folder"),
        (["--data", "x.txt", "--out", "run"], "no such file"),
        (["--out", "run", "--resume"], "holds no checkpoint to go on from"),
        (["--minutes", "0", "--out", "run"], "--minutes must be greater than 0"),
        (["--device", "tpu", "--out", "run"], "--device must be one of"),
        (["--size", "huge", "--estimate"], "--size must be one of"),
        (
            ["--seed", str(1 << 64), "--estimate"],
            "--seed must be from 0 to 2,147,483,647; got 18446744073709551616",
        ),
        (["--vocab-size", str(1 << 62), "--estimate"], "--vocab-size must be from 257"),
        (["--width", "100000000", "--estimate"], "must fit this machine's"),
        (["--batch", "2000000000", "--estimate"], "must fit this machine's"),
        (["--layers", str(1 << 70), "--estimate"], "--layers must be from 1 to"),
        (["--data", "", "--out", "run"], "--data must name a file"),
        (["--data", "x" * 300, "--out", "run"], "cannot read xxx"),
        (["--data", "~nobody-of-this-name/x", "--out", "run"], "there is no such user"),
        (["--data", ".", "--out", "y" * 300], "cannot write yyy"),
    ],
)
def test_bad_commands_are_one_sentence(tmp_path, arguments, sentence):
    done = regardant("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
