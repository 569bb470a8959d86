"""Models: Hugging Face checkpoints and what is computed on top of their hidden states."""

import os
import warnings

# Before transformers is imported. On CPU torchvision is there for an import alone: its image codecs may not load.
warnings.filterwarnings("ignore", message="Failed to load image Python extension")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a bar for each rank, over the one that counts steps
