"""Backend "reference": the oracle by name. `functional` calls `moeffn.reference` itself, under plain autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..types import Plan


class ReferenceBackend:
    name = "reference"

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, experts: Tensor, num_experts: int) -> Plan:
        return reference.plan(experts, num_experts)
