"""Counting, costing and planning of mixture-of-experts models, without torch.

`count` gives total and active weights from a config; `stored` the bytes of a checkpoint; `cost` FLOPs;
`decode_bytes`, `training_memory` and `saved_activations` bytes; `roofline` and `prefill` bounds on tokens/s;
`plan_cluster` expert parallelism over a cluster; `matching` fair comparisons of FFNs. `block` holds the formulas of one
FFN block as plain functions.
"""

from . import block, matching
from .block import Block
from .cluster import ClusterPlan, Point, plan_cluster
from .cost import Cost, DecodeBytes, cost, decode_bytes
from .counting import VENDORS, Convention, Count, LayerCount, PartCount, count
from .kernels import KernelCost, kernels
from .memory import Memory, SavedActivations, saved_activations, training_memory
from .presets import Preset, find_preset, presets
from .roofline import Bound, Device, devices, measure_this_machine, measured_device, prefill, roofline
from .storage import FORMATS, Format, Stored, stored
from .traffic import Traffic, distinct_groups, expert_counts, imbalance, traffic
from .workload import Cluster, Workload, clusters

__all__ = [
    "FORMATS", "VENDORS", "Block", "Bound", "Cluster", "ClusterPlan", "Convention", "Cost", "Count", "DecodeBytes",
    "Device", "Format", "KernelCost", "LayerCount", "Memory", "PartCount", "Point", "Preset", "SavedActivations",
    "Stored", "Traffic", "Workload", "block", "clusters", "cost", "count", "decode_bytes", "devices",
    "distinct_groups", "expert_counts", "find_preset", "imbalance", "kernels", "matching", "measure_this_machine",
    "measured_device", "plan_cluster", "prefill", "presets", "roofline", "saved_activations", "stored", "traffic",
    "training_memory",
]
