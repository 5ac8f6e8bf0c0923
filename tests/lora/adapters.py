"""LoRA adapters of a Hugging Face model, and what each rank of an NxD job holds of them."""

import torch

from tests.hugging_face.reference import Job, Model, State

RANK, ALPHA = 2, 8


def adapters_of(model: Model) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A, B) of every Hugging Face layer; layers that NxD fuses have the same A."""
    torch.manual_seed(5)
    shared: dict[tuple[str, str], torch.Tensor] = {}
    found = {}
    for name, weight in model.state().items():
        layer, _, last = name.removesuffix(".weight").rpartition(".")
        if last.endswith("_proj"):
            fused = last if last in ("o_proj", "down_proj") else layer
            a = shared.setdefault((layer, fused), torch.randn(RANK, weight.shape[1]))
            found[f"{layer}.{last}"] = a, torch.randn(len(weight), RANK)
    return found


def adapters_of_rank(job: Job, tp_rank: int) -> State:
    """A rank's part, by NxD's names: cut, ordered and fused as the weights that they are added to.

    Weights whose columns are all one column of B, or whose rows are one row of A, go through the job as weights do.
    """
    adapters = adapters_of(job.model)
    held: dict[str, list[State]] = {"A": [], "B": []}
    for one in range(RANK):
        by_rows = {f"{name}.weight": a[one].expand(len(b), -1) for name, (a, b) in adapters.items()}
        by_columns = {f"{name}.weight": b[:, one, None].expand(-1, a.shape[1]) for name, (a, b) in adapters.items()}
        for letter, weights in (("A", by_rows), ("B", by_columns)):
            held[letter].append(job.rank({**job.model.state(), **weights}, tp_rank))
    found: State = {}
    for name in held["A"][0]:
        layer, _, weight = name.rpartition(".")
        if layer.endswith("_proj"):
            found[f"{layer}.lora_A.weight"] = torch.stack([state[name][0] for state in held["A"]])
            found[f"{layer}.lora_B.{weight}"] = torch.stack([state[name][:, 0] for state in held["B"]]).T
    return found
