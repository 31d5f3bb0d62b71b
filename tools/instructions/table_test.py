#!/usr/bin/env python3
"""Checks what count_instructions.py makes of a table: what fails, what is skipped, what is written."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # the folder is that of the sources

import count_instructions
from count_instructions import KEY, TARGET, Failure, Skip

OPERATIONS = ["adam_step", "cast"]

TABLE = """# Counts

before

| kernel | vector bits | architecture | compiler | adam_step | cast | target of adam_step |
| --- | --- | --- | --- | --- | --- | --- |
| wide | - | x86_64 | g++ 12 | 2.00 | 0.50 | 1.90 |
| long | 128 | x86_64 | g++ 12 | 4.00 | 1.00 | - |
| long | 256 | x86_64 | g++ 12 | - | - | 3.00 |

after
"""


def row(kernel="wide", bits="-", adam_step="2.00", cast="0.50", compiler="g++ 12", target="-"):
    cells = dict(zip(KEY, (kernel, bits, "x86_64", compiler)))
    return {**cells, "adam_step": adam_step, "cast": cast, TARGET: target}


class TableTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "table.md")
        self.path.write_text(TABLE)
        self.said = io.StringIO()

    def check(self, *rows):
        with contextlib.redirect_stdout(self.said):
            return count_instructions.check(self.path, list(rows), OPERATIONS)

    def update(self, *rows):
        with contextlib.redirect_stdout(self.said):
            count_instructions.update(self.path, list(rows), OPERATIONS)

    def test_equal_counts_pass_in_silence(self):
        self.assertTrue(self.check(row(), row("long", "128", "4.00", "1.00")))
        self.assertEqual(self.said.getvalue(), "")

    def test_growth_within_five_percent_passes(self):
        self.assertTrue(self.check(row(adam_step="2.10")))

    def test_growth_beyond_fails_and_names_all(self):
        self.assertFalse(self.check(row(adam_step="2.11")))
        self.assertIn(
            "FAILED: wide, x86_64, g++ 12: adam_step: 2.11 instructions an element, 2.00 in the table",
            self.said.getvalue(),
        )

    def test_growth_of_any_operation_and_row_fails(self):
        self.assertFalse(self.check(row(), row("long", "128", "4.00", "1.06")))
        self.assertIn("long of 128 bits, x86_64, g++ 12: cast: 1.06", self.said.getvalue())

    def test_shrinking_is_reported(self):
        self.assertTrue(self.check(row(cast="0.47")))
        self.assertIn("NOTE: wide, x86_64, g++ 12: cast: 0.47", self.said.getvalue())

    def test_a_missed_target_is_reported(self):
        self.assertTrue(self.check(row(target="1.90")))
        self.assertIn("NOTE: wide, x86_64, g++ 12: adam_step: 2.00, the target is 1.90", self.said.getvalue())

    def test_another_build_is_skipped(self):
        with self.assertRaisesRegex(Skip, "no counts of x86_64, clang 19"):
            self.check(row(compiler="clang 19"))

    def test_a_kernel_without_a_row_fails(self):
        self.assertFalse(self.check(row(), row("new")))
        self.assertIn("FAILED: new, x86_64, g++ 12: no row in table.md", self.said.getvalue())

    def test_vectors_of_another_length_are_not_compared(self):
        self.assertTrue(self.check(row(), row("long", "512", "9.00")))
        self.assertIn("long of 512 bits, x86_64, g++ 12: vectors of a length", self.said.getvalue())
        for bits in "256", "512":
            with self.assertRaisesRegex(Skip, "no counts of long of %s bits" % bits):
                self.check(row("long", bits, "9.00"))

    def test_update_writes_what_was_measured_and_keeps_the_rest(self):
        self.update(row(adam_step="9.99"), row("long", "256", "3.10", "0.80"), row("new", cast="7.00"))
        text = self.path.read_text()
        self.assertTrue(text.startswith("# Counts\n\nbefore\n\n| kernel"))
        self.assertTrue(text.endswith(" |\n\nafter\n"))
        _, rows, _ = count_instructions.find_table(self.path)
        self.assertEqual(
            rows,
            [
                row(adam_step="9.99", target="1.90"),
                row("long", "128", "4.00", "1.00"),
                row("long", "256", "3.10", "0.80", target="3.00"),
                row("new", cast="7.00"),
            ],
        )
        self.update(row(adam_step="9.99"))
        self.assertEqual(self.path.read_text(), text)

    def test_a_broken_table_is_an_error(self):
        for old, new, message in (
            ("| kernel |", "| colonel |", "has no table"),
            ("| 2.00 | 0.50 |", "| 2.00 |", ":7: expected 7 cells, got 6"),
            ("| long | 256", "| long | 128", ":9: a second row of long of 128 bits"),
        ):
            self.path.write_text(TABLE.replace(old, new))
            with self.assertRaisesRegex(Failure, message):
                self.check(row())


if __name__ == "__main__":
    unittest.main()
