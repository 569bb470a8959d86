"""What the forward pass keeps for the backward pass, in host memory meanwhile.

By groups of layers: while one group computes, what the group before it kept is on its way to the host, and in the
backward pass the group before the one that computes is on its way back. At most two groups are on the device at once.
On a GPU copies run on a stream of their own; on a CPU the same code copies within the host's memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class _Group:
    """What some layers kept."""

    on_host: list[Tensor] = field(default_factory=list)
    leaving: list[Tensor] = field(default_factory=list)  # still on the device, until their copies are made
    sent: dict[tuple, int] = field(default_factory=dict)  # what is leaving: several operations keep the same tensor
    back: list[Tensor] = field(default_factory=list)  # on the device again
    moved: torch.cuda.Event | None = None  # the last copy in either direction


class ActivationOffload:
    """Of one model. ``saving()`` goes around a forward pass; its backward pass may come any time after.

    Args:
        layers_per_group: 0: every tensor by itself, computing waits for each.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, layers_per_group: int):
        self.layers, self.device, self.layers_per_group = layers, device, layers_per_group
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_bytes = 0  # moved so far, in both directions

    @contextmanager
    def saving(self) -> Iterator[None]:
        groups = [_Group()]

        def enter_layer(index: int) -> Callable:
            def hook(*_: object) -> None:
                if self.layers_per_group and index and index % self.layers_per_group == 0:
                    self._close(groups)

            return hook

        def pack(tensor: Tensor) -> Tensor | tuple[int, int]:
            stays = _is_weight(tensor) or tensor.device.type != self.device.type
            return tensor if stays else self._send(groups, tensor)

        def unpack(saved: Tensor | tuple[int, int]) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._receive(groups, *saved)

        handles = [layer.register_forward_pre_hook(enter_layer(i)) for i, layer in enumerate(self.layers)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            for handle in handles:
                handle.remove()
        for group in groups:
            self._forget(group)

    def _send(self, groups: list[_Group], tensor: Tensor) -> tuple[int, int]:
        group, key = groups[-1], (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key in group.sent:
            return len(groups) - 1, group.sent[key]
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.copies is not None)
        with self._copying(group):
            host.copy_(tensor, non_blocking=True)
        group.on_host.append(host)
        group.leaving.append(tensor)
        group.sent[key] = len(group.on_host) - 1
        self.num_bytes += host.nbytes
        if not self.layers_per_group:
            self._forget(group)
        return len(groups) - 1, len(group.on_host) - 1

    def _close(self, groups: list[_Group]) -> None:
        """The next group begins: the one before the last has had the time of a whole group to leave."""
        if len(groups) > 1:
            self._forget(groups[-2])
        groups.append(_Group())

    def _forget(self, group: _Group) -> None:
        """Free the device's copies of what has left: once its stream has got there, which nobody waits for."""
        self._wait(group)
        group.leaving.clear()
        group.sent.clear()

    def _receive(self, groups: list[_Group], number: int, index: int) -> Tensor:
        group = groups[number]
        if not self.layers_per_group:
            return self._fetched(group, [group.on_host[index]])[0]
        for later in groups[number + 1 :]:
            later.back = []  # used up
        if not group.back:
            self._fetch(group)
        self._wait(group)
        if number and not groups[number - 1].back:
            self._fetch(groups[number - 1])
        return group.back[index]

    def _fetch(self, group: _Group) -> None:
        group.back = self._fetched(group, group.on_host)

    def _fetched(self, group: _Group, on_host: Sequence[Tensor]) -> list[Tensor]:
        with self._copying(group):
            back = [tensor.to(self.device, non_blocking=True, copy=True) for tensor in on_host]
        if self.copies is not None:
            for tensor in back:  # made on one stream, used on another: not to be given away before that is done
                tensor.record_stream(torch.cuda.current_stream(self.device))
        if not self.layers_per_group:
            self._wait(group)
        self.num_bytes += sum(tensor.nbytes for tensor in back)
        return back

    @contextmanager
    def _copying(self, group: _Group) -> Iterator[None]:
        if self.copies is None:
            yield
            return
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            yield
            group.moved = self.copies.record_event()

    def _wait(self, group: _Group) -> None:
        """What is computed from now on comes after the group's copies."""
        if group.moved is not None:
            torch.cuda.current_stream(self.device).wait_event(group.moved)


def _is_weight(tensor: Tensor) -> bool:
    """Weights stay where they are: they are no activations, and under ZeRO-3 they come and go by themselves."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The longest list of modules in ``model``."""
    return max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len, default=())
