"""Cases of what a user starts: the benchmark, the example, and bad arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from distributed_compare import D, Ranks, config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moeffn.distributed import ParallelConfig, Placement, make_mesh, parallelize, reduce_gradients


class CommandCases(Ranks):
    """The cost model's choice, bench, the example, refusals."""

    def case_choice_is_the_cost_model_s(self) -> None:
        """The cheapest of the table is built, and rank 0 logs the table."""
        from moeffn.distributed import cost, parallel

        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        parallel.log.addHandler(handler)
        parallel.log.setLevel(logging.INFO)
        par = parallelize(self.layer(config(E=4 * self.W)), self.mesh, ParallelConfig(tokens=64))
        table = cost.estimate(Placement.chunked(4 * self.W, self.W), tokens=64, d_model=D, top_k=2, dtype=torch.float64)
        built = par.experts.dispatcher
        label = "all_gather" if built.dedup == "all" else f"all_to_all, dedup {built.dedup}"
        assert label == table[0].name
        parallel.log.removeHandler(handler)
        assert logged == ([f"dispatcher: {label}\n{cost.describe(table)}"] if self.rank == 0 else [])

    def case_bench_counts_the_bytes_it_moves(self) -> None:
        from moeffn.distributed.bench import Block, largest_error

        for name in ("all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"):
            assert largest_error(name, device=self.device) <= 1e-12
            block = Block(config(E=4 * self.W), 300, dispatcher=name, dtype=torch.float32, device=self.device)
            m = block.measure(calls=1)
            assert m.bytes_sent == m.bytes_forward > 0
            assert abs(m.bytes_forward / m.bytes_expected - 1) < 0.15  # one routing of 300 tokens against the mean
            assert abs(m.destinations / m.destinations_expected - 1) < 0.05
            assert min(m.step, m.forward, m.dispatch, m.experts, m.combine, m.raw, m.exchange_only) > 0

    def case_training_example(self) -> None:
        """The worked example learns, and its checkpoint goes on where it stopped."""
        from moeffn.distributed.train_example import train

        folder = self.folder / "example"
        losses = train(10, folder)
        assert losses[-1] < 0.6 * losses[0], losses
        again = train(1, folder)
        assert abs(again[0] - train(1)[0]) > 0.1 * losses[0], "the checkpoint was not loaded"

    def case_bad_arguments_are_refused(self) -> None:
        def refused(message: str, call: Callable[[], object]) -> None:
            try:
                call()
            except ValueError as error:
                assert message in str(error), error
            else:
                raise AssertionError(f"accepted: {message}")

        refused(f"ep: expected a divisor of the {self.W} ranks, got {self.W + 1}", lambda: make_mesh(self.W + 1))
        plain = init_device_mesh(self.device.type, (self.W,), mesh_dim_names=("tp",))
        refused("a dimension named 'ep'", lambda: parallelize(self.layer(config()), plain))
        refused("a MoEFFN", lambda: parallelize(self.put(nn.Linear(2, 2)), self.mesh))
        refused("not distributed yet", lambda: parallelize(parallelize(self.layer(config()), self.mesh), self.mesh))
        refused("ParallelConfig.placement", lambda: parallelize(
            self.layer(config()), self.mesh, ParallelConfig(placement=Placement.balanced(5, self.W + 1))))
        refused("one that `parallelize` distributed", lambda: reduce_gradients(self.put(nn.Linear(2, 2))))
