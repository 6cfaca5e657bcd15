"""Counting, costing and planning of mixture-of-experts models, without torch.

`count` gives total and active weights from a config; `cost` FLOPs, bytes and memory; `roofline` bounds on tokens/s;
`plan_cluster` expert parallelism over a cluster; `matching` fair comparisons of FFNs. `block` holds the formulas of
one FFN block as plain functions.
"""

from .counting import VENDORS, Convention, Count, LayerCount, PartCount, count
from .presets import Preset, find_preset, presets

__all__ = ["VENDORS", "Convention", "Count", "LayerCount", "PartCount", "Preset", "count", "find_preset", "presets"]
