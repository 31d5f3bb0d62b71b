#!/usr/bin/env python3
"""Counts the instructions an element of each kernel, and holds them against docs/instructions.md.

    ./bazelw run //tools/instructions:count_test                      # this machine's kernels
    ./bazelw run --config=sve128 //tools/instructions:count_test      # another machine's, emulated
    ./bazelw run //tools/instructions:count_test -- --update          # writes the table anew

Of each operation two calls on different numbers of elements are counted; the difference of the counts,
over that of the elements, is the operation's. A counter counts what lies between two marks: on this machine
a single-stepper, for a program of another architecture, which runs under qemu, a plugin.
A loop of two instructions an element checks the counter first.

ONEPASS_KERNEL restricts the kernels to one. Fails where a count has grown by more than 5 %; one that
has shrunk by as much is only reported. Skips, and says so, where the table knows nothing of the build.
"""

import argparse
import json
import os
import pathlib
import platform
import struct
import subprocess
import sys
import tempfile

GROWTH = 1.05

# Of an ELF file's header: e_machine.
MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64"}

KEY = ("kernel", "vector bits", "architecture", "compiler")
TARGET = "target of adam_step"
NONE = "-"


class Skip(Exception):
    """What is asked for cannot be done here, and nobody is to blame."""


class Failure(Exception):
    """What is asked for went wrong."""


def run(command, skip_status=None, **environment):
    """Runs a program of ours, which ends with `skip_status` where this machine cannot do what it is
    for; returns what it printed."""
    command = [str(word) for word in command]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        kind = Skip if done.returncode == skip_status else Failure
        raise kind("%s: status %d: %s" % (" ".join(command), done.returncode, said))
    return done.stdout


class Stepper:
    """Steps through the call alone."""

    def __init__(self, workload, stepper):
        self._workload, self._stepper = workload, stepper

    def describe(self):
        return json.loads(run([self._workload, "describe"]))

    def count(self, kernel, operation, numel):
        command = [self._stepper, self._workload, "run", operation, numel, "--stop"]
        return int(run(command, skip_status=3, ONEPASS_KERNEL=kernel))


class Emulator:
    """Has qemu count the call alone."""

    def __init__(self, workload, plugin):
        foreign = os.environ.get("ONEPASS_FOREIGN")
        if not foreign:
            raise Failure(
                "%s is not for this machine, and ONEPASS_FOREIGN, which runs it, is not set: use the "
                "--config that it was built with" % workload
            )
        self._foreign, self._workload, self._plugin = foreign, workload, plugin

    def describe(self):
        return json.loads(run([self._foreign, self._workload, "describe"]))

    def count(self, kernel, operation, numel):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "count")
            try:
                run(
                    [self._foreign, self._workload, "run", operation, numel, "--getppid"],
                    ONEPASS_KERNEL=kernel,
                    QEMU_PLUGIN="file=%s,count=%s" % (self._plugin, file),
                )
            except Failure as failure:
                # qemu 9 has left the version that qemu 7 has.
                if "plugin requires API version" in str(failure).lower():
                    raise Skip(str(failure))
                raise
            if not file.exists():
                raise Failure("%s: %s left no count" % (self._plugin, operation))
            return int(file.read_text())


def make_counter(args):
    with args.workload.open("rb") as file:
        magic, machine = struct.unpack("<4s14xH", file.read(20))
    if magic != b"\x7fELF" or machine not in MACHINES:
        raise Failure("%s is no program of %s" % (args.workload, ", ".join(MACHINES.values())))
    if MACHINES[machine] == platform.machine():
        return Stepper(args.workload, args.stepper)
    return Emulator(args.workload, args.plugin)


def count_an_element(counter, kernel, operation, unit):
    # Nothing beside the call is counted, so that the least is enough; a stepper is slow.
    return (counter.count(kernel, operation, 2 * unit) - counter.count(kernel, operation, unit)) / unit


def measure(counter, description):
    """Returns the rows of the kernels that run here, or of the one that ONEPASS_KERNEL names."""
    forced = os.environ.get("ONEPASS_KERNEL")
    kernels = [k for k in description["kernels"] if forced in (None, "", k["name"])]
    if not kernels:
        raise Failure("ONEPASS_KERNEL: no kernel is named %s" % forced)
    if not any(k["supported"] for k in kernels):
        raise Skip("kernel %s cannot run here" % forced)
    rows = []
    for kernel in kernels:
        name = kernel["name"]
        if not kernel["supported"]:
            print("%s cannot run here" % name)
            continue
        if not rows:
            got = count_an_element(counter, name, description["self_check"], 1024)
            if abs(got - 2) > 0.001:
                raise Failure("the counter sees %.4f instructions in a loop of 2" % got)
        row = {
            "kernel": name,
            "vector bits": str(kernel["vector_bits"] or NONE),
            "architecture": description["architecture"],
            "compiler": description["compiler"],
        }
        for operation, unit in description["operations"].items():
            row[operation] = "%.3f" % count_an_element(counter, name, operation, unit)
        rows.append(row)
    return rows


# --- The table ---


def key(row):
    return tuple(row[column] for column in KEY)


def named(row):
    vector = "" if row["vector bits"] == NONE else " of %s bits" % row["vector bits"]
    return "%s%s, %s, %s" % (row["kernel"], vector, row["architecture"], row["compiler"])


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def find_table(path):
    """Returns the lines of the file before the table, its rows, and the lines after it."""
    lines = path.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if cells(line)[: len(KEY)] == list(KEY)), None)
    if start is None:
        raise Failure("%s has no table that begins with the columns %s" % (path, ", ".join(KEY)))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    header = cells(lines[start])
    rows = []
    for number, line in enumerate(lines[start + 2 : end], start + 3):
        if len(cells(line)) != len(header):
            raise Failure("%s:%d: expected %d cells, got %d" % (path, number, len(header), len(cells(line))))
        rows.append(dict(zip(header, cells(line))))
        if key(rows[-1]) in map(key, rows[:-1]):
            raise Failure("%s:%d: a second row of %s" % (path, number, named(rows[-1])))
    return lines[:start], rows, lines[end:]


def format_table(rows, operations):
    header = list(KEY) + operations + [TARGET]
    table = [header] + [[row.get(column, NONE) for column in header] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["| %s |" % " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in table]
    return lines[:1] + ["| %s |" % " | ".join("-" * width for width in widths)] + lines[1:]


def update(path, measured, operations):
    before, rows, after = find_table(path)
    # Columns that are no longer counted go.
    index = {key(row): row for row in rows}
    for row in measured:
        known = index.get(key(row))
        if known is None:
            rows.append(row)
        else:
            known.update((operation, row[operation]) for operation in operations)
    path.write_text("\n".join(before + format_table(rows, operations) + after) + "\n")
    print("wrote %s" % path)


def check(path, measured, operations):
    """Returns whether no count has grown. Says what has changed."""
    _, rows, _ = find_table(path)
    lost = [c for c in (rows[0] if rows else []) if c not in KEY and c != TARGET and c not in operations]
    if lost:
        raise Failure("%s has %s, which nothing counts" % (path.name, ", ".join(lost)))
    table = {key(row): row for row in rows if any(row.get(o, NONE) != NONE for o in operations)}
    renew = "renew the table: see %s" % path.name
    # Of another compiler, say: nobody has said what is right there.
    builds = {(row["architecture"], row["compiler"]) for row in table.values()}
    build = (measured[0]["architecture"], measured[0]["compiler"])
    if build not in builds:
        raise Skip("%s has no counts of %s, %s" % (path.name, *build))
    kernels = {row["kernel"] for row in table.values() if (row["architecture"], row["compiler"]) == build}

    good, compared = True, 0
    for row in measured:
        known = table.get(key(row))
        if known is None and row["kernel"] in kernels:
            print("%s: vectors of a length that %s does not have, not compared" % (named(row), path.name))
            continue
        if known is None:
            print("FAILED: %s: no row in %s; %s" % (named(row), path.name, renew))
            good = False
            continue
        compared += 1
        for operation in operations:
            old, new = known.get(operation, NONE), row[operation]
            what = "%s: %s: %s instructions an element, %s in the table" % (named(row), operation, new, old)
            if old == NONE or float(new) > float(old) * GROWTH:
                print("FAILED: %s; if that is meant, %s" % (what, renew))
                good = False
            elif float(new) * GROWTH < float(old):
                print("NOTE: %s; it has shrunk: %s" % (what, renew))
        if row[TARGET] != NONE and float(row["adam_step"]) > float(row[TARGET]):
            print("NOTE: %s: adam_step: %s, the target is %s" % (named(row), row["adam_step"], row[TARGET]))
    if good and compared == 0:
        raise Skip("%s has no counts of %s" % (path.name, "; ".join(map(named, measured))))
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("workload", "stepper", "plugin", "table"):
        parser.add_argument("--" + name, required=True, type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("--update", action="store_true", help="write the counts to the table of the workspace")
    args = parser.parse_args()

    counter = make_counter(args)
    description = counter.describe()
    operations = list(description["operations"])
    if description["unusual"]:
        raise Skip("this build is %s" % description["unusual"])
    measured = measure(counter, description)
    targets = {key(row): row.get(TARGET, NONE) for row in find_table(args.table)[1]}
    for row in measured:
        row[TARGET] = targets.get(key(row), NONE)
    print("\n".join(format_table(measured, operations)))
    if args.update:
        update(args.table, measured, operations)
        return True
    return check(args.table, measured, operations)


if __name__ == "__main__":
    try:
        sys.exit(0 if main() else 1)
    except Skip as skip:
        print("SKIPPED: %s" % " ".join(str(skip).split()))
    except Failure as failure:
        print("FAILED: %s" % failure)
        sys.exit(1)
