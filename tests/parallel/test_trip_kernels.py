"""The kernels of a trip between ranks against their specification, and the bytes that their headers state."""

import numpy as np
import pytest
from headers import assert_as_stated, evaluate, stated
from planted import Quick, with_fault

from moeblaze_ref.backends.raw_cuda import parallel
from moeblaze_ref.backends.raw_cuda.dispatch import build_part
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.parallel import specification
from moeblaze_ref.placement.copies import choose
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor, _static_shared_bytes
from moeblaze_ref.runtime.source import KernelSource

TRIP, BATCH = "parallel/trip.cu", "parallel/batch.cu"


def random_map(rng, E, G, most):
    """held (E, G): every expert on one to ``most`` GPUs."""
    held = np.zeros((E, G), bool)
    for row in held:
        row[rng.choice(G, rng.integers(1, most + 1), replace=False)] = True
    return held


def copies_of(held, nodes=1):
    """The map as the kernels take it."""
    sole = np.where(held.sum(axis=1) > 1, EMPTY, held.argmax(axis=1)).astype(np.int32)
    return parallel.Copies(sole, held, nodes)


def routing(rng, L, E, k):
    """Experts (L, k) of tokens, and gates."""
    topk = rng.permuted(np.tile(np.arange(E, dtype=np.int32), (L, 1)), axis=1)[:, :k].copy()
    return topk, rng.random((L, k), np.float32)


def chosen(executor, topk, gates, source, held, nodes):
    """What every rank chooses for its own tokens, in the order of all tokens: ranks and words."""
    k = topk.shape[1]
    ranks, words = np.full(topk.shape, -2, np.int32), np.full((len(topk), 2 * k), -2, np.int32)
    for rank in range(held.shape[1]):
        mine = source == rank
        ranks[mine], words[mine] = parallel.choose_ranks(
            np.ascontiguousarray(topk[mine]), np.ascontiguousarray(gates[mine]), copies_of(held, nodes), rank, executor
        )
    return ranks, words


MAPS = [
    (12, 4, 3, 1, 1),  # no copies
    (12, 4, 3, 4, 1),
    (12, 4, 12, 3, 2),  # every expert of a token
    (6, 8, 4, 8, 4),  # more GPUs than experts
    (5, 6, 5, 6, 6),  # a node each
    (9, 8, 1, 8, 2),
    (1, 1, 1, 1, 1),
    (7, 16, 7, 2, 2),
    (5, 80, 5, 70, 40),  # ranks and nodes in several words
]


@pytest.mark.parametrize(("E", "G", "k", "most", "nodes"), MAPS)
def test_ranks_are_chosen_as_specified(E, G, k, most, nodes):
    rng = np.random.default_rng([E, G, k])
    topk, gates = routing(rng, 400, E, k)
    for held in (random_map(rng, E, G, most), np.ones((E, G), bool)):
        for source in (rng.integers(0, G, len(topk)), np.full(len(topk), G - 1)):
            homes = choose(topk, source, held, nodes)
            ranks, words = chosen(Quick(), topk, gates, source, held, nodes)
            np.testing.assert_array_equal(ranks, specification.first_slots(homes))
            np.testing.assert_array_equal(words, np.hstack([homes * E + topk, gates.view(np.int32)]))


def room_of(executor, rng, L, G, k, rows):
    """What the kernel and the specification make of the same tokens."""
    homes = rng.integers(0, G, (L, k)).astype(np.int32)
    ranks = specification.first_slots(homes).astype(np.int32)
    words = rng.integers(0, 2**31, (L, 2 * k)).astype(np.int32)
    found = build_part.unchecked(ranks, G, L * k, executor)
    for before in (True, False):
        noted = np.array(before)
        room = parallel.make_room(found, words, rows, noted, executor)
        assert bool(noted) == (before or bool(room.overflowed))  # a note stays
    return room, specification.make_room(ranks, words, G, rows), ranks


@pytest.mark.parametrize(
    ("L", "G", "k", "rows", "lacks"),
    [
        (200, 4, 3, 200, False),  # so much that all tokens may go to one rank
        (200, 4, 3, 160, False),
        (200, 4, 3, 90, True),
        (200, 1, 1, 200, False),
        (200, 1, 1, 199, True),
        (0, 3, 2, 5, False),
        (7, 300, 8, 1, None),  # more ranks than threads of a block; some seeds overflow
    ],
)
def test_every_rank_has_the_same_room(L, G, k, rows, lacks):
    room, (tokens, words, places, overflowed), ranks = room_of(Quick(), np.random.default_rng([L, rows]), L, G, k, rows)
    copies = room.copies
    assert bool(room.overflowed) == bool(overflowed) and (lacks is None or lacks == bool(overflowed))
    np.testing.assert_array_equal(copies.token_index_map, places.ravel())
    np.testing.assert_array_equal(copies.token_expert_indices, ranks.ravel())
    np.testing.assert_array_equal(copies.expert_token_offsets, rows * np.arange(G + 1))
    np.testing.assert_array_equal(copies.expert_token_indices, tokens)
    np.testing.assert_array_equal(room.words, words)


def arrivals(rng, rows, k, E, G, rank):
    """Words that arrive at a rank which holds every second expert, a fifth of them of no token; and ``here``."""
    numbers = rng.integers(0, G * E, (rows, k)).astype(np.int32)
    words = np.hstack([numbers, rng.random((rows, k), np.float32).view(np.int32)])
    words[rng.random(rows) < 0.2] = EMPTY
    here = np.full((G, E), EMPTY, np.int32)
    here[rank, ::2] = np.arange(len(range(0, E, 2)))
    return words, here


@pytest.mark.parametrize(("rows", "k"), [(300, 3), (1, 1), (128, 1), (513, 8), (0, 2)])
def test_places_are_found_as_specified(rows, k):
    words, here = arrivals(np.random.default_rng(rows), rows, k, 6, 3, 1)
    numbers = np.append(here, EMPTY)[words[:, :k]]
    choices = int((numbers != EMPTY).sum())
    for room in {choices, choices + 1, max(choices - 1, 0)}:
        expected = specification.find_places(words, here.ravel(), room)
        assert bool(expected[2]) == (room < choices)
        for before in (True, False):
            noted = np.array(before)
            found = parallel.find_places(words, here, Quick(), parallel.Limit(room, noted))
            assert bool(noted) == (before or room < choices)  # a note stays
        for mine, theirs in zip(found, expected, strict=True):
            assert np.asarray(mine).tobytes() == np.asarray(theirs, np.asarray(mine).dtype).tobytes()  # NaN among them
    exact = parallel.find_places(words, here, Quick())
    assert exact.overflowed is None and np.array_equal(exact.here, numbers)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_gathered_and_those_of_no_token_are_zeros(dtype):
    rng = np.random.default_rng(0)
    rows, tokens = rng.standard_normal((50, 13)).astype(dtype), rng.integers(EMPTY, 50, 300).astype(np.int32)
    expected = np.where(tokens[:, None] == EMPTY, 0, rows[tokens])
    np.testing.assert_array_equal(parallel.gather(rows, tokens, Quick()), expected)
    nothing = parallel.gather(rows[:0], np.full(4, EMPTY, np.int32), Quick())
    assert nothing.shape == (4, 13) and not nothing.any()
    assert parallel.gather(rows, tokens[:0], Quick()).shape == (0, 13)


@pytest.mark.parametrize("E", [1, 8, 128, 300])
def test_shares_are_those_of_all_tokens(E):
    rng, tokens = np.random.default_rng(E), (37, 0, 64)
    counts = [rng.multinomial(2 * each, np.full(E, 1 / E)) for each in tokens]
    shares = [(each / max(1, each.sum())).astype(np.float32) for each in counts]
    shares[1][:] = np.nan  # of no tokens: not read
    rows = sum(parallel.batch_rows(of_rank, each, Quick()) for of_rank, each in zip(shares, tokens, strict=True))
    together = sum(counts) / sum(map(np.sum, counts))
    for each in tokens:
        found, part = parallel.batch_shares(rows, each, Quick())
        np.testing.assert_allclose(found, together, rtol=1e-6)
        assert part == np.float32(each / sum(tokens))
    nothing, part = parallel.batch_shares(np.zeros(E + 1), 0, Quick())
    assert not nothing.any() and part == 0


def test_losses_are_weighed():
    balance, z, part = (np.array(value, np.float32) for value in (1.25, -3.0, 0.3))
    losses = parallel.weigh_losses(balance, z, part, Quick())
    assert losses.tolist() == [balance * part, z * part]


@pytest.mark.parametrize(("rows", "k"), [(2**30, 1), (2**27, 8)])
def test_more_words_than_can_be_numbered_are_refused(rows, k):
    parallel.check_words(rows - 1024, k)
    with pytest.raises(ValueError, match=rf"{rows} rows travel with 2 k = {2 * k} words each, which are 2147483648"):
        parallel.check_words(rows, k)


# ---- what must be caught -------------------------------------------------------------------------

FAULTS = {
    "its own rank is far": ("    way.visit(here);\n", ""),
    "the last of the nearest": ("near && turn == 0", "near"),
    "no turns": ("token + expert);", "0);"),
    "a sole copy comes late": ("if (rank != EMPTY) way.visit(rank);", ""),
    "a row for each slot": ("sent.has(rank) ? EMPTY : rank", "rank"),
    "a row too many": ("place >= offsets[rank + 1]", "place > offsets[rank + 1]"),
    "a row that is full": ("- offsets[rank] > rows", "- offsets[rank] >= rows"),
    "slots of other ranks": ("- offsets[rank];", "- offsets[0];"),
    "one choice more": ("choices > room", "choices > room + 1"),
    "rows erase a note": ("if (any > 0) noted[0] = true;", "noted[0] = any > 0;"),
    "choices erase a note": ("if (choices > room) noted[0] = true;", "noted[0] = choices > room;"),
    "what lacks room is placed": ("&& overflowed[0]) places", "&& !overflowed[0]) places"),
    "words of spare rows": ("spare ? EMPTY : words[", "spare ? 0 : words["),
    "gates of the neighbours": ("words[k + slot % k]", "words[k + (slot + 1) % k]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault, monkeypatch):
    old, new = FAULTS[fault]

    class Faulty(Quick):
        def load(self, file, text=None, **constants):
            return super().load(file, text=with_fault(file, old, new) if file == TRIP else text, **constants)

    monkeypatch.setitem(globals(), "Quick", Faulty)
    with pytest.raises((AssertionError, KernelFault)):
        for map in MAPS[1:4]:
            test_ranks_are_chosen_as_specified(*map)
        test_every_rank_has_the_same_room(200, 4, 3, 160, False)
        test_every_rank_has_the_same_room(200, 1, 1, 200, False)
        test_places_are_found_as_specified(300, 3)


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", [False, True])
def test_the_kernels_ask_for_the_bytes_that_their_headers_state(lacks):
    E, G, k, L, nodes = 6, 8, 3, 200, 4
    rng, executor = np.random.default_rng(0), SimtExecutor()
    held = random_map(rng, E, G, 3)
    topk, gates = routing(rng, L, E, k)
    rows = 60 if lacks else L
    with executor.recording() as launches:
        ranks, words = parallel.choose_ranks(topk, gates, copies_of(held, nodes), 2, executor)
        found, noted = build_part.unchecked(ranks, G, L * k, executor), np.array(False)
        room = parallel.make_room(found, words, rows, noted, executor)
        here = np.where(held.T, np.arange(E), EMPTY).astype(np.int32, order="C")
        parallel.find_places(room.words, here, executor, parallel.Limit(10 if lacks else G * rows * k, noted))
        shares = parallel.batch_shares(parallel.batch_rows(np.full(E, 0.5, np.float32), L, executor), L, executor)
        parallel.weigh_losses(shares[1], shares[1], shares[1], executor)
    sent = np.minimum(np.bincount(ranks[ranks != EMPTY], minlength=G), rows)
    assert (sent < np.bincount(ranks[ranks != EMPTY], minlength=G)).any() == lacks
    symbols = {"R": L * k, "G": G, "C": int((held.sum(axis=1) > 1)[topk].sum()), "k": k, "P": G * rows}
    symbols |= {"S": int(sent.sum()), "N": int((room.words[:, :k] != EMPTY).sum()), "E": E}
    symbols |= {"F": int(lacks), "O": int(lacks), "B": -(-G * rows * k // parallel.THREADS)}
    headers = stated(TRIP) | stated(BATCH)
    of_these = [launch for launch in launches if launch.kernel in headers]
    assert [launch.kernel for launch in of_these] == [*headers]
    for launch in of_these:
        assert_as_stated(launch, headers, symbols | {"T": 1})


def test_a_rank_without_tokens_reads_no_shares():
    executor = SimtExecutor()
    with executor.recording() as launches:
        parallel.batch_rows(np.full(6, np.nan, np.float32), 0, executor)
    assert_as_stated(launches[0], stated(BATCH), {"E": 6, "T": 0})


def test_a_block_has_the_shared_memory_that_its_header_states():
    for file, constants in ((TRIP, {"RANKS": 70, "NODES": 35}), (BATCH, {})):
        source = KernelSource.read(file, constants | {"THREADS": 128})
        for kernel, header in stated(file).items():
            if kernel != "choose_ranks":  # whose memory is of the launch
                assert evaluate(header.shared, {"THREADS": 128}) == _static_shared_bytes(source, kernel), kernel
