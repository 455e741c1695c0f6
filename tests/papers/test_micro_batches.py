"""MegaBlocks' table 3 by the bytes of whole steps."""

from moeblaze_ref.papers import micro_batches
from moeblaze_ref.papers.claims import Verdict
from moeblaze_ref.papers.micro_batches import DENSE, DROPLESS, MEMORY, TABLE_3, TUTEL, micro_batch, peak_bytes
from moeblaze_ref.papers.results import Recorded


def test_the_rows_say_what_is_printed_and_what_is_counted():
    rows = {row.what.partition(", ")[2]: row for row in micro_batches.table_3(Recorded())}
    assert rows[DROPLESS].verdict is Verdict.AGREES and rows[DROPLESS].formula == "XS 64, Small 32, Medium 8"
    assert rows[DENSE].formula == "XS 64, Small 32, Medium 16, Large 8, XL 8"
    assert rows[DENSE].verdict is rows[TUTEL].verdict is Verdict.DIFFERS and "89.8 GB" in rows[DENSE].why


def test_the_next_micro_batch_does_not_fit():
    for system, size in [(DENSE, "Small"), (DENSE, "XL"), (DROPLESS, "Medium")]:
        batch = micro_batch(system, size)
        assert peak_bytes(system, size, batch) <= MEMORY < peak_bytes(system, size, 2 * batch)


def test_a_larger_capacity_fits_fewer_sequences():
    batches = [micro_batch(TUTEL, "Small", factor) for factor in (1, 4, 18, 64)]
    assert batches == sorted(batches, reverse=True) and batches[0] > batches[-1]
    assert micro_batch(TUTEL, "Small", 17) > TABLE_3[TUTEL]["Small"] >= micro_batch(TUTEL, "Small", 18)
    assert micro_batches.capacity_of("Small") == 18
