"""Cases of what a user starts: the benchmark, the example, and bad arguments."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from distributed_compare import D, Ranks, config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moeffn.distributed import ParallelConfig, Placement, make_mesh, parallelize, reduce_gradients
from moeffn.distributed.cost import expected_destinations


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
        """`moeffn bench CONFIG --ep` on this group: every dispatcher is one process's; bytes by count, handle, D(G)."""
        from moeffn.distributed.bench import largest_error

        names = ["all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"]
        assert all(largest_error(name, device=self.device) <= 1e-12 for name in names)
        E = 4 * self.W
        said = self._moeffn("bench", json.dumps({"d_model": 64, "d_expert": 32, "num_experts": E, "top_k": 2}), "--ep",
                            "--tokens", "300", "--dtype", "float32", "--device", self.device.type, "--json")
        assert bool(said) == (self.rank == 0)
        rows = json.loads(said)["rows"] if said else []
        assert [r["dispatcher"] for r in rows] == names[: len(rows)]
        for r in rows:
            assert r["bytes_sent"] == r["bytes_forward"] > 0
            assert abs(r["bytes_forward"] / r["bytes_expected"] - 1) < 0.15  # one routing of 300 tokens, not the mean
            assert abs(r["destinations"] / r["destinations_expected"] - 1) < 0.05
            assert min(r[k] for k in ("step", "forward", "dispatch", "experts", "combine", "raw", "exchange_only")) > 0

    def case_bench_prints_tokens_bytes_and_times(self) -> None:
        """The table of two token counts: a line a dispatcher and count, and where a token goes on average."""
        block = {"d_model": 64, "d_expert": 32, "num_experts": 4 * self.W, "top_k": 2}
        said = self._moeffn("bench", json.dumps(block), "--ep", "--tokens", "40,8", "--dtype", "float32", "--device",
                            self.device.type)
        if self.rank == 0:
            head, columns, *rows = said.splitlines()
            assert head.endswith(f"{4 * self.W} experts on {self.W} ranks, top 2, d_model 64, float32, "
                                 f"{dist.get_backend()}"), head
            for word in ("tok/s/rank", "tok/s", "dispatch", "experts", "combine", "overhead", "MB sent", "by D(G)"):
                assert word in columns
            for row in rows[:6]:
                sent, by_handle = row.split()[-3:-1]
                assert sent == by_handle and float(sent) > 0, row  # counted, and by the routing's own formula
            mean = expected_destinations(4 * self.W, 2, [4] * self.W)
            assert f"ranks in this routing, {mean:.3f} by D(G)" in said
            assert "cost model for 8 tokens" in said

    def _moeffn(self, command: str, block: str, *arguments: str) -> str:
        """What `moeffn COMMAND CONFIG …` prints on this rank, on this group instead of torchrun's."""
        from moeffn.cli import main
        from moeffn.distributed import commands

        path = self.folder / f"block{self.rank}.json"
        path.write_text(block)
        given, said = commands.group, io.StringIO()
        commands.group = lambda _: contextlib.nullcontext(self.device)
        try:
            with contextlib.redirect_stdout(said):
                main([command, str(path), *arguments])
        except SystemExit as stop:
            assert not stop.code, said.getvalue()
        finally:
            commands.group = given
        return said.getvalue()

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
        lost = Placement.balanced(5, self.W).without([0])
        refused(f"missing {lost.missing}", lambda: parallelize(self.layer(config()), self.mesh,
                                                               ParallelConfig(placement=lost)))
        refused("one that `parallelize` distributed", lambda: reduce_gradients(self.put(nn.Linear(2, 2))))
