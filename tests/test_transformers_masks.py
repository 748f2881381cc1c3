"""Masks told in a few numbers: they say what transformers' dense masks say, and are made only for who reads them."""

import pytest
import torch
from transformers import masking_utils

import regardant.transformers  # noqa: F401 - registers
from regardant.transformers.masks import LazyMask, mask

B = 3


def left_padded(length, generator):
    starts = torch.randint(0, length // 2, (B,), generator=generator)
    return torch.arange(length) >= starts[:, None]


def right_padded(length, generator):
    stops = torch.randint(length // 2, length + 1, (B,), generator=generator)
    return torch.arange(length) < stops[:, None]


def with_holes(length, generator):
    return torch.rand((B, length), generator=generator) < 0.7


def all_hidden(length, generator):
    return left_padded(length, generator) & torch.tensor([True, False, True])[:, None]


def packed_positions(length, generator):
    """Documents of random lengths, each counted from 0."""
    rows = []
    for _ in range(B):
        cuts = torch.randint(1, 6, (length,), generator=generator)
        rows.append(torch.cat([torch.arange(int(cut)) for cut in cuts])[:length])
    return torch.stack(rows)


def functions(length, generator):
    """Mask functions as transformers makes them, by name; those of packed documents need all keys to be new."""
    left = torch.randint(0, 4, (B,), generator=generator)
    positions = packed_positions(length, generator)
    ids = masking_utils.find_packed_sequence_indices(positions)
    window = masking_utils.sliding_window_causal_mask_function(4)
    chunks = masking_utils.chunked_causal_mask_function(5, left)
    documents = masking_utils.packed_sequence_mask_function(ids)

    def packed(function):
        moved = masking_utils.remap_positions_for_packed_sequence(function, positions)
        return masking_utils.and_masks(moved, documents)

    return {
        "causal": masking_utils.causal_mask_function,
        "full": masking_utils.bidirectional_mask_function,
        "window": window,
        "chunks": chunks,
        "packed": packed(masking_utils.causal_mask_function),
        "packed window": packed(window),
        "packed chunks": packed(masking_utils.chunked_causal_mask_function(3, torch.zeros(B, dtype=int))),
    }


NAMES = list(functions(4, torch.Generator()))
PADDINGS = {
    "none": None,
    "left": left_padded,
    "right": right_padded,
    "holes": with_holes,
    "hidden": all_hidden,
}
# T, S, position of the first query, position of the first key, and how much of the keys the padding mask knows
PLACES = {
    "prefill": (12, 12, 0, 0, 12),
    "chunk": (5, 13, 8, 0, 13),
    "step": (1, 13, 12, 0, 13),
    "static": (4, 20, 6, 0, 10),
    "behind a window": (3, 6, 10, 7, 13),
}


# transformers packs whole texts, without padding.
CASES = [
    (name, padding, place)
    for name in NAMES
    for padding in PADDINGS
    for place in PLACES
    if not name.startswith("packed") or (padding, place) == ("none", "prefill")
]


@pytest.mark.parametrize(("name", "padding", "place"), CASES)
def test_it_says_what_the_dense_mask_says(name, padding, place):
    T, S, q_offset, kv_offset, known = PLACES[place]
    generator = torch.Generator().manual_seed(len(name) + 7 * len(padding) + 31 * T)
    made = PADDINGS[padding]
    said = {
        "batch_size": B,
        "q_length": T,
        "kv_length": S,
        "q_offset": torch.tensor(q_offset) if place == "static" else q_offset,
        "kv_offset": kv_offset,
        "mask_function": functions(T, generator)[name],
        "attention_mask": None if made is None else made(known, generator),
    }
    told = mask(**said)
    assert isinstance(told, LazyMask)
    dense = masking_utils.sdpa_mask(**said, allow_is_causal_skip=False)
    torch.testing.assert_close(told & True, dense, rtol=0, atol=0)
    torch.testing.assert_close(told.visible.dense(), dense.expand(B, 1, T, S), rtol=0, atol=0)


def test_its_memory_grows_with_the_length_and_not_with_its_square():
    padding = left_padded(2000, torch.Generator())
    told = mask(B, 2000, 2000, attention_mask=padding).visible
    sizes = [value.nelement() for value in vars(told).values() if isinstance(value, torch.Tensor)]
    assert sum(sizes) == B
    holes = mask(B, 2000, 2000, attention_mask=with_holes(2000, torch.Generator())).visible
    assert [ids.untyped_storage().nbytes() for ids in holes.segments] == [8 * B, 8 * B * 2000]


def test_slices_of_queries_and_keys_stay_told():
    told = mask(
        B, 9, 12, 3, mask_function=masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 1, 2])),
        attention_mask=left_padded(12, torch.Generator().manual_seed(3)),
    )  # fmt: skip
    dense = told.visible.dense()
    for cut in (
        (..., slice(-2, None), slice(None)), (..., slice(2, 5), slice(1, 7)), (..., slice(None), slice(0, 40)),
        (..., slice(4, 2), slice(None)),
    ):  # fmt: skip
        part = told[cut]
        assert isinstance(part, LazyMask)
        torch.testing.assert_close(part.visible.dense(), dense[cut], rtol=0, atol=0)
    for cut in (slice(1, 2), (0,), (..., slice(None, None, 2)), (slice(None), 0)):
        part = told[cut]
        assert not isinstance(part, LazyMask)
        torch.testing.assert_close(part, dense[cut], rtol=0, atol=0)


def test_other_operations_get_the_dense_mask():
    told = mask(B, 4, 4)
    dense = told.visible.dense()
    torch.testing.assert_close(~told, ~dense)
    torch.testing.assert_close(torch.where(told, 1.0, -1.0), torch.where(dense, 1.0, -1.0))
    torch.testing.assert_close(torch.cat([told, told], dim=-1), torch.cat([dense, dense], dim=-1))
    assert told.to("cpu") is told
    assert told.contiguous() is told
    assert isinstance(told.detach(), LazyMask)
    assert told.all().item() is False
    assert "offset=0" in repr(told)


@pytest.mark.parametrize("use", [lambda told: torch.zeros(4, 4) + told, lambda told: told.to(torch.float32)])
def test_a_model_that_adds_it_to_scores_is_refused(use):
    with pytest.raises(ValueError, match="computes attention by itself"):
        use(mask(B, 4, 4))


def test_what_has_no_description_is_dense():
    blocks = torch.tensor([[-1, 0, 0, -1, 1, 1]] * B)
    function = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks)
    )
    said = {"batch_size": B, "q_length": 6, "kv_length": 6, "mask_function": function}
    made = mask(**said)
    assert type(made) is torch.Tensor
    torch.testing.assert_close(made, masking_utils.sdpa_mask(**said, allow_is_causal_skip=False))
    # Positions that jump within a document mean something else than order.
    positions, ids = torch.tensor([[0, 2, 4, 0, 1, 2]] * B), torch.tensor([[0, 0, 0, 1, 1, 1]] * B)
    jumping = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(
            masking_utils.sliding_window_causal_mask_function(2), positions
        ),
        masking_utils.packed_sequence_mask_function(ids),
    )
    said["mask_function"] = jumping
    made = mask(**said)
    assert type(made) is torch.Tensor
    torch.testing.assert_close(made, masking_utils.sdpa_mask(**said, allow_is_causal_skip=False))
    said["mask_function"] = masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda *at: at[3] % 2 == 0
    )
    assert type(mask(**said)) is torch.Tensor
