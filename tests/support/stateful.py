"""What is saved as it is: an object for state=, and a module of nothing but extra state."""

from typing import Any

import torch


class Object:
    """Anything with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Extra(torch.nn.Module):
    """A model with such extra state."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state
