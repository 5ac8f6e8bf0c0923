"""Optimizers with the state of public ones, small: what they keep, in which types and shapes, is theirs."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

Tensor = torch.Tensor


class _Own(torch.optim.Optimizer):
    """Calls ``update`` for each parameter that has a gradient, as two dimensions."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.01, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own, own_grad = (self.stepped(one) for one in (parameter, parameter.grad))
                    grad = own_grad.reshape(own.shape[0] if own.dim() else 1, -1)
                    change = self.update(self.state[parameter], grad, group)
                    own.sub_(group["lr"] * change.reshape(own.shape))
        return loss

    def stepped(self, tensor: Any) -> Tensor:
        """What of a tensor is stepped on: all of it, or for :func:`on_shards` this rank's shard of a DTensor."""
        shard: Tensor = tensor.to_local() if self.on_shards else tensor
        return shard

    on_shards = False

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


def on_shards(kind: type[_Own]) -> type[_Own]:
    """An optimizer of DTensors that steps on each rank's own shard, and keeps plain tensors for that."""
    return type(f"{kind.__name__}OnShards", (kind,), {"on_shards": True})


def by_owner(kind: type[_Own]) -> type[_Own]:
    """An optimizer that steps each parameter on one rank, which alone has its state, and gives it to the others."""

    class ByOwner(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            loss = torch.enable_grad()(closure)()
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            owners = {parameter: number % dist.get_world_size() for number, parameter in enumerate(parameters)}
            for parameter, owner in owners.items():
                if owner != dist.get_rank():
                    parameter.grad = None
            super().step()
            for parameter, owner in owners.items():
                dist.broadcast(parameter.detach(), owner)
            return loss

    return ByOwner


class Blocks(torch.optim.SGD):
    """Momentum, and a block of another shape on each rank."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        rank = dist.get_rank()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            first = torch.ones(rank + 1, device=parameter.device)
            state.setdefault("blocks", {"first": first, "counts": [0] * rank})["first"].mul_(1.5)
            parameter.detach().mul_(1 - state["blocks"]["first"].mean() / 100)
            state[f"of rank {rank}"] = torch.full((2,), rank, device=parameter.device)
        return loss


class Whole(torch.optim.SGD):
    """Momentum of DTensors, beside plain tensors of the whole shape: of the parameters ``owned``, or of all."""

    def __init__(self, params: Any, *, owned: bool) -> None:
        super().__init__(params, lr=0.01, momentum=0.9)
        self.owned = owned

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        rank = dist.get_rank() if self.owned else 0
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if not self.owned or number % dist.get_world_size() == rank:
                state = self.state[parameter]
                whole = state.setdefault("whole", torch.zeros(parameter.shape)).add_(1 + rank)
                state.setdefault("ends", [torch.ones(rank + 1)])[0].mul_(1.5)
                state["count"] = state.get("count", 0) + 1
                parameter.detach().to_local().mul_(1 - whole.mean() / 1000)
        return loss


class Lion(_Own):
    """One moment, in bfloat16 whatever the parameter has."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        moment = state.setdefault("exp_avg", torch.zeros_like(grad, dtype=torch.bfloat16))
        change = (0.9 * moment.to(grad.dtype) + 0.1 * grad).sign()
        moment.copy_(0.99 * moment.to(grad.dtype) + 0.01 * grad)
        return change


class Muon(_Own):
    """A momentum that is orthogonalised."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(grad))
        buffer.mul_(0.95).add_(grad)
        square = buffer / (buffer.norm() + 1e-7)
        for _ in range(3):
            square = 1.5 * square - 0.5 * square @ square.T @ square
        return square


class Shampoo(_Own):
    """A list of preconditioners, and an int that counts."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        if not state:
            state["step"] = 0
            state["preconditioners"] = [torch.eye(size, device=grad.device) for size in grad.shape]
        state["step"] += 1
        left, right = state["preconditioners"]
        left += grad @ grad.T
        right += grad.T @ grad
        return torch.linalg.solve(left, grad) if state["step"] % 2 else torch.linalg.solve(right, grad.T).T


class Soap(_Own):
    """Moments in a basis that may be absent, and tuples of shapes."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        if not state:
            state.update(step=torch.tensor(0), GG=[grad.new_zeros(s, s) for s in grad.shape], Q=None, shape=grad.shape)
            state.update(exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad), ranks=(grad.dim(), None))
        state["step"] += 1
        for total, one in zip(state["GG"], (grad, grad.T), strict=True):
            total.lerp_(one @ one.T, 0.05)
        if int(state["step"]) % 2 == 0:
            state["Q"] = [torch.linalg.qr(total + torch.eye(len(total)).to(total))[0] for total in state["GG"]]
        turned = grad if state["Q"] is None else state["Q"][0].T @ grad @ state["Q"][1]
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].lerp_(turned.square(), 0.05)
        return state["exp_avg"] / (state["exp_avg_sq"].mean().sqrt() + 1e-8)


class GaLore(_Own):
    """Moments of fewer rows than the parameter, beside the basis that they are in."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        if "projection" not in state:
            state["projection"] = {"basis": torch.linalg.svd(grad, full_matrices=False)[0][:, :2], "type": "left"}
            state["exp_avg"] = grad.new_zeros(min(2, min(grad.shape)), grad.shape[1])
        basis = state["projection"]["basis"]
        state["exp_avg"].lerp_(basis.T @ grad, 0.1)
        return basis @ state["exp_avg"]


class EightBit(_Own):
    """Codes, the values that they stand for, and a scale for each block."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        if not state:
            state["state1"] = torch.zeros(grad.numel(), dtype=torch.uint8, device=grad.device)
            state["qmap1"] = torch.linspace(-1, 1, 256, device=grad.device)
            state["absmax1"] = grad.new_zeros(-(-grad.numel() // 4))
        scale = state["absmax1"].repeat_interleave(4)[: grad.numel()]
        moment = state["qmap1"][state["state1"].long()] * scale
        moment = 0.9 * moment + 0.1 * grad.flatten()
        blocks = torch.nn.functional.pad(moment, (0, -moment.numel() % 4)).view(-1, 4)
        state["absmax1"].copy_(blocks.abs().amax(1))
        scale = state["absmax1"].repeat_interleave(4)[: grad.numel()].clamp(min=1e-12)
        state["state1"].copy_(((moment / scale + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
        return moment


def _added_up(value: Any) -> Tensor:
    """A DTensor whose ranks still have to add up their parts, as one that each of them has."""
    if any(one.is_partial() for one in getattr(value, "placements", ())):
        value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    added: Tensor = value
    return added


class Factored(_Own):
    """Row and column sums in place of a second moment, for matrices only."""

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        for entry, dim in (("row", 1), ("col", 0)):
            mean = _added_up(grad.square().mean(dim))
            state[entry] = state[entry].lerp(mean, 0.1) if entry in state else mean
        state["RMS"] = float(_added_up(grad.norm()))
        return grad / (torch.outer(state["row"], state["col"]) / (state["row"].mean() + 1e-30) + 1e-8).sqrt()


class ScheduleFree(_Own):
    """Another copy of the weights, and numbers in the param groups that each step changes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, k=0, weight_sum=0.0, train_mode=True, lr_max=-1.0, **options)

    def update(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        group["k"] += 1
        group["weight_sum"] += group["lr"] ** 2
        group["lr_max"] = max(group["lr_max"], group["lr"])
        z = state.setdefault("z", torch.zeros_like(grad))
        z.sub_(grad * group["lr"] / group["weight_sum"] ** 0.5)
        return grad - z / group["k"]


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, whose param groups and state it shows as its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                group["lookahead_step"] = group.get("lookahead_step", 0) + 1
                for parameter in (one for one in group["params"] if one.grad is not None):
                    slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
                    if group["lookahead_step"] % 2 == 0:
                        slow.lerp_(parameter, 0.5)
                        parameter.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class WithMasters(torch.optim.AdamW):
    """Steps on float32 clones of the model's parameters, and copies them back."""

    def __init__(self, params: Any) -> None:
        self.working = list(params)
        super().__init__([one.detach().float().clone().requires_grad_() for one in self.working], lr=0.01)

    @property
    def masters(self) -> list[Any]:
        return [one for group in self.param_groups for one in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        for one in self.working:
            one.grad = None
        loss = closure()
        for master, one in zip(self.masters, self.working, strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        super().step()
        with torch.no_grad():
            for master, one in zip(self.masters, self.working, strict=True):
                one.copy_(master)
        return loss


class Chained(torch.optim.Optimizer):
    """Muon and AdamW in one, as Megatron's: its state dict has theirs by name."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        wide = [one for one in params if one.dim() > 1]
        rest = [one for one in params if one.dim() < 2]
        inner = {"muon": Muon(wide), "adam": torch.optim.AdamW(rest) if rest else None}
        self.inner = {name: one for name, one in inner.items() if one is not None}
        super().__init__(params, {})
        self.param_groups = [group for one in self.inner.values() for group in one.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for one in self.inner.values():
            one.step()
        return loss

    def state_dict(self) -> Any:
        return {name: one.state_dict() for name, one in self.inner.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        for name, one in self.inner.items():
            one.load_state_dict(state_dict[name])


class ChainedInList(Chained):
    """The same, with a list of state dicts."""

    def state_dict(self) -> Any:
        return list(super().state_dict().values())

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(dict(zip(self.inner, state_dict, strict=True)))


class NoOptimizer:
    """An object that is no optimizer of torch, without param groups; its state dict is a tuple."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.moments = [torch.zeros_like(one) for one in self.params]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.steps += 1
        for parameter, moment in zip(self.params, self.moments, strict=True):
            if parameter.grad is not None:
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(moment, alpha=0.01 / self.steps)
        return loss

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None

    def state_dict(self) -> Any:
        return self.steps, {"moments": self.moments, "seen": frozenset({self.steps})}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state[0]
        for moment, saved in zip(self.moments, state[1]["moments"], strict=True):
            moment.copy_(saved)
