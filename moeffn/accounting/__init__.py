"""Counting, costing and planning of mixture-of-experts models, without torch.

`count` gives total and active weights from a config; `stored` the bytes of a checkpoint; `cost` FLOPs; `decode_bytes`
and `training_memory` bytes; `roofline` and `prefill` bounds on tokens/s; `plan_cluster` expert parallelism over a
cluster; `matching` fair comparisons of FFNs. `block` holds the formulas of one FFN block as plain functions.
"""

from . import block
from .block import Block
from .cost import Cost, DecodeBytes, Memory, cost, decode_bytes, training_memory
from .counting import VENDORS, Convention, Count, LayerCount, PartCount, count
from .presets import Preset, find_preset, presets
from .roofline import Bound, Device, devices, measure_this_machine, measured_device, prefill, roofline
from .storage import FORMATS, Format, Stored, stored

__all__ = [
    "FORMATS", "VENDORS", "Block", "Bound", "Convention", "Cost", "Count", "DecodeBytes", "Device", "Format",
    "LayerCount", "Memory", "PartCount", "Preset", "Stored", "block", "cost", "count", "decode_bytes", "devices",
    "find_preset", "measure_this_machine", "measured_device", "prefill", "presets", "roofline", "stored",
    "training_memory",
]
