"""One rank that ends right after its last collective, while something still holds its process groups."""

import sys

import torch
import torch.distributed as dist

from rlhf_mp.cluster.ranks import leave_ranks


def main(num_numbers: str) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group()
    for _ in range(20):
        tensors = [torch.randn(int(num_numbers)) for _ in range(8)]
        for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
            work.wait()
        gathered = tensors[0].new_empty(2 * int(num_numbers))
        dist.all_gather_into_tensor(gathered, tensors[0], group=group)
    sys.kept = group, dist.group.WORLD  # as DeepSpeed and Megatron keep theirs
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
