"""Objects as SGLang's workers decode them: a pickle in base64 in which tensors are handles, not bytes."""

import base64
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing  # registers how tensors are pickled as handles

# Handles as files in shared memory: the default, file descriptors, needs a connection back to the sender,
# which only children of one parent can authenticate.
torch.multiprocessing.set_sharing_strategy("file_system")


def encode(value: Any) -> str:
    """One use only: every receiving process needs an encoding of its own."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()
