"""Cases of what travels where: dispatchers, placements, replicas, budgets, idle ranks, overlap."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from distributed_compare import D, Ranks, close, config, same_gradients
from distributed_problems import DISPATCHERS, on_rank, one_process, random_problem
from distributed_ranks import only_on

from moeffn import Routing
from moeffn.distributed import (
    AllToAll,
    GroupTransport,
    MismatchError,
    ParallelConfig,
    Placement,
    balance_replicas,
    parallelize,
    reduce_gradients,
)


class DispatchCases(Ranks):
    """Tokens reach their experts wherever those live."""

    def case_dispatchers_equal_one_process(self) -> None:
        """Random problems of every kind: T=0, all to rank 0, uneven E, ids -1 and twice, replicas, lost ranks."""
        transport = GroupTransport(deadline=30)
        for seed in range(500, 512):
            p = random_problem(seed, W=self.W, device=self.device)
            want = one_process(p)
            tokens = [len(x) for x in p.x]
            for name, make in DISPATCHERS.items():
                ran = on_rank(p, make(transport, p.placement), transport)
                for key in ("y", "x", "weights"):
                    close(ran.tensors[key], want[key].split(tokens)[self.rank], f"{seed} {name} {key}")
                held = list(p.placement.experts_of_rank[self.rank])
                alone = [e for e in held if len(p.placement.places_of_expert[e]) == 1]
                for key in ("w_in", "w_out"):
                    slots = [held.index(e) for e in alone]
                    close(ran.tensors[key][slots], want[key][alone], f"{seed} {name} {key}")

    def case_uneven_and_empty_splits_of_any_dtype(self) -> None:
        """Rank 0 sends five rows to the last rank, nobody sends anything else; splits of another sum are refused."""
        transport, last = GroupTransport(deadline=20), self.W - 1
        send = [5 if (self.rank, r) == (0, last) else 0 for r in range(self.W)]
        recv = [5 if (self.rank, r) == (last, 0) else 0 for r in range(self.W)]
        for dtype in (torch.int64, torch.bfloat16, torch.float32):
            rows = self.put(torch.arange(40).view(5, 8).to(dtype))
            came = transport.start(rows[: sum(send)].view(torch.uint8), send, recv, "probe").wait()
            assert torch.equal(came.view(dtype), rows[: sum(recv)]), dtype
        before = transport.exchanges
        try:
            transport.start(self.put(torch.zeros(3, 8, dtype=torch.uint8)), [2] * self.W, recv, "probe")
        except ValueError as error:
            assert f"probe: send splits: expected {self.W} splits that sum to 3 rows" in str(error), error
        else:
            raise AssertionError("splits that do not add up were sent")
        assert transport.exchanges == before
        x = self.batches([4])[0].bfloat16()
        ids, ones = self.put(torch.arange(self.W, dtype=torch.int32).repeat(4, 1)), self.put(torch.ones(4, self.W))
        d = AllToAll(transport, Placement.balanced(self.W, self.W))
        batch = d.dispatch(x, Routing(ids, ones))
        assert torch.equal(d.combine(batch.x, batch.handle), (x.float() * self.W).bfloat16())

    def case_ranks_that_disagree_are_named(self) -> None:
        """All ranks see the same announcements, so all stop at the same place, and the group lives."""
        transport, placement = GroupTransport(deadline=20), Placement.balanced(self.W, self.W)
        x, ids = self.batches([2])[0], self.put(torch.zeros(2, 1, dtype=torch.int32))
        routing = Routing(ids, self.put(torch.ones(2, 1)))
        for _ in range(2):
            d = AllToAll(transport, placement)
            d.chunks = 3 if self.rank == 1 else 2
            try:
                d.dispatch(x, routing)
            except MismatchError as error:
                assert error.ranks == (1,) and "rank 1 has 3, the others 2" in str(error), error
            else:
                raise AssertionError("chunks that differ were taken")

    def case_all_tokens_to_rank_0_and_an_idle_rank(self) -> None:
        """Rank W-1 has no tokens, only rank 0's first expert gets any: nobody skips a call, zeros are exact."""
        c = config(E=2 * self.W, K=1)
        whole = self.layer(c)
        with torch.no_grad():
            whole.router.weight.zero_()  # all logits equal: ties go to expert 0
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum", deadline=20))
        tokens = [3] * (self.W - 1) + [0]
        x = self.batches(tokens)[self.rank].requires_grad_()
        y = par(x)
        y.sum().backward()
        reduce_gradients(par)
        first = 2 * self.rank
        for name, p in par.experts.named_parameters():
            for slot, g in enumerate(p.grad.to_local()):
                assert bool((g == 0).all()) == (first + slot != 0), (name, slot)
        calls = [self.put(torch.zeros(1, dtype=torch.int64)) for _ in range(self.W)]
        dist.all_gather(calls, self.put(torch.tensor([par.experts.dispatcher.transport.exchanges])))
        assert len({int(n) for n in calls}) == 1, calls

    def case_layer_mean_with_each_dispatcher(self) -> None:
        for name in ("all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"):
            self._compare(config(), self.mesh, ParallelConfig(loss="mean", dispatcher=name), self._tokens())

    def case_tokens_in_chunks(self) -> None:
        """More chunks than some ranks have tokens: the number of calls is agreed, not derived."""
        for name in ("all_to_all, dedup rank", "all_gather"):
            self._compare(config(d_shared=4), self.mesh, ParallelConfig(loss="sum", dispatcher=name, chunks=3),
                          self._tokens())

    def case_fewer_experts_than_ranks_and_more_choices_than_local_experts(self) -> None:
        self._compare(config(E=self.W - 1 or 1, K=1), self.mesh, ParallelConfig(loss="sum"), self._tokens())
        self._compare(config(E=self.W + 1, K=self.W + 1), self.mesh, ParallelConfig(loss="sum"), self._tokens())

    def case_fixed_budget(self) -> None:
        """Enough rows: one process's answer; too few: counted, and dropped slots contribute exactly nothing."""
        wide = ParallelConfig(loss="sum", dispatcher="all_to_all, dedup rank", budget=7)
        self._compare(config(d_shared=4), self.mesh, wide, self._tokens())
        par = parallelize(self.layer(config(E=self.W, K=self.W)), self.mesh,
                          ParallelConfig(loss="sum", dispatcher="all_to_all, dedup rank", budget=2))
        x = self.batches([5])[0]
        y = par(x)  # every token goes to every rank; the last three find no row
        assert int(par.experts.dispatcher.dropped) == 3 * self.W
        assert bool((y[2:] == 0).all()) and bool((y[:2] != 0).any())

    def case_experts_that_do_not_divide_by_ranks(self) -> None:
        """Where DTensor cuts them, no rank above ceil(E / W); and computed elsewhere, with sizes that differ by one."""
        for E in (5, 30, 2 * self.W + 1):
            balanced = Placement.balanced(E, self.W)
            for placement in (None, balanced):
                c = ParallelConfig(loss="sum", placement=placement)
                par = parallelize(self.layer(config(E=E)), self.mesh, c)
                sizes = [len(h) for h in par.experts.dispatcher.placement.experts_of_rank]
                assert par.experts.weights.num_experts == sizes[self.rank]
                assert sum(sizes) == E and max(sizes) == -(-E // self.W), sizes
                if placement is not None:
                    assert max(sizes) - min(sizes) <= 1
                    assert (E, self.W) != (30, 8) or sizes == [4, 4, 4, 4, 4, 4, 3, 3]
                self._compare(config(E=E), self.mesh, c, self._tokens())

    def case_ranks_that_use_different_experts(self) -> None:
        """Rank r's tokens go to expert r alone: every parameter is one packed tensor, so nothing hangs."""
        E = self.W
        whole = self.layer(config(E=E, K=1))
        with torch.no_grad():
            whole.router.weight.copy_(self.put(torch.eye(E, D, dtype=torch.float64) * 50))
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum"))
        xs = [self.put(torch.eye(E, D, dtype=torch.float64)[[(r + 1) % E] * 3]) for r in range(self.W)]
        whole(torch.cat(xs)).square().sum().backward()
        par(xs[self.rank]).square().sum().backward()
        reduce_gradients(par)
        same_gradients(par, whole, self.mesh, E)

    def case_replicas_of_hot_experts(self) -> None:
        """Weights travel to the replicas, their gradients home; fewer rows wait on the hottest rank."""
        E = 2 * self.W
        load = [100.0, *[1.0] * (E - 1)]
        placement = balance_replicas(load, self.W, 3)
        assert len(placement.places_of_expert[0]) == self.W
        c = ParallelConfig(loss="sum", placement=placement)
        self._compare(config(E=E, K=2, bias=True), self.mesh, c, self._tokens())

    def case_rank_that_is_masked_out(self) -> None:
        """The last rank computes no expert: replicas serve its tokens and everybody's, as in one process."""
        E, W = 2 * self.W, self.W
        twice = Placement(E, tuple(tuple((2 * r + i) % E for i in range(4)) for r in range(W)))
        c = ParallelConfig(loss="sum", placement=twice.without([W - 1]))
        par = parallelize(self.layer(config(E=E)), self.mesh, c)
        assert par.experts.weights.num_experts == (0 if self.rank == W - 1 else 4)
        self._compare(config(E=E, K=3, d_shared=4), self.mesh, c, self._tokens())

    @only_on(4, 8)
    def case_two_levels(self) -> None:
        """Nodes of two ranks."""
        c = ParallelConfig(loss="sum", dispatcher="two_level", ranks_per_node=2)
        self._compare(config(E=7, K=3, d_shared=4), self.mesh, c, self._tokens())

    def case_work_overlaps_with_flights_both_ways(self) -> None:
        """Forward: the shared expert and local slots run between departure and arrival; backward: their gradients do.

        And the shared expert's overlap changes no bit of output and gradients.
        """
        from moeffn.distributed import functional

        c = ParallelConfig(dispatcher="all_to_all, dedup rank", local_first=True)
        par = parallelize(self.layer(config(E=2 * self.W, d_shared=4)), self.mesh, c)
        transport, order = par.experts.dispatcher.transport, []
        start, experts = transport.start, functional.moe_ffn

        def traced(rows, send, recv, what):
            pending = start(rows, send, recv, what)
            wait = pending.wait
            pending.wait = lambda: (order.append("arrived " + what), wait())[1]
            order.append("departed " + what)
            return pending

        def seen(x, routing, *rest, **more):
            order.append("experts")
            y = experts(x, routing, *rest, **more)
            y.register_hook(lambda _: order.append("experts backward"))
            return y

        transport.start, functional.moe_ffn = traced, seen
        par.shared.register_forward_hook(
            lambda _, __, y: (order.append("shared"), y.register_hook(lambda _: order.append("shared backward")))[0])
        try:
            x = self.batches([3])[0].requires_grad_()
            y = par(x)
            forward = order[order.index("departed dispatch"):]
            order.clear()
            y.sum().backward()
        finally:
            functional.moe_ffn = experts
        assert forward == ["departed dispatch", "shared", "experts", "arrived dispatch", "experts", "departed combine",
                           "arrived combine"], forward
        assert order == ["departed combine backward", "arrived combine backward", "experts backward",
                         "departed dispatch backward", "experts backward", "shared backward",
                         "arrived dispatch backward"], order

        par = parallelize(self.layer(config(d_shared=4)), self.mesh, ParallelConfig(loss="sum"))
        x = self.batches([3])[0].requires_grad_()
        y = par(x)
        y.square().sum().backward()
        gx, x.grad = x.grad, None
        plain = par.experts(x, par.router(x)) + par.shared(x)
        plain.square().sum().backward()
        assert torch.equal(y, plain)
        assert torch.allclose(gx, x.grad, rtol=1e-14, atol=1e-14)  # autograd adds the router's part in its own order
