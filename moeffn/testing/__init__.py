"""Tests of routers, plans and layers for their owners: `check_router`, `check_layer`, `check_plan`, on any nn.Module.

Each check states one property. All are run; those that fail are reported together in one AssertionError that names the
property, the first offending token, what was expected and what came. The report returned otherwise lists what passed
and what was skipped, with the reason. `make_routing` and `error_budget` serve one's own tests.
"""

from .layers import check_layer
from .plans import check_plan
from .report import CheckReport
from .routers import check_router
from .workloads import Budget, Errors, error_budget, errors, make_routing

__all__ = ["Budget", "CheckReport", "Errors", "check_layer", "check_plan", "check_router", "error_budget", "errors",
           "make_routing"]
