"""A model of named parameters, and an optimizer of it, whose content one number per name tells."""

from typing import Any

import torch


class Named(torch.nn.Module):
    """A module with these parameters, of one element each."""

    def __init__(self, values: dict[str, float]) -> None:
        super().__init__()
        self.named = {name: torch.nn.Parameter(torch.tensor([value])) for name, value in values.items()}
        for name, parameter in self.named.items():
            owner, _, last = name.rpartition(".")
            if owner and owner not in dict(self.named_modules()):
                self.add_module(owner, torch.nn.Module())
            self.get_submodule(owner).register_parameter(last, parameter)

    def held(self) -> dict[str, float]:
        return {name: parameter.item() for name, parameter in self.named.items()}


def stepped(model: Named, lr: float = 0.5, kind: Any = torch.optim.AdamW) -> Any:
    """An optimizer that has state for every parameter, 10 times its value; parameters stay as they are."""
    optimizer = kind(list(model.named.values()), lr=lr)
    for parameter in model.named.values():
        moments = {key: parameter.detach() * 10 for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(4.0), **moments}
    return optimizer


def averages(model: Named, optimizer: Any) -> dict[str, float]:
    return {name: optimizer.state[p]["exp_avg"].item() for name, p in model.named.items() if p in optimizer.state}
