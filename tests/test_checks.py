"""Messages for bad arguments name the argument, what was expected and what came; good values pass in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moeffn import checks
from moeffn.config import Layout

X = torch.zeros(2, 3)

GOOD: list[Callable[[], object]] = [
    lambda: checks.one_of("a", 1, (1, 2)), lambda: checks.positive_int("a", 1), lambda: checks.non_negative_int("a", 0),
    lambda: checks.positive("a", 1e-30), lambda: checks.non_negative("a", 0), lambda: checks.finite("a", -2.5),
    lambda: checks.instance("a", 1, (str, int)), lambda: checks.tensor("a", X, 2), lambda: checks.floating("a", X),
    lambda: checks.shape("a", X, (2, 3), "(A, B)"), lambda: checks.index_dtype("a", X.int()),
    lambda: checks.boolean("a", X.bool()), lambda: checks.float32("a", X), lambda: checks.integer("a", X.long()),
    lambda: checks.ids_in_range("a", X.int(), 1), lambda: checks.same_device("a", X, X.device, "b"),
]
BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: checks.one_of("a", 3, (1, 2)), ValueError, "a: expected one of 1, 2, got 3"),
    (lambda: checks.positive_int("a", 0), ValueError, "a: expected at least 1, got 0"),
    (lambda: checks.positive_int("a", None), TypeError, "a: expected an int, got NoneType None"),
    (lambda: checks.non_negative_int("a", -1), ValueError, "a: expected at least 0, got -1"),
    (lambda: checks.positive("a", float("nan")), ValueError, "a: expected a number above 0, got nan"),
    (lambda: checks.positive("a", True), TypeError, "a: expected a number, got bool True"),
    (lambda: checks.non_negative("a", -0.5), ValueError, "a: expected a number of at least 0, got -0.5"),
    (lambda: checks.non_negative("a", float("nan")), ValueError, "a: expected a number of at least 0, got nan"),
    (lambda: checks.finite("a", float("inf")), ValueError, "a: expected a finite number, got inf"),
    (lambda: checks.finite("a", "1"), TypeError, "a: expected a number, got str '1'"),
    (lambda: checks.instance("a", 1.0, (str, int)), TypeError, "a: expected str or int, got float 1.0"),
    (lambda: checks.layout("a", "other", Layout), ValueError, "a: expected 'concat' or 'interleaved', got 'other'"),
    (lambda: checks.tensor("a", [1]), TypeError, "a: expected a torch.Tensor, got list [1]"),
    (lambda: checks.tensor("a", X, 3), ValueError, "a: expected 3 dimensions, got shape (2, 3)"),
    (lambda: checks.shape("a", X, (3, 2), "(B, A)"), ValueError, "a: expected shape (3, 2) = (B, A), got shape (2, 3)"),
    (lambda: checks.floating("a", X.int()), TypeError, "a: expected a floating-point dtype, got dtype torch.int32"),
    (lambda: checks.tensor("a", X.to_sparse()), TypeError,
     "a: expected a dense tensor, got layout torch.sparse_coo"),
    (lambda: checks.floating("a", X.to(torch.float8_e4m3fn)), TypeError,
     "a: expected float16, bfloat16, float32 or float64, got dtype torch.float8_e4m3fn"),
    (lambda: checks.index_dtype("a", X), TypeError, "a: expected int32 or int64, got dtype torch.float32"),
    (lambda: checks.boolean("a", X), TypeError, "a: expected dtype bool, got dtype torch.float32"),
    (lambda: checks.float32("a", X.half()), TypeError, "a: expected dtype float32, got dtype torch.float16"),
    (lambda: checks.integer("a", X), TypeError, "a: expected an integer dtype, got dtype torch.float32"),
    (lambda: checks.ids_in_range("a", X.int() - 1, 4), ValueError, "a: expected ids of 0 .. 3, got -1 .. -1"),
    (lambda: checks.same_device("a", X, torch.device("meta"), "b"), ValueError,
     "a: expected device meta (that of b), got device cpu"),
]


@pytest.mark.parametrize("index", range(len(GOOD)))
def test_good_values_pass(index: int) -> None:
    assert GOOD[index]() is None


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_values_are_named(index: int) -> None:
    call, error, message = BAD[index]
    with pytest.raises(error) as info:
        call()
    assert str(info.value) == message


def test_long_values_are_cut_short() -> None:
    with pytest.raises(TypeError) as info:
        checks.tensor("a", list(range(1000)))
    assert len(str(info.value)) < 150


def test_nested_tensors_are_not_dense() -> None:
    for kind in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match=r"^a: expected a dense tensor, got "):
            checks.tensor("a", torch.nested.nested_tensor([X], layout=kind))
