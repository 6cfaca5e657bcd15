"""Shapes of equal weights or FLOPs, and what confounds a comparison."""

import pytest

from moeffn.accounting import Block, matching


def test_equal_weights_of_a_gated_ffn():
    """2·D·M = 3·D·G: 4D becomes 8D/3, rounded up to 11,008 for D = 4096."""
    dense = matching.Dense(d_model=4096, d_hidden=16384)
    found = matching.match_gated(dense)
    assert found.shape == matching.Dense(d_model=4096, d_hidden=11008, gated=True)
    assert found.total == found.flops == pytest.approx(3 * 11008 / (2 * 16384))
    assert found.warnings == ()
    exact = matching.match_gated(matching.Dense(d_model=64, d_hidden=96), multiple=1)
    assert (exact.shape.d_hidden, exact.total) == (64, 1)
    back = matching.match_gated(exact.shape, multiple=1)
    assert back.shape == matching.Dense(d_model=64, d_hidden=96)


def test_equal_inner_width_is_confounded():
    plain, gated = (matching.Dense(d_model=512, d_hidden=2048, gated=g) for g in (False, True))
    warnings = matching.compare(plain, gated)
    assert warnings[0] == ("equal inner width 2048: the gated form has +50% weights and FLOPs; "
                           "a fair gated width is 1366")
    assert "1.50 times" in warnings[1]
    assert matching.compare(gated, plain)[0].startswith("equal inner width 2048: the form without a gate has -33%")
    assert matching.compare(plain, plain) == ()


@pytest.mark.parametrize("equal", ["total", "active", "flops"])
@pytest.mark.parametrize("shared", [0, 512])
def test_mixtures_equal_to_a_dense_ffn(equal, shared):
    dense = matching.Dense(d_model=1024, d_hidden=2816, gated=True)
    found = matching.match_moe(dense, num_experts=16, top_k=4, equal=equal, d_shared=shared, multiple=1)
    ratio = getattr(found, equal)
    step = 3 * 1024 * (16 if equal == "total" else 4) / matching.sizes(dense).total
    assert abs(ratio - 1) <= step / 2
    assert isinstance(found.shape, Block)
    if equal == "total":
        assert found.active < 0.6
        assert any("active weights differ" in warning for warning in found.warnings)
    else:
        assert found.active == pytest.approx(found.flops, rel=1e-9)
        assert found.total > 2
    rounded = matching.match_moe(dense, num_experts=16, top_k=4, equal=equal, d_shared=shared, multiple=64)
    assert rounded.shape.d_expert % 64 == 0
    assert abs(rounded.shape.d_expert - rounded.exact_width) <= 32


def test_matches_that_cannot_be():
    dense = matching.Dense(d_model=64, d_hidden=64)
    with pytest.raises(ValueError, match="d_shared: router and shared expert have"):
        matching.match_moe(dense, num_experts=8, top_k=2, d_shared=640)
    with pytest.raises(ValueError, match="equal: expected one of total, active, flops"):
        matching.match_moe(dense, num_experts=8, top_k=2, equal="bytes")
    with pytest.raises(ValueError, match="rounding: expected up"):
        matching.round_width(3, 2, "away")
    with pytest.raises(ValueError, match="multiple: expected at least 1"):
        matching.round_width(3, 0)
    with pytest.raises(ValueError, match=r"Dense\.d_hidden"):
        matching.Dense(d_model=64, d_hidden=0)
    assert matching.Dense(d_model=64, d_hidden=256).expansion == 4
    assert [matching.round_width(65, 64, r) for r in ("up", "nearest", "down")] == [128, 64, 64]
