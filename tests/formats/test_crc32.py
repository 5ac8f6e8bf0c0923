"""CRC-32 by parts."""

import copy
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.formats import crc32 as module
from nxd_ckpt.formats.crc32 import BLOCK, block_crcs, combine, combine_blocks, crc32, digest_of_value, zeros

LISTS: list[object] = [
    [1, 2], "[1, 2]", (1, 2), [1, 2.0], [True, 2], ["1", 2], "1", 1, [], (), [-0.0], [0.0], [2**20000], [2**20000 + 1]
]  # fmt: skip


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_crc_of_two_parts_is_combined_from_theirs(a: bytes, b: bytes) -> None:
    """The CRC of a concatenation follows from the CRCs and lengths of the parts, whatever computes it."""
    whole = zlib.crc32(a + b)
    assert whole == crc32(b, crc32(a))
    assert whole == combine(crc32(a), crc32(b), len(b))
    assert whole == module._shift(crc32(a), len(b)) ^ crc32(b)


@pytest.mark.parametrize("length", [0, 1, 7, 4096, 1_000_003])
def test_zeros_is_the_crc_of_zero_bytes(length: int) -> None:
    assert zlib.crc32(bytes(length)) == zeros(length)


@pytest.mark.parametrize("length", [0, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_blocks_combine_to_the_whole(length: int) -> None:
    """The container's CRC is that of its blocks put together, with and without a short last one."""
    data = (b"neuron" * (length // 6 + 1))[:length]
    crcs = block_crcs(memoryview(data))
    assert [zlib.crc32(data[at : at + BLOCK]) for at in range(0, length, BLOCK)] == crcs
    assert zlib.crc32(data) == combine_blocks(crcs, length)


def test_lengths_beyond_32_bits_combine() -> None:
    assert zeros(5 * 2**30) == combine(zeros(2**30), zeros(4 * 2**30), 4 * 2**30)


def test_plain_data_of_other_text_or_types_has_another_digest() -> None:
    """A long list is digested by its text at once, and is not taken for that text, or for a list that equals it."""
    digests = list(map(digest_of_value, LISTS))
    assert len(LISTS) == len(set(digests))
    assert digests == list(map(digest_of_value, copy.deepcopy(LISTS)))
