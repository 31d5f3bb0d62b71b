#!/usr/bin/env python3
"""Counts the test cases of one `bazel test`, and judges what was skipped.

Reads Bazel's build events (--build_event_json_file): they name every test target, those that did
not build too, and where each one's test.xml lies. GoogleTest writes a case for each TEST; of a
script Bazel writes one case for the whole, and a script that cannot run here says so with a line
`SKIPPED: reason`.

A line of the expected skips is `MACHINES NAMES PATTERN`: shell patterns, with commas between, over
--machine and over --name, and one over the case as it is printed here.
"""

import argparse
import fnmatch
import json
import pathlib
import re
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def read_events(path):
    """Returns ({label of a test target: [paths of its test.xml]}, labels that failed, and those that
    are not for this platform)."""
    xml_files, failed, incompatible = {}, set(), set()
    for line in path.read_text().splitlines():
        event = json.loads(line)
        event_id = event["id"]
        if "targetConfigured" in event_id:
            label = event_id["targetConfigured"]["label"]
            if "aborted" in event:
                failed.add(label)
            elif event["configured"]["targetKind"].endswith("_test rule"):
                xml_files.setdefault(label, [])
        elif "targetCompleted" in event_id:
            label = event_id["targetCompleted"]["label"]
            if event.get("aborted", {}).get("reason") == "SKIPPED":
                incompatible.add(label)
            elif not event.get("completed", {}).get("success"):
                failed.add(label)
        elif "testResult" in event_id:
            label = event_id["testResult"]["label"]
            result = event["testResult"]
            if result["status"] not in ("PASSED", "FLAKY"):
                failed.add(label)
            xml_files.setdefault(label, []).extend(
                pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
                for output in result.get("testActionOutput", [])
                if output["name"] == "test.xml"
            )
    return xml_files, failed, incompatible


def read_cases(label, xml_file):
    """Yields (case, "passed" | "failed" | "skipped", reason of a skip)."""
    for suite in ElementTree.parse(xml_file).getroot().iter("testsuite"):
        for case in suite.iter("testcase"):
            by_googletest = "classname" in case.attrib
            name = label
            if by_googletest:
                name += ":%s.%s" % (case.get("classname"), case.get("name"))
            # Of a script, what it printed stands beside the case.
            said = re.search(r"^SKIPPED: *(.*)$", suite.findtext("system-out") or "", re.MULTILINE)
            if case.find("failure") is not None or case.find("error") is not None:
                yield name, "failed", ""
            elif case.get("result") == "skipped":
                yield name, "skipped", case.find("skipped").get("message", "").strip()
            elif case.get("status") == "notrun":
                yield name, "skipped", "disabled"
            elif said and not by_googletest:
                yield name, "skipped", said.group(1).strip()
            else:
                yield name, "passed", ""


def matches(text, patterns):
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns.split(","))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="of this run, as the expected skips have it")
    parser.add_argument("--machine", required=True, help="kind of machine, likewise")
    parser.add_argument("--events", required=True, type=pathlib.Path)
    parser.add_argument("--bazel-status", required=True, type=int)
    parser.add_argument("--expected-skips", required=True, type=pathlib.Path)
    parser.add_argument("--counts", required=True, type=pathlib.Path, help="gets a line added")
    args = parser.parse_args()

    expected = []
    for line in args.expected_skips.read_text().splitlines():
        fields = line.split("#")[0].split()
        if fields and matches(args.machine, fields[0]) and matches(args.name, fields[1]):
            expected.append(fields[2])

    xml_files, failed_labels, incompatible = (
        read_events(args.events) if args.events.exists() else ({}, set(), set())
    )
    count = {"passed": 0, "failed": 0, "skipped": 0}

    def fail(what):
        count["failed"] += 1
        print("FAILED %s" % what)

    matched = set()
    for label in sorted(set(xml_files) | failed_labels):
        cases = [c for f in xml_files.get(label, []) if f.exists() for c in read_cases(label, f)]
        if label in incompatible:
            cases = [(label, "skipped", "not for this platform")]
        for name, outcome, reason in cases:
            if outcome == "failed":
                fail(name)
                continue
            count[outcome] += 1
            if outcome == "skipped":
                print("SKIPPED %s: %s" % (name, " ".join(reason.split())))
                patterns = [p for p in expected if fnmatch.fnmatchcase(name, p)]
                matched.update(patterns)
                if not patterns:
                    fail("%s: a skip that %s does not list" % (name, args.expected_skips))
        if label in failed_labels and not any(outcome == "failed" for _, outcome, _ in cases):
            # It did not build, ran out of time, or broke off outside a test case.
            fail(label)
        elif not cases and label not in failed_labels:
            fail("%s: no test case" % label)
    if args.bazel_status != 0 and count["failed"] == 0:
        fail("bazel ended with status %d" % args.bazel_status)
    for pattern in expected:
        if pattern not in matched:
            print("NOTE: %s lists %s, which was not skipped" % (args.expected_skips, pattern))

    print("%s: %d passed, %d failed, %d skipped" % ((args.name,) + tuple(count.values())))
    with args.counts.open("a") as counts:
        counts.write("%d %d %d\n" % tuple(count.values()))


if __name__ == "__main__":
    sys.exit(main())
