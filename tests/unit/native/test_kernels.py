"""Products and readings of every type against the NumPy decoders, and what they promise of bits."""

from __future__ import annotations

import functools
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numpy.typing import NDArray

from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.kernels.features import (
    PLAIN,
    Features,
    choices,
    host,
    stated_here,
)
from superfluid_adapter_native.kernels.vectors import Emit
from superfluid_adapter_native.kernels.weights import Weight
from superfluid_adapter_native.quants.decode import decode
from superfluid_adapter_native.quants.types import BY_NAME, TYPES, TensorType
from support.gguf_writer import random_raw

Floats = NDArray[np.float32]

COLUMNS = 512
ROWS = 37


@pytest.fixture(scope="session")
def folder(kernels: Path) -> Path:
    return kernels


def made(folder: Path, *, exact: bool, threads: int = 2, features: Features = PLAIN) -> Kernels:
    return Kernels(threads=threads, exact=exact, cache=folder, writable=True, features=features)


@functools.cache
def matrix(kind: TensorType, rows: int = ROWS, columns: int = COLUMNS) -> NDArray[np.uint8]:
    rng = np.random.default_rng(kind.ggml)
    return np.frombuffer(random_raw(kind.name, rows * columns, rng), np.uint8)


def plain(kind: TensorType, raw: NDArray[np.uint8], rows: int, columns: int) -> Floats:
    return decode(kind, raw, rows * columns).reshape(rows, columns)


def bound(
    engine: Kernels, kind: TensorType, rows: int = ROWS, columns: int = COLUMNS
) -> tuple[Weight, Floats]:
    raw = matrix(kind, rows, columns)
    weight = engine.weight(kind, raw, (rows, columns), resident=True)
    return weight, plain(kind, raw, rows, columns)


def inputs(n: int, columns: int = COLUMNS) -> Floats:
    return np.random.default_rng(n).standard_normal((n, columns)).astype(np.float32)


def worst(found: Floats, x: Floats, weights: Floats) -> float:
    """The largest error against float64, as a part of the largest value."""
    wanted = x.astype(np.float64) @ weights.T.astype(np.float64)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


features_to_try = pytest.mark.parametrize(
    "features", [PLAIN, host()], ids=["plain", "host"] if host() != PLAIN else ["plain", "same"]
)
every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


@every_type
@features_to_try
@pytest.mark.parametrize(("exact", "limit"), [(True, 1e-5), (False, 0.012)])
def test_products(
    folder: Path, kind: TensorType, features: Features, exact: bool, limit: float
) -> None:
    engine = made(folder, exact=exact, features=features)
    weight, weights = bound(engine, kind)
    for n in (1, 2, 7, 64):
        x = inputs(n)
        assert worst(engine.linear(x, weight), x, weights) < limit


@every_type
@features_to_try
def test_rows_read(folder: Path, kind: TensorType, features: Features) -> None:
    engine = made(folder, exact=False, features=features)
    weight, weights = bound(engine, kind)
    ids = [3, ROWS - 1, 0, 3]
    np.testing.assert_allclose(engine.gather(weight, ids), weights[ids], rtol=1e-6, atol=1e-7)


def test_the_integer_routes_of_all_that_runs_here_agree(folder: Path) -> None:
    first, *others = (made(folder, exact=False, features=f) for f in choices(stated_here()))
    for name in ("Q8_0", "Q6_K", "Q4_K", "IQ4_NL"):
        kind = BY_NAME[name]
        wanted = first.linear(inputs(5), bound(first, kind)[0])
        for other in others:
            found = other.linear(inputs(5), bound(other, kind)[0])
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("columns", [1, 7, 31, 33, 100])
def test_floats_of_any_width(folder: Path, name: str, columns: int) -> None:
    engine = made(folder, exact=False)
    weight, weights = bound(engine, BY_NAME[name], 5, columns)
    x = inputs(3, columns)
    assert worst(engine.linear(x, weight), x, weights) < 1e-5
    np.testing.assert_array_equal(engine.gather(weight, [4]), weights[[4]])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "int8"])
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["F32", "Q8_0", "Q4_K", "Q6_K"]),
    n=st.integers(1, 19),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_same_bits_in_any_company(
    folder: Path, exact: bool, name: str, n: int, threads: int, seed: int
) -> None:
    kind = BY_NAME[name]
    many = made(folder, exact=exact, threads=threads, features=host())
    one = made(folder, exact=exact, threads=1, features=host())
    x = np.random.default_rng(seed).standard_normal((n, 1024)).astype(np.float32)
    together = many.linear(x, bound(many, kind, 300, 1024)[0])
    alone = one.linear(x[seed % n : seed % n + 1], bound(one, kind, 300, 1024)[0])
    np.testing.assert_array_equal(together[seed % n : seed % n + 1], alone)


@features_to_try
@pytest.mark.parametrize(
    ("name", "columns"),
    [("F32", 2085), ("F16", 2085), ("BF16", 3072), ("Q8_0", 2080), ("Q4_K", 2304), ("MXFP4", 1056)],
)
def test_rows_in_parts_and_tiles_have_the_same_bits(
    folder: Path, features: Features, name: str, columns: int
) -> None:
    engine = made(folder, exact=True, features=features)
    weight, weights = bound(engine, BY_NAME[name], 301, columns)
    x = inputs(22, columns)
    alone = np.concatenate([engine.linear(x[i : i + 1], weight) for i in range(22)])
    assert worst(alone, x, weights) < 1e-5
    for n in (4, 5, 22):
        np.testing.assert_array_equal(engine.linear(x[:n], weight), alone[:n])


def test_activations_are_shared_and_results_placed(folder: Path) -> None:
    engine = made(folder, exact=False)
    x = inputs(3)
    shared = engine.quantise(x)
    for kind in (BY_NAME["Q4_K"], BY_NAME["Q8_0"], BY_NAME["F32"]):
        weight, _ = bound(engine, kind)
        out = np.full((3, ROWS), np.nan, np.float32)
        assert engine.linear(shared, weight, out) is out
        np.testing.assert_array_equal(out, engine.linear(x, weight))


def test_rows_of_zeros_and_of_large_values(folder: Path) -> None:
    engine = made(folder, exact=False)
    weight, weights = bound(engine, BY_NAME["Q4_K"])
    x = inputs(3)
    x[0], x[1, :32] = 0, 0
    x[2] *= 1e20
    found = engine.linear(x, weight)
    assert not found[0].any()
    assert worst(found[1:2], x[1:2], weights) < 0.012
    assert worst(found[2:], x[2:], weights) < 0.012


def test_wrong_sizes_are_refused(folder: Path) -> None:
    engine = made(folder, exact=False)
    kind = BY_NAME["Q8_0"]
    weight, _ = bound(engine, kind)
    with pytest.raises(ValueError, match="wanted"):
        engine.weight(kind, matrix(kind)[:-1], (ROWS, COLUMNS), resident=True)
    with pytest.raises(ValueError, match="256 columns, 512 wanted"):
        engine.linear(inputs(1, 256), weight)
    with pytest.raises(ValueError, match="contiguous float32"):
        engine.linear(inputs(1), weight, np.empty((2, ROWS), np.float32))
    for row in (-1, ROWS):
        with pytest.raises(IndexError):
            engine.gather(weight, [0, row])


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ({"avx512vnni", "avx512vl", "avx2", "avxvnni"}, Features("evex", "pshufb")),
        ({"avx512vnni", "avx2"}, Features("plain", "pshufb")),
        ({"avxvnni", "avx2"}, Features("vex", "pshufb")),
        ({"neon", "dotprod"}, Features("neon", "tbl")),
        ({"sse2"}, PLAIN),
    ],
)
def test_features_chosen(stated: set[str], wanted: Features) -> None:
    assert choices(frozenset(stated))[0] == wanted


def test_arm_instructions() -> None:
    """What cannot run here compiles: the dot product and the table for Arm."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2), "f")
    e = Emit(ir.IRBuilder(function.append_basic_block()), Features("neon", "tbl"))
    source, target = (e.pointer(argument) for argument in function.args)
    codes = e.lookup(range(16), e.ands(e.bytes(source, 0, 32), 15))
    e.store(e.dot(codes, e.bytes(source, 32, 32)), target, 0)
    e.b.ret_void()
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(cpu="apple-m1")
    assert {"sdot", "tbl"} <= set(machine.emit_assembly(llvm.parse_assembly(str(module))).split())
