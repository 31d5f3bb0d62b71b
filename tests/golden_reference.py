#!/usr/bin/env python3
"""The golden workload of tools/golden.h, written again in numpy: prints its digest.

  golden_reference.py [--expect HEX]

An oracle that shares nothing with the C++ code: a mistake that all kernels make alike passes every
test that compares them, but not this one. The formulas are those that dispatch/kernel.h and
offload/*.h promise; roundings are done by other means than in C++ wherever there are some (the
nearer of two neighbours instead of integer tricks, fractions instead of fixed point). Exits 1 where
the digest is not HEX.
"""

import argparse
import fractions
import math
import sys

import numpy as np

LEAF = 4096

FP32, BF16, FP16, E4M3 = "fp32", "bf16", "fp16", "e4m3"
CODE = {FP32: np.uint32, BF16: np.uint16, FP16: np.uint16, E4M3: np.uint8}

# --- XXH64 (xxhash specification 0.1.1), seed 0 ---

P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MASK = (1 << 64) - 1


def rotate(x, n):
    return ((x << n) | (x >> (64 - n))) & MASK


def mix_lane(lane, word):
    return rotate((lane + word * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
    whole = len(data) // 32 * 32
    words = np.frombuffer(data, "<u8", whole // 8)
    for i in range(4):
        lane = lanes[i]
        # The lanes are independent; numpy multiplies modulo 2^64.
        for product in (words[i::4] * np.uint64(P2)).tolist():
            lane = (lane + product) & MASK
            lane = ((lane << 31) | (lane >> 33)) * P1 & MASK
        lanes[i] = lane
    if whole:
        digest = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            digest = ((digest ^ mix_lane(0, lane)) * P1 + P4) & MASK
    else:
        digest = P5
    digest = (digest + len(data)) & MASK
    rest = data[whole:]
    while len(rest) >= 8:
        word = int.from_bytes(rest[:8], "little")
        digest = (rotate(digest ^ mix_lane(0, word), 27) * P1 + P4) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        word = int.from_bytes(rest[:4], "little")
        digest = (rotate(digest ^ (word * P1 & MASK), 23) * P2 + P3) & MASK
        rest = rest[4:]
    for byte in rest:
        digest = rotate(digest ^ (byte * P5 & MASK), 11) * P1 & MASK
    for shift, factor in ((33, P2), (29, P3), (32, 1)):
        digest = (digest ^ (digest >> shift)) * factor & MASK
    return digest


# --- Formats. An array of elements is an array of codes; arithmetic is on float32. ---

# The float whose place infinity takes in rounding: one step above the largest.
BEYOND = 2.0**128


def as_float(codes):
    return codes.view(np.float32)


def as_bits(values):
    return values.view(np.uint32)


def exact(values):
    """Floats as doubles, with infinity where the next float would be."""
    wide = values.astype(np.float64)
    return np.where(np.isinf(wide), np.copysign(BEYOND, wide), wide)


def round_to_bf16(values):
    """The nearer of the two bf16 neighbours, by their exact distances."""
    bits = as_bits(values)
    below = bits & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    to_below = np.abs(exact(values) - exact(as_float(below)))
    to_above = np.abs(exact(as_float(above)) - exact(values))
    even = (below >> np.uint32(16)) & np.uint32(1) == 0
    nearest = np.where((to_below < to_above) | ((to_below == to_above) & even), below, above)
    nearest = np.where(np.isfinite(values), nearest, bits)
    return np.where(np.isnan(values), 0x7FC0, nearest >> np.uint32(16)).astype(np.uint16)


def round_to_fp16(values):
    codes = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7E00), codes)


def e4m3_table():
    """The values of codes 0 to 0x7e."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, (codes & 7) / 8
    return np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))


E4M3_VALUES = e4m3_table()


def round_to_e4m3(values):
    magnitude = np.abs(values.astype(np.float64))
    above = np.searchsorted(E4M3_VALUES, magnitude).clip(1, 0x7E)
    below = above - 1
    to_below = magnitude - E4M3_VALUES[below]
    to_above = E4M3_VALUES[above] - magnitude  # negative above 448: saturates
    even = below % 2 == 0
    nearest = np.where((to_below < to_above) | ((to_below == to_above) & even), below, above)
    code = nearest + 0x80 * np.signbit(values)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def encode(values, kind):
    if kind == FP32:
        return as_bits(values)
    return {BF16: round_to_bf16, FP16: round_to_fp16, E4M3: round_to_e4m3}[kind](values)


def decode(codes, kind):
    if kind == FP32:
        return as_float(codes)
    if kind == BF16:
        return as_float(codes.astype(np.uint32) << np.uint32(16))
    if kind == FP16:
        return codes.view(np.float16).astype(np.float32)
    magnitudes = np.append(E4M3_VALUES, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -magnitudes, magnitudes).astype(np.float32)


def fma(a, b, c):
    """a * b + c rounded once.

    The product of two floats is exact in double. Half-way points between floats are doubles, and
    rounding is monotone: so the sum in double is on the true sum's side of every half-way point,
    or on the point itself. Only there what the sum lost decides.
    """
    product = a.astype(np.float64) * np.float64(b)
    addend = np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    nearest = total.astype(np.float32)
    upwards = total > exact(nearest)
    other = np.nextafter(nearest, np.where(upwards, np.inf, -np.inf).astype(np.float32))
    half_way = total - exact(nearest) == exact(other) - total
    beyond = np.where(upwards, lost > 0, lost < 0)
    return np.where(half_way & beyond, other, nearest)


# --- Data ---


class Data:
    """Makes arrays, numbered in order."""

    def __init__(self):
        self.made = 0

    def words(self, numel):
        x = np.arange(1, numel + 1, dtype=np.uint64) + np.uint64(self.made << 32)
        self.made += 1
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def raw(self, kind, numel):
        return self.words(numel).astype(CODE[kind])

    def make(self, kind, numel, low, count, non_finite=False, non_negative=False):
        word = self.words(numel)

        def field(first, bits):
            return ((word >> np.uint64(first)) & np.uint64((1 << bits) - 1)).astype(np.int64)

        half = kind == FP16
        mantissa_bits = 10 if half else 23
        mantissa = field(0, mantissa_bits)
        sign = 0 * mantissa if non_negative else field(31, 1)
        exponent = field(32, 16) % 31 if half else low + field(32, 16) % count
        selector = field(56, 8)

        exponent[selector < 16] = 0
        mantissa[selector < 8] = 0
        if not half:
            for first, bits in ((16, 16), (24, 13), (32, 20)):
                here = (first <= selector) & (selector < first + 8)
                near = (1 << (bits - 1)) - 1 + field(48, 2)
                mantissa = np.where(here, mantissa - mantissa % (1 << bits) + near, mantissa)
        if non_finite:
            infinity = (40 <= selector) & (selector < 48)
            nan = (48 <= selector) & (selector < 56)
            exponent[infinity | nan] = 31 if half else 255
            mantissa[infinity] = 0
            mantissa[nan] |= 1

        if half:
            return (sign * 2**15 + exponent * 2**10 + mantissa).astype(np.uint16)
        code = sign * 2**31 + exponent * 2**23 + mantissa
        return (code >> 16).astype(np.uint16) if kind == BF16 else code.astype(np.uint32)


# --- Operations ---


def power(base, exponent):
    """Binary exponentiation in double, from the lowest bit of the exponent up."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result


def adam_step(param, grad, exp_avg, exp_avg_sq, options, t, grad_scale):
    """float32 arrays to float32 arrays; moments are returned unrounded."""
    single = np.float32
    lr, beta1, beta2 = single(options["lr"]), single(options["beta1"]), single(options["beta2"])
    eps, weight_decay = single(options["eps"]), single(options["weight_decay"])
    correction1, correction2 = 1.0, 1.0
    if options["bias_correction"]:
        correction1 = 1 - power(float(beta1), t)
        correction2 = 1 / math.sqrt(1 - power(float(beta2), t))
    step_size = single(-float(lr) / correction1)
    root_scale = single(correction2)
    decay = single(-float(lr) * float(weight_decay))

    g = grad * grad_scale
    if options["decay"] == "L2":
        g = fma(param, weight_decay, g)
    m = fma(g, single(1) - beta1, exp_avg * beta1)
    v = fma(g * g, single(1) - beta2, exp_avg_sq * beta2)
    u = m / fma(np.sqrt(v), root_scale, eps)
    if options["decay"] == "AdamW":
        param = fma(param, decay, param)
    return fma(u, step_size, param), m, v


def leaf_blocks(values):
    """Leaves as rows, the last filled up with zeros."""
    leaves = -(-len(values) // LEAF)
    padded = np.zeros(leaves * LEAF, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(leaves, LEAF)


def squared_norm(values):
    """The exact sum of the sums of leaves, rounded once."""
    squares = np.square(leaf_blocks(values).astype(np.float64)).reshape(-1, LEAF // 16, 16)
    lanes = np.zeros((len(squares), 16))
    for row in range(LEAF // 16):
        lanes += squares[:, row]
    width = 16
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    sums = lanes[:, 0].tolist()
    if any(math.isnan(x) for x in sums):
        return math.nan
    if any(math.isinf(x) for x in sums):
        return math.inf
    return float(sum(map(fractions.Fraction, sums), fractions.Fraction()))


def clip_factor(norm, max_norm, loss_scale):
    clip = max((norm / loss_scale + 1e-6) / max_norm, 1.0) if max_norm > 0 else 1.0
    return np.float32(1 / (clip * loss_scale))


# --- The workload ---


class Workload:
    def __init__(self):
        self.data = Data()
        self.hashed = []

    def add(self, array):
        self.hashed.append(array.astype(array.dtype.newbyteorder("<")).tobytes())

    def add_canonical(self, codes, kind):
        nan = {FP32: 0x7FC00000, BF16: 0x7FC0}[kind]
        self.add(np.where(np.isnan(decode(codes, kind)), codes.dtype.type(nan), codes))

    def add_result(self, values, kind):
        codes = encode(values, kind)
        if kind == FP32:
            self.add_canonical(codes, kind)
        else:
            self.add(codes)
        return codes

    def add_total(self, total):
        total = np.array([total])
        bits = np.where(np.isnan(total), np.uint64(0x7FF8000000000000), total.view(np.uint64))
        self.add(bits)

    def digest(self):
        self.run_adam()
        for numel in (1, 47, 4096, 9001, 30011):
            self.run_operations(numel, non_finite=False)
        for numel in (3, 777):
            self.run_operations(numel, non_finite=True)
        return "%016x" % xxh64(b"".join(self.hashed))

    def run_adam(self):
        grads, moments, copies = (FP32, BF16, FP16), (FP32, BF16), (None, BF16, FP16)
        decays = ("none", "L2", "AdamW")
        cases = [
            (grad, exp_avg, exp_avg_sq, copy, decay, False)
            for grad in grads
            for exp_avg in moments
            for exp_avg_sq in moments
            for copy in copies
            for decay in decays
        ]
        for grad in grads:
            for copy in copies:
                c = len(cases)
                cases.append((grad, moments[c % 2], moments[c // 2 % 2], copy, decays[c % 3], True))
        for c, case in enumerate(cases):
            self.run_adam_case(c, *case)

    def run_adam_case(self, c, grad_kind, m_kind, v_kind, copy_kind, decay, non_finite):
        numel = 1 + 89 * (41 * c % 108)
        wide = c % 2 == 0
        options = {
            "beta1": (0.9, 0.95, 0.8, 0, 0.99)[c % 5],
            "beta2": (0.999, 0.95, 0.999999, 0.5)[c % 4],
            "eps": 0 if non_finite else 1e-8 if c % 4 < 2 else 1e-5,
            "weight_decay": 0 if decay == "none" else 0.1,
            "decay": decay,
            "bias_correction": c % 11 != 10,
        }

        def make(kind, wide_range, narrow_range, non_negative=False):
            low, count = wide_range if wide else narrow_range
            return self.data.make(kind, numel, low, count, non_finite, non_negative)

        param = make(FP32, (97, 60), (115, 12))
        exp_avg = make(m_kind, (63, 104), (105, 17))
        exp_avg_sq = make(v_kind, (1, 206), (90, 28), non_negative=True)
        for s in range(3):
            options["lr"] = 1e-3 / (1 + s)
            grad = make(grad_kind, (63, 104), (105, 20))
            p, m, v = adam_step(
                decode(param, FP32),
                decode(grad, grad_kind),
                decode(exp_avg, m_kind),
                decode(exp_avg_sq, v_kind),
                options,
                (1, 10, 1, 1000, 3, 1, 1095904)[c % 7] + s,
                np.float32(1 / (3 + 2 * c)),
            )
            param, exp_avg, exp_avg_sq = encode(p, FP32), encode(m, m_kind), encode(v, v_kind)
            self.add_canonical(param, FP32)
            self.add_canonical(exp_avg, m_kind)
            self.add_canonical(exp_avg_sq, v_kind)
            if copy_kind is not None:
                self.add(encode(p, copy_kind))

    def run_operations(self, numel, non_finite):
        self.run_accumulate(numel, non_finite)
        self.run_scale(numel, non_finite)
        self.run_cast(numel, non_finite)
        self.run_norm(numel, non_finite)
        self.run_remainder(numel)

    def run_accumulate(self, numel, non_finite):
        for term_kind in (FP32, BF16, FP16):
            addend = as_float(self.data.make(FP32, numel, 97, 44, non_finite))
            term = decode(self.data.make(term_kind, numel, 97, 44, non_finite), term_kind)
            for out_kind in (FP32, BF16, FP16):
                for divisor in (1, 3, 7):
                    for with_sum in (False, True):
                        total = addend + term if with_sum else term
                        codes = self.add_result(total / np.float32(divisor), out_kind)
                        if divisor != 1 or with_sum:
                            self.add_total(squared_norm(decode(codes, out_kind)))

    def run_scale(self, numel, non_finite):
        values = as_float(self.data.make(FP32, numel, 1, 254, non_finite))
        for factor in (1 / 3, 1e30):
            self.add_result(values * np.float32(factor), FP32)

    def run_cast(self, numel, non_finite):
        for kind, low, count in ((BF16, 1, 254), (FP16, 101, 43), (E4M3, 115, 22)):
            self.add_result(as_float(self.data.make(FP32, numel, low, count, non_finite)), kind)
        for kind in (BF16, FP16, E4M3):
            self.add_result(decode(self.data.raw(kind, numel), kind), FP32)

    def run_norm(self, numel, non_finite):
        for kind in (FP32, BF16, FP16):
            for low, count in ((1, 254), (110, 20)):
                values = decode(self.data.make(kind, numel, low, count, non_finite), kind)
                total = squared_norm(values)
                self.add_total(total)
                if math.isfinite(total):
                    for max_norm in (0.0, 1.5):
                        self.add(np.array([clip_factor(math.sqrt(total), max_norm, 1024.0)]))
                self.add_canonical(as_bits(np.abs(leaf_blocks(values)).max(axis=1)), FP32)

    def run_remainder(self, numel):
        master = self.data.raw(FP32, numel).astype(np.int64)
        negative = master % 2**16 >= 2**15
        self.add(((master // 2**16 + negative) % 2**16).astype(np.uint16))
        self.add((master % 2**16).astype(np.uint16))

        param = self.data.raw(BF16, numel).astype(np.int64)
        remainder = self.data.raw(BF16, numel).astype(np.int64)
        high = (param - (remainder >= 2**15)) % 2**16
        self.add((high * 2**16 + remainder).astype(np.uint32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--expect", metavar="HEX", help="exit 1 where the digest is another")
    expected = parser.parse_args().expect

    # Infinity, NaN and underflow are meant.
    with np.errstate(all="ignore"):
        digest = Workload().digest()
    print(digest)
    if expected is not None and digest != expected.lower():
        sys.exit("golden_reference: the digest is %s, expected %s" % (digest, expected))


if __name__ == "__main__":
    main()
