import copy
import pickle
import random
import re
from itertools import pairwise

import pytest

from subquad_tokenizers import WORLD_VOCAB_FILE, GreedyEncoder, read_vocabulary


@pytest.fixture(scope="module")
def encoder():
    return GreedyEncoder(read_vocabulary(WORLD_VOCAB_FILE))


def cuts_of(encoder, data):
    """Where `data` is cut: inside a block between pieces, and between blocks."""
    pieces = encoder._split(data)
    assert b"".join(pieces) == data
    inside, position = set(), 0
    for piece in pieces[:-1]:
        position += len(piece)
        inside.add(position)
    return inside, {match.start() for match in encoder._cut.finditer(data)}


def test_no_token_is_cut(encoder):
    """
    The proof that pieces may be encoded apart. The decision to cut looks at the byte before and the byte after and at
    nothing else (shown below), so it is enough that no token is ever cut when it stands alone: neither is it inside a
    text.
    """
    for token in encoder.tokens:
        assert encoder._split(token) == [token]
        assert encoder._cut.search(token) is None


def test_a_cut_depends_on_the_two_bytes_around_it(encoder):
    """Every pair of bytes, in many surroundings, is cut always or never, and never if it is in a token."""
    in_tokens = {pair for token in encoder.tokens for pair in pairwise(token)}
    rng = random.Random(0)
    alphabet = list(range(256))
    decisions = {}
    for _ in range(3):
        # A walk in which each pair of bytes occurs: surroundings differ from one walk to the next.
        rng.shuffle(alphabet)
        data = bytearray()
        for step in range(256):
            for index in range(256):
                data += bytes([alphabet[index], alphabet[(index + step) % 256]])
        data = bytes(data)
        inside, between = cuts_of(encoder, data)
        assert inside == between
        for position in range(1, len(data)):
            pair = (data[position - 1], data[position])
            assert decisions.setdefault(pair, position in inside) == (position in inside)
    assert len(decisions) == 256 * 256
    cut = {pair for pair, decision in decisions.items() if decision}
    assert not cut & in_tokens
    # And it is not for nothing: words, ideographs and punctuation after a letter stand alone.
    for before, after in ("a ", "a\n", "a.", "a(", "1,"):
        assert (ord(before), ord(after)) in cut
    assert len(encoder._split(b"The cat (a cat) sat.")) == 6
    assert len(encoder._split("学而时习之".encode())) == 5


def test_equals_the_reference(encoder, reference, text):
    data = text.encode()
    expected = reference.encodeBytes(data)
    for _ in range(2):  # the second time from the dictionary
        assert encoder.encode(data) == expected
    assert encoder.encode_piece(data) == expected


def test_random_bytes(encoder, reference):
    rng = random.Random(2)
    for length in [*range(1, 40), 1000, 100_000]:
        data = rng.randbytes(length)
        assert encoder.encode(data) == encoder.encode_piece(data) == reference.encodeBytes(data)


def test_random_tokens_in_a_row(encoder, reference):
    """Text as hard as it gets: ends of tokens, where the longest match is seldom the one that was put there."""
    rng = random.Random(3)
    data = b"".join(rng.choices(encoder.tokens, k=30_000))
    assert encoder.encode(data) == encoder.encode_piece(data) == reference.encodeBytes(data)
    data = b"".join(token[: rng.randrange(1, len(token) + 1)] for token in rng.choices(encoder.tokens, k=30_000))
    assert encoder.encode(data) == encoder.encode_piece(data) == reference.encodeBytes(data)


def test_blocks(reference, text):
    """Whatever the size of a block, also where one has no cut at all."""
    encoder = GreedyEncoder(read_vocabulary(WORLD_VOCAB_FILE)[:2000])
    data = text.encode()[:2000]
    whole = encoder.encode_piece(data)
    for encoder.block_bytes in (1, 7, 64):
        assert encoder.encode(data) == whole


def test_any_vocabulary():
    """Cuts come from the vocabulary at hand, not from World's."""
    rng = random.Random(4)
    letters = b"ab (\n\xe4\xb8"
    for _ in range(30):
        words = {bytes(rng.choices(letters, k=rng.randrange(2, 6))) for _ in range(rng.randrange(40))}
        tokens = [bytes([byte]) for byte in range(256)] + sorted(words)
        encoder = GreedyEncoder(tokens)
        longest_first = re.compile(b"|".join(map(re.escape, sorted(tokens, key=len, reverse=True))), re.DOTALL)
        data = bytes(rng.choices(letters, k=2000))
        expected = [tokens.index(token) + 1 for token in longest_first.findall(data)]
        assert encoder.encode(data) == expected
        assert encoder.encode_piece(data) == expected


def test_dictionary_is_bounded(encoder):
    encoder = GreedyEncoder(encoder.tokens)
    encoder.max_pieces, encoder.max_piece_bytes = 100, 10
    for number in range(1000):
        encoder.encode(b"a%d " % number * 5)
        encoder.encode(b"b" * 11)
        assert len(encoder._pieces) <= 100
        assert max(map(len, encoder._pieces), default=0) <= 10
    assert len(encoder._pieces) > 1


def test_noise_stays_out_of_the_dictionary(encoder):
    encoder = GreedyEncoder(encoder.tokens)
    data = random.Random(5).randbytes(500_000)
    encoder.encode(data)
    assert 0 < len(encoder._pieces) < len(set(encoder._split(data))) / 4
    # Ordinary text finds its way back in.
    words = b" the cat sat on the mat and looked at me" * 10_000
    encoder.encode(words)
    encoder.encode(words)
    assert b" mat" in encoder._pieces
    assert encoder._uncached_bytes == 0


def test_copies(encoder):
    assert copy.deepcopy(encoder) is encoder
    before = len(pickle.dumps(encoder))
    encoder.encode(b"a few more words")
    state = pickle.dumps(encoder)
    assert len(state) == before < 2_000_000
    assert pickle.loads(state).encode(b"a few more words") == encoder.encode(b"a few more words")
