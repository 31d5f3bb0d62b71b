"""Flags of every target that computes, whatever the workspace that builds it."""

# The bits onepass promises allow one rounding an operation. Without the flags g++ fuses a product
# and a sum across statements (clang does not, so a test with clang alone would miss it), and
# fast-math reorders. Dependents do not read this workspace's .bazelrc, so they stand here; they
# come after the dependent's own --copt and win.
NUMERICS_COPTS = [
    "-fno-fast-math",
    "-ffp-contract=off",
]
